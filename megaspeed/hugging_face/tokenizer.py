"""The tokenizer that goes with a model: its files, and the ids that a config.json names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaspeed.checkpoint.tokenizer_files import TOKENIZER, read_tokenizer_files
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import (
    NoEndOfText,
    TextTokenizer,
    load_tokenizer,
    special_tokens,
)

_OLDER = ("vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class ModelTokenizer:
    """The files of a tokenizer, and what of it a model's config repeats.

    Attributes:
        files: name -> content.
        bos_token_id, eos_token_id: of the tokens that begin and end a text; None where it has none.
        remark: what is to be known about it.
    """

    files: Mapping[str, bytes]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    remark: str = ""

    def __str__(self) -> str:
        files = ", ".join(self.files) or "none"
        return f"tokenizer: {files}{self.remark and '; '}{self.remark}"

    def ids(self) -> dict[str, int | None]:
        """As a config.json and a generation_config.json name them."""
        return {"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id}


def find_tokenizer(
    folder: Path, vocab_size: int, *, named: Path | None, mend: str
) -> ModelTokenizer:
    """The tokenizer that is named, or else that beside a model; without files if there is neither.

    Args:
        folder: of the model.
        vocab_size: of the model.
        named: a folder or a tokenizer.json.
        mend: what can be done where the one beside the model cannot be taken.

    Raises:
        DataError: it cannot be read, or has more entries than the model.
    """
    if named is not None:
        return _read_tokenizer(named, vocab_size, "--tokenizer")
    if not any((folder / name).is_file() for name in (TOKENIZER, *_OLDER)):
        return ModelTokenizer({}, remark="name one with --tokenizer")
    try:
        return _read_tokenizer(folder, vocab_size, "the tokenizer beside a model")
    except DataError as error:
        raise DataError(f"{error}; or {mend}") from error


def _read_tokenizer(source: Path, vocab_size: int, setting: str) -> ModelTokenizer:
    """The tokenizer of a folder or of a tokenizer.json, of whatever age.

    One of which no token is known to end a text is a model's nevertheless; it is remarked upon.
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
            f"every token id must be below the model's vocab_size: that is {vocab_size}, and "
            f"{setting}, {source}, has {loaded.vocab_size} entries; remove the tokens that were "
            "added to it, or give the model rows for them by transformers' resize_token_embeddings"
        )
    bos = next(special_tokens(folder, "bos_token"), None)
    return ModelTokenizer(
        made | (read_tokenizer_files(source) if source.is_dir() else {}),
        bos_token_id=None if bos is None else loaded.tokenizer.token_to_id(bos),
        eos_token_id=eos,
        remark=remark,
    )
