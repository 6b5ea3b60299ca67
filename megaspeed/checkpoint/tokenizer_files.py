"""The tokenizer that a checkpoint carries: the files that transformers' AutoTokenizer reads.

A model without its tokenizer is a table of numbers. The files are small, and stand in the manifest
like every other file of a checkpoint. One that was imported has its generation_config.json, too.
"""

from collections.abc import Mapping
from pathlib import Path

from megaspeed.checkpoint.manifest import FileSeal
from megaspeed.files.durable import write_file

TOKENIZER = "tokenizer.json"
"""The file that makes a folder one with a tokenizer."""

FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What a tokenizer's folder may have, as save_pretrained writes it."""

GENERATION = "generation_config.json"
"""How transformers' `generate` continues a text: the tokens that end it, and how it samples."""


def read_tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    """Name -> content of those that ``folder`` has; nothing where there is no folder."""
    if folder is None:
        return {}
    files = {name: folder / name for name in FILES}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def write_tokenizer_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileSeal]:
    """Writes them into ``folder``; returns what each is."""
    return {name: _write(folder / name, content) for name, content in files.items()}


def _write(file: Path, content: bytes) -> FileSeal:
    write_file(file, lambda stream: stream.write(content))
    return FileSeal.of(content)
