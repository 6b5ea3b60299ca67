"""What goes with a model's weights: its tokenizer, and how transformers continues a text with it.

    DIR/tokenizer.json, ...      the tokenizer                                      -> checkpoint
    DIR/generation_config.json   tokens that end a text, padding, sampling          -> checkpoint
    DIR/config.json              in models without the former, the token ids alone /

An import copies these files into the checkpoint, and an export copies them back. Checkpoints of a
run that starts from the import keep them as long as the run uses the same tokenizer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, GenerationConfig

from megaspeed.checkpoint.manifest import GENERATION, TOKENIZER, read_tokenizer_files
from megaspeed.config.document import JsonSyntaxError, describe_value, read_json_object
from megaspeed.config.hugging_face import CONFIG_FILE, DAMAGED, hugging_face_config, read_keys
from megaspeed.config.model import ModelConfig
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import (
    NoEndOfText,
    TextTokenizer,
    load_tokenizer,
    quiet_transformers,
    special_tokens,
)
from megaspeed.hugging_face.weight_files import HuggingFaceError

_OLDER = ("vocab.json", "tokenizer.model")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class ModelTokenizer:
    """The files of a tokenizer, and its token ids that a model's config repeats."""

    files: Mapping[str, bytes]  # name -> content
    bos_token_id: int | None = None  # begins a text; None if there is no such token
    eos_token_id: int | None = None  # ends a text; None if there is no such token
    remark: str = ""  # what the user should know about it

    def __str__(self) -> str:
        files = ", ".join(self.files) or "none"
        return f"tokenizer: {files}{self.remark and '; '}{self.remark}"

    def ids(self) -> dict[str, int | None]:
        """The special tokens' ids by their keys in config.json and generation_config.json."""
        return {"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id}


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer, of the current or an older format."""
    return any((folder / name).is_file() for name in (TOKENIZER, *_OLDER))


def find_tokenizer(
    folder: Path, vocab_size: int, *, named: Path | None, mend: str
) -> ModelTokenizer:
    """The tokenizer that the user named; otherwise the one in a model's folder, if any.

    Args:
        folder: the folder of the model.
        vocab_size: the vocabulary size of the model.
        named: a folder or a tokenizer.json; None if the user named none.
        mend: what the user can do if the one in the model's folder cannot be used.

    Raises:
        DataError: it cannot be read, or has more entries than the model.
    """
    if named is not None:
        return _read_tokenizer(named, vocab_size, "--tokenizer")
    if not has_tokenizer(folder):
        return ModelTokenizer({}, remark="name one with --tokenizer")
    try:
        return _read_tokenizer(folder, vocab_size, "the tokenizer beside a model")
    except DataError as error:
        raise DataError(f"{error}; or {mend}") from error


def _read_tokenizer(source: Path, vocab_size: int, setting: str) -> ModelTokenizer:
    """The tokenizer of a folder or of a tokenizer.json, of any format.

    If no end-of-text token is known, it is still the model's tokenizer, with a remark.
    """
    folder = source if source.is_dir() else source.parent
    eos, remark = None, ""
    try:
        loaded = load_tokenizer(str(source), setting)
        eos = loaded.end_of_text
        made = loaded.files()
    except NoEndOfText as error:
        loaded = TextTokenizer(error.tokenizer, end_of_text=0)
        made = {TOKENIZER: loaded.to_json()}
        remark = f"no text can be prepared with it as it is: {error}"
    if loaded.vocab_size > vocab_size:
        raise DataError(
            f"every token id must be below the model's vocab_size: that is {vocab_size}, but "
            f"{setting}, {source}, has {loaded.vocab_size} entries; remove the tokens that were "
            "added to it, or add rows for them to the model with transformers' "
            "resize_token_embeddings"
        )
    bos = next(special_tokens(folder, "bos_token"), None)
    return ModelTokenizer(
        made | (read_tokenizer_files(source) if source.is_dir() else {}),
        bos_token_id=None if bos is None else loaded.tokenizer.token_to_id(bos),
        eos_token_id=eos,
        remark=remark,
    )


def generation_files(folder: Path, ids: Keys, model: ModelConfig) -> dict[str, bytes]:
    """Name -> content of the generation_config.json that a checkpoint of a model carries, if any.

    Args:
        folder: the folder of the model.
        ids: ids that replace the model's own, because the user named another tokenizer.
        model: the model.

    Raises:
        HuggingFaceError: a file of the model is damaged, or transformers refuses a value.
    """
    own = read_generation(folder)
    keys = {**token_ids(read_keys(str(folder))), **own, **token_ids(ids)}
    reason = _refusal(keys, model)
    if reason is None:
        return {GENERATION: json_file(keys)} if keys else {}
    # Name the key without which transformers accepts the others, if there is one.
    rest = {key: {name: keys[name] for name in keys if name != key} for key in keys}
    key = next((key for key in keys if _refusal(rest[key], model) is None), None)
    what = "its values" if key is None else f"{key}, which is {describe_value(keys[key])}"
    file = GENERATION if key is None or key in own else CONFIG_FILE
    raise HuggingFaceError(
        f"{folder / file}: transformers refuses {what} ({reason}); mend or remove it, or no export "
        "can be loaded"
    )


def _refusal(keys: Keys, model: ModelConfig) -> str | None:
    """transformers' reason to refuse a model with these settings."""
    with quiet_transformers():
        try:
            GenerationConfig.from_dict(dict(keys))
            AutoConfig.for_model(**{**hugging_face_config(model), **token_ids(keys)})
            if model.positions == "rotary":  # only GPT-2's embedding ignores padding
                nn.Embedding(model.vocab_size, 1, keys.get("pad_token_id"), device="meta")
        except Exception as error:  # transformers raises many kinds
            return " ".join(str(error).split()) or type(error).__name__
    return None


def read_generation(folder: Path) -> Keys:
    """The content of a folder's generation_config.json; empty if there is none.

    Raises:
        HuggingFaceError: the file is damaged.
    """
    file = folder / GENERATION
    try:
        return read_json_object(file)[0] if file.exists() else {}
    except JsonSyntaxError as error:
        raise HuggingFaceError(f"{error}: {DAMAGED}") from error


def token_ids(keys: Keys) -> dict[str, Any]:
    """The special ids that a file states. Each is one id, or a list; several may end a text."""
    return {key: keys[key] for key in _IDS if keys.get(key) is not None}


def json_file(values: Keys) -> bytes:
    """JSON in the layout that transformers writes."""
    return (json.dumps(values, indent=2) + "\n").encode()
