"""How transformers continues a text with a model: what an import keeps and an export gives back.

    DIR/generation_config.json   several tokens that end a text, padding, sampling   -> checkpoint
    DIR/config.json              the ids alone, in models without the former        /

A run that goes on from the checkpoint keeps it as long as its tokenizer is the same.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaspeed.checkpoint.reading import GENERATION
from megaspeed.config.hugging_face import CONFIG_FILE, DAMAGED
from megaspeed.config.strict_json import JsonSyntaxError, read_json_object
from megaspeed.hugging_face.errors import HuggingFaceError

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

Keys = Mapping[str, Any]


def generation_files(folder: Path, ids: Keys) -> dict[str, bytes]:
    """Name -> content of the file that a checkpoint of the model in ``folder`` carries, if any.

    Args:
        folder: of the model.
        ids: those of a tokenizer that was named count rather than the model's.

    Raises:
        HuggingFaceError: the model's is damaged.
    """
    keys = {**token_ids(_read(folder / CONFIG_FILE)), **read_generation(folder), **token_ids(ids)}
    return {GENERATION: json_file(keys)} if keys else {}


def read_generation(folder: Path) -> Keys:
    """What the generation_config.json in a folder says; nothing where there is none.

    Raises:
        HuggingFaceError: it is damaged.
    """
    return _read(folder / GENERATION)


def token_ids(keys: Keys) -> dict[str, Any]:
    """Those of a file that it states: one id, or several of which each ends a text."""
    return {key: keys[key] for key in _IDS if keys.get(key) is not None}


def json_file(values: Keys) -> bytes:
    """As transformers writes its files."""
    return (json.dumps(values, indent=2) + "\n").encode()


def _read(file: Path) -> Keys:
    if not file.exists():
        return {}
    try:
        return read_json_object(file)[0]
    except JsonSyntaxError as error:
        raise HuggingFaceError(f"{error}: {DAMAGED}") from error
