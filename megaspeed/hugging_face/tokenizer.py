"""What goes with a model's weights: its tokenizer, and how transformers continues a text with it.

    DIR/tokenizer.json, ...      the tokenizer                                      -> checkpoint
    DIR/generation_config.json   tokens that end a text, padding, sampling          -> checkpoint
    DIR/config.json              in models without the former, the token ids alone /

An import copies these files into the checkpoint, and an export copies them back. Checkpoints of a
run that starts from the import keep them as long as the run uses the same tokenizer.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspeed.checkpoint.folders import GENERATION, TOKENIZER, read_tokenizer_files
from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.config.hugging_face import DAMAGED
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import (
    CONFIG_FILE,
    NoEndOfText,
    TextTokenizer,
    load_tokenizer,
    special_tokens,
)
from megaspeed.hugging_face.weights import HuggingFaceError

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class ModelTokenizer:
    """The files of a tokenizer, and its token ids that a model's config repeats."""

    files: Mapping[str, bytes]  # name -> content
    loaded: TextTokenizer | None = None  # None if no token is known to end a text
    bos_token_id: int | None = None  # begins a text; None if there is no such token
    pad_token_id: int | None = None  # its own token for padding; None if there is no such token
    remark: str = ""  # what the user should know about it

    def __str__(self) -> str:
        files = ", ".join(self.files) or "none"
        return f"tokenizer: {files}{self.remark and '; '}{self.remark}"

    def ids(self) -> dict[str, int | None]:
        """The special tokens' ids by their keys in config.json and generation_config.json."""
        eos = None if self.loaded is None else self.loaded.end_of_text
        return {"bos_token_id": self.bos_token_id, "eos_token_id": eos}

    def for_batches(self, positions: int, pad: Any) -> tuple[Mapping[str, bytes], int | None]:
        """Return the files, with a padding token and the longest text stated, and the token's id.

        The token is the tokenizer's own, otherwise ``pad`` of the model, otherwise the end-of-text.
        Padding is on the left, because tokens are generated on the right. If no token is known to
        end a text, the files are unchanged, and the id is None.
        """
        if self.loaded is None:
            return self.files, None
        known = pad if pad in range(self.loaded.vocab_size) else self.loaded.end_of_text
        padding = known if self.pad_token_id is None else self.pad_token_id
        stated = json.loads(self.files[CONFIG_FILE])
        limit = stated.get("model_max_length")
        config = {
            "padding_side": "left",
            **stated,
            "pad_token": self.loaded.tokenizer.id_to_token(padding),
            "model_max_length": min(limit, positions) if isinstance(limit, int) else positions,
        }
        return {**self.files, CONFIG_FILE: json_file(config)}, padding


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
    if not (folder / TOKENIZER).is_file():
        return ModelTokenizer({}, remark="name one with --tokenizer")
    try:
        return _read_tokenizer(folder, vocab_size, "the tokenizer beside a model")
    except DataError as error:
        raise DataError(f"{error}; or {mend}") from error


def _read_tokenizer(source: Path, vocab_size: int, setting: str) -> ModelTokenizer:
    """The tokenizer of a folder or of a tokenizer.json, of any format.

    If no end-of-text token is known, it is still the model's tokenizer, with a remark.
    """
    remark = ""
    try:
        loaded = words = load_tokenizer(str(source), setting)
        made = loaded.files()
    except NoEndOfText as error:
        loaded, words = None, TextTokenizer(error.tokenizer, end_of_text=0)
        made = {TOKENIZER: words.to_json()}
        remark = f"no text can be prepared with it as it is: {error}"
    if words.vocab_size > vocab_size:
        raise DataError(
            f"every token id must be below the model's vocab_size: that is {vocab_size}, but "
            f"{setting}, {source}, has {words.vocab_size} entries; remove the tokens that were "
            "added to it, or add rows for them to the model with transformers' "
            "resize_token_embeddings"
        )
    folder = source if source.is_dir() else source.parent
    to_id = words.tokenizer.token_to_id
    return ModelTokenizer(
        made | (read_tokenizer_files(source) if source.is_dir() else {}),
        loaded=loaded,
        bos_token_id=next(map(to_id, special_tokens(folder, "bos_token")), None),
        pad_token_id=next(map(to_id, special_tokens(folder, "pad_token")), None),
        remark=remark,
    )


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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and warnings, but not its errors."""
    from transformers.utils import logging  # slow to import, and rarely needed

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
