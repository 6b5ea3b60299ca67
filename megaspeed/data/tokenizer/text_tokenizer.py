"""A tokenizer that exists on disk: as Hugging Face writes it, read and written.

FOLDER/tokenizer.json           text -> ids
       tokenizer_config.json    which token ends a document, and what else AutoTokenizer reads
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from megaspeed.config.strict_json import JsonSyntaxError, read_json_object
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer.quiet_transformers import quiet_transformers
from megaspeed.files.durable import write_file
from megaspeed.files.reading import special_among

TRAIN = "train"
END_OF_TEXT = "<|endoftext|>"
_SETTING = "data.tokenizer"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# AutoTokenizer reads in one of them which class the older files are of.
_NAMES_THE_CLASS = (CONFIG_FILE, "config.json")
_CONFIG_FILES = (CONFIG_FILE, "special_tokens_map.json")
# The parts of a tokenizer.json that may put a space before a text.
_PUT_FIRST_SPACE = ("normalizer", "pre_tokenizer")
# Of Prepend, Metaspace and ByteLevel, as tokenizer.json names them.
_NO_FIRST_SPACE = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
_TOKENIZER_FILES = ("*.json", "*.txt", "*.model")


class NoEndOfText(DataError):
    """A tokenizer of which no token is known to end a document; else it is as it should be.

    Attributes:
        tokenizer: it.
    """

    def __init__(self, problem: str, tokenizer: Tokenizer) -> None:
        super().__init__(problem)
        self.tokenizer = tokenizer


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the id of the token that ends a document.

    Attributes:
        tokenizer: without the limits of any model.
        end_of_text: the id.
        stated: the tokenizer_config.json that came with it; empty where none did.
    """

    tokenizer: Tokenizer
    end_of_text: int
    stated: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A tokenizer.json may carry the limits of the model it was made for. They would cut
        # documents short or pad them.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # It may also carry how its own model was trained: with merges left out by chance.
        if isinstance(self.tokenizer.model, BPE):
            self.tokenizer.model.dropout = None
        # Text that spells a special token is text: only the packing ends a document.
        self.tokenizer.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer as JSON."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """What tokenizer_config.json says, so that AutoTokenizer gives this tokenizer.

        Its own where it has one; the end-of-text token is always named.
        """
        made = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        end_of_text = self.tokenizer.id_to_token(self.end_of_text)
        names_it = _content(self.stated.get("eos_token")) == end_of_text
        return {
            **(self.stated or made),
            "eos_token": self.stated["eos_token"] if names_it else end_of_text,
        }

    def to_json(self) -> bytes:
        """The tokenizer as the bytes of a tokenizer.json."""
        return self.tokenizer.to_str(pretty=True).encode("utf-8")

    def files(self) -> dict[str, bytes]:
        """Name -> bytes of the files that a folder with this tokenizer has."""
        config = json.dumps(self.config, indent=2, ensure_ascii=False).encode("utf-8")
        return {TOKENIZER_FILE: self.to_json(), CONFIG_FILE: config}

    def save(self, folder: Path) -> None:
        """Writes the folder, so that `load_tokenizer` and AutoTokenizer load it.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_file(folder / name, methodcaller("write", content))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens, on all threads."""
        return _encoded(self.tokenizer, texts)

    def encode_continued(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts each of which goes on with another one.

        They are encoded as they are: no space is put before them, as Llama 2's tokenizer puts one
        before a whole text. (It puts one behind each added token that is not special, too; where a
        text has such tokens, that one is left out.)
        """
        return _encoded(self._continuing, texts) if texts else []

    @cached_property
    def _continuing(self) -> Tokenizer:
        """The tokenizer without the space that it puts before a text.

        One that first removes the spaces before a text is used as it is.
        """
        parts = {name: _as_json(getattr(self.tokenizer, name)) for name in _PUT_FIRST_SPACE}
        changed = _without_first_space(parts)
        if changed == parts:
            return self.tokenizer
        whole = json.loads(self.tokenizer.to_str())
        continuing = Tokenizer.from_str(json.dumps({**whole, **changed}))
        continuing.encode_special_tokens = True
        keeps_spaces = _encoded(continuing, [" a"]) == self.encode(["a"])
        return continuing if keeps_spaces else self.tokenizer


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _as_json(part: Any) -> Any:
    """A normalizer or pre-tokenizer as JSON; the vocabulary, which is large, is left alone."""
    return None if part is None else json.loads(part.__getstate__())


def _without_first_space(part: Any) -> Any:
    """Normalizers and pre-tokenizers as JSON, with what they put before a text switched off."""
    if isinstance(part, list):
        return [_without_first_space(item) for item in part]
    if isinstance(part, dict):
        return {
            key: _NO_FIRST_SPACE.get(key, _without_first_space(value))
            for key, value in part.items()
        }
    return part


def load_tokenizer(source: str, setting: str = _SETTING) -> TextTokenizer:
    """The tokenizer of a tokenizer.json, or of a folder as Hugging Face writes it.

    Only local files are read. A folder without a tokenizer.json goes through transformers'
    `AutoTokenizer`, which knows the older file formats.

    Args:
        source: the path.
        setting: where it comes from, for the messages.

    Raises:
        DataError: no such path, not a tokenizer, one without entries, or a damaged
            tokenizer_config.json.
        NoEndOfText: no token is known to end a document.
    """
    path = Path(source)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not os.path.exists(path):
        law = f'is "{TRAIN}" or a path' if setting == _SETTING else "is a path"
        raise DataError(
            f"{setting} {law} (nothing is downloaded), and there is no {path.absolute()}; "
            "correct the path"
        )
    special = next(special_among(_files_beside(path)), None)
    if special is not None:
        raise DataError(f"{setting}: {special}; name another tokenizer")
    stated = _read_object(file.parent / CONFIG_FILE)
    tokenizer = _of_file(file, setting) if file.is_file() else _older_format(path, setting)
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise DataError(f"{setting} must have entries, and {path} has none; fetch it again")
    return TextTokenizer(tokenizer, _find_end_of_text(tokenizer, file.parent), stated)


def tokenizer_files(source: str) -> list[Path]:
    """Every file that `load_tokenizer(source)` may read, sorted."""
    return [file for file in _files_beside(Path(source).absolute()) if file.is_file()]


def _files_beside(path: Path) -> list[Path]:
    """Where the files of the tokenizer at `path` may be."""
    if path.is_dir():
        return sorted({file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)})
    return sorted({path, *(path.parent / name for name in _CONFIG_FILES)})


def check_vocabulary(tokenizer_size: int, source: str, vocab_size: int) -> None:
    """Raises DataError unless every id of the tokenizer has a row in the model's embedding."""
    if tokenizer_size > vocab_size:
        raise DataError(
            "every token id must be below model.vocab_size, and the tokenizer "
            f"{source!r} has {tokenizer_size} entries while model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer_size} or use a smaller tokenizer"
        )


def _find_end_of_text(tokenizer: Tokenizer, folder: Path) -> int:
    """The id of the folder's `eos_token`; where it names none, of a name in common use."""
    names = tuple(special_tokens(folder, "eos_token")) or _END_OF_TEXT_NAMES
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return token_id
    raise NoEndOfText(
        f"a document must end with a token of its own, and the tokenizer in {folder} has none of "
        f"{', '.join(names)}; name its eos_token in {folder / CONFIG_FILE}",
        tokenizer,
    )


def special_tokens(folder: Path, role: str) -> Iterator[str]:
    """The token that has a role such as "eos_token", of each file of a tokenizer that names one.

    Raises:
        DataError: a file is damaged.
    """
    for file in _CONFIG_FILES:
        token = _content(_read_object(folder / file).get(role))
        if token is not None:
            yield token


def _content(token: Any) -> str | None:
    """The text of a special token, which may be written out in full as an added token."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no such file.

    Raises:
        DataError: there is one, and it holds something else.
    """
    if not file.exists():
        return {}
    try:
        return read_json_object(file)[0]
    except JsonSyntaxError as error:
        raise DataError(
            f"{error}; take it from where the tokenizer is from, or remove it to do without"
        ) from error


def _of_file(file: Path, setting: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the bindings raise bare Exception
        raise DataError(
            f"{setting} must be a tokenizer.json or a folder with one, and {file} cannot be read "
            f"as such ({error}); save it with save_pretrained"
        ) from error


def _older_format(folder: Path, setting: str) -> Tokenizer:
    try:
        if not any((folder / name).is_file() for name in _NAMES_THE_CLASS):
            raise FileNotFoundError(folder)
        from transformers import AutoTokenizer  # slow to import, and rarely needed

        with quiet_transformers():
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        tokenizer = loaded.backend_tokenizer
        assert isinstance(tokenizer, Tokenizer)
    except Exception as error:  # transformers raises many kinds, and advises what does not help
        raise DataError(
            f"{setting} must be a tokenizer.json or a folder with one, and {folder} has none, nor "
            "an older format that transformers reads here; save it with save_pretrained where it "
            "does (a tokenizer.model takes the package sentencepiece)"
        ) from error
    return tokenizer
