"""The tokenizer that goes with a model: its files, and the ids that a config.json names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaspeed.checkpoint.tokenizer_files import TOKENIZER, read_tokenizer_files
from megaspeed.data.tokenizer import check_vocabulary, load_tokenizer

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_OLDER = ("vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class ModelTokenizer:
    """The files of a tokenizer, and what of it a model's config repeats.

    Attributes:
        files: name -> content.
        bos_token_id, eos_token_id: of the tokens that begin and end a text; None where it has none.
    """

    files: Mapping[str, bytes]
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def ids(self) -> dict[str, int | None]:
        """As a config.json and a generation_config.json name them."""
        return {"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id}


def find_tokenizer(folder: Path, vocab_size: int) -> ModelTokenizer:
    """The tokenizer beside a model, without files where there is none.

    Raises:
        DataError: it cannot be read, or has more entries than the model.
    """
    if any((folder / name).is_file() for name in (TOKENIZER, *_OLDER)):
        return read_tokenizer(folder, vocab_size)
    return ModelTokenizer({})


def read_tokenizer(source: Path, vocab_size: int) -> ModelTokenizer:
    """The tokenizer of a folder or of a tokenizer.json, of whatever age.

    Raises:
        DataError: it is none, or has more entries than the model, or no token that ends a text.
    """
    tokenizer = load_tokenizer(str(source))
    check_vocabulary(tokenizer.vocab_size, str(source), vocab_size)
    files = tokenizer.files() | (read_tokenizer_files(source) if source.is_dir() else {})
    bos = _named(files, "bos_token")
    return ModelTokenizer(
        files,
        bos_token_id=None if bos is None else tokenizer.tokenizer.token_to_id(bos),
        eos_token_id=tokenizer.end_of_text,
    )


def _named(files: Mapping[str, bytes], role: str) -> str | None:
    """The token that has a role, where a file names it."""
    for name in _CONFIGS:
        token = json.loads(files.get(name, b"{}")).get(role)
        if isinstance(token, dict):  # an added token written out in full
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None
