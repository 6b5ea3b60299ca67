"""Tokenizers in Hugging Face's format: load, save and train them.

    FOLDER/tokenizer.json           text -> ids
           tokenizer_config.json    which token ends a document, and what AutoTokenizer needs

A byte-level BPE (Radford et al., "Language models are unsupervised multitask learners", 2019,
section 2.2) begins with the 256 bytes, so it can encode any text. It merges the most frequent pair
until the vocabulary is full. Training is deterministic for any number of threads.

A long text is encoded in pieces, with an end-of-text token after each document:

    pieces   "The sun"  " rose." |  "It rained." |
    ids      464 4252   8278 13    1026 33697 13
    packed   464 4252   8278 13 END 1026 33697 13 END
                                 ^                 ^  document_ends 5, 9

Every piece is encoded separately, so the ids do not depend on the batches or on the number of
threads. Memory is bounded by one batch, however long the input is.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.data.documents import Document, read_pieces
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import PIECE_BYTES, Piece
from megaspeed.data.token_file import id_type
from megaspeed.files.durable import write_bytes
from megaspeed.files.paths import special_among

TRAIN = "train"
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TRAINING_SAMPLE_BYTES = 32 << 20
"""More text hardly improves a BPE, but makes its training longer."""

BATCH_CHARACTERS = 1 << 20
"""Characters that the threads encode together. They take about 100 MB of memory."""

_SETTING = "data.tokenizer"
_SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end-of-text token
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_CONFIG_FILES = (CONFIG_FILE, "special_tokens_map.json")
# The parts of a tokenizer.json that may add a space before a text, and how each is switched off:
# Prepend, Metaspace and ByteLevel.
_PUT_FIRST_SPACE = ("normalizer", "pre_tokenizer")
_NO_FIRST_SPACE = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}


class NoEndOfText(DataError):
    """No token of a tokenizer is known to end a document."""

    def __init__(self, problem: str, tokenizer: Tokenizer) -> None:
        super().__init__(problem)
        self.tokenizer = tokenizer


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the id of the token that ends a document."""

    tokenizer: Tokenizer  # the tokenizer, without truncation, padding and dropout
    end_of_text: int  # the id of the end-of-text token
    # The content of its tokenizer_config.json; empty if it has none.
    stated: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A tokenizer.json may carry the limits of the model it was made for, which would truncate
        # or pad documents, and the dropout of its own training, which would skip merges at random.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if isinstance(self.tokenizer.model, models.BPE):
            self.tokenizer.model.dropout = None
        # Text such as "<|endoftext|>" is not encoded as a special token. Only ``pack`` ends a
        # document.
        self.tokenizer.encode_special_tokens = True

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer as JSON."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def identity(self) -> list[str | int]:
        """What must be equal so that the same text gives the same ids, as JSON."""
        return [self.fingerprint, self.end_of_text]

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of tokenizer_config.json. It always names the end-of-text token."""
        default = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        end_of_text = self.tokenizer.id_to_token(self.end_of_text)
        names_it = _content(self.stated.get("eos_token")) == end_of_text
        return {
            **(self.stated or default),
            "eos_token": self.stated["eos_token"] if names_it else end_of_text,
        }

    def to_json(self) -> bytes:
        return self.tokenizer.to_str(pretty=True).encode("utf-8")

    def files(self) -> dict[str, bytes]:
        """Name -> content of the files in a folder with this tokenizer."""
        config = json.dumps(self.config, indent=2, ensure_ascii=False).encode("utf-8")
        return {TOKENIZER_FILE: self.to_json(), CONFIG_FILE: config}

    def save(self, folder: Path) -> None:
        """Write a folder that ``load_tokenizer`` and AutoTokenizer load.

        Raises OSError if it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_bytes(folder / name, content)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens. Uses all threads."""
        return _encoded(self.tokenizer, texts)

    def encode_continued(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that continue other texts.

        Llama 2's tokenizer, for example, adds a space before each text. Here, no space is added.
        (It also adds one after each added token that is not special, which is omitted here, too.)
        """
        return _encoded(self._continuing, texts) if texts else []

    def text_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of ``ids``, decoded after ``before``.

        Some tokenizers drop the first space of a text, and the ids of one character may be in both.
        """
        decode = self.tokenizer.decode
        prompt = decode(before, skip_special_tokens=True)
        both = decode([*before, *ids], skip_special_tokens=True)
        return both.removeprefix(prompt) if both.startswith(prompt) else decode(ids)

    @cached_property
    def _continuing(self) -> Tokenizer:
        """The tokenizer, changed so that it adds no space before a text.

        A tokenizer that removes spaces before a text is not changed.
        """
        complete = json.loads(self.tokenizer.to_str())
        parts = {name: complete[name] for name in _PUT_FIRST_SPACE}
        changed = _without_first_space(parts)
        if changed == parts:
            return self.tokenizer
        continuing = Tokenizer.from_str(json.dumps({**complete, **changed}))
        continuing.encode_special_tokens = True
        keeps_spaces = _encoded(continuing, [" a"]) == self.encode(["a"])
        return continuing if keeps_spaces else self.tokenizer


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _without_first_space(part: Any) -> Any:
    """Normalizers and pre-tokenizers as JSON, changed so that they add no space before a text."""
    if isinstance(part, list):
        return [_without_first_space(item) for item in part]
    if isinstance(part, dict):
        return {
            key: _NO_FIRST_SPACE.get(key, _without_first_space(value))
            for key, value in part.items()
        }
    return part


@dataclass(frozen=True)
class Packed:
    """The ids of some pieces."""

    ids: NDArray[np.unsignedinteger]  # shape (tokens,), including end-of-text tokens
    # Shape (documents that end here,). For each, the number of ids up to its end.
    document_ends: NDArray[np.int64]


def pack(pieces: Sequence[Piece], tokenizer: TextTokenizer, is_continued: bool = False) -> Packed:
    """Return the ids of consecutive pieces. ``is_continued``: the first continues a document."""
    continued = [is_continued, *(not piece.ends_document for piece in pieces)][: len(pieces)]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for piece, continues in zip(pieces, continued, strict=True):
        texts[continues].append(piece.text)
    encoded = {
        False: iter(tokenizer.encode(texts[False])),
        True: iter(tokenizer.encode_continued(texts[True])),
    }
    ids: list[int] = []
    document_ends: list[int] = []
    for piece, continues in zip(pieces, continued, strict=True):
        ids.extend(next(encoded[continues]))
        if piece.ends_document:
            ids.append(tokenizer.end_of_text)
            document_ends.append(len(ids))
    return Packed(
        np.asarray(ids, dtype=id_type(tokenizer.vocab_size)),
        np.asarray(document_ends, dtype=np.int64),
    )


def encode(pieces: Iterable[Piece], tokenizer: TextTokenizer) -> Iterator[Packed]:
    """Yield the ids of all pieces, in the order of the text. Uses all threads."""
    batch: list[Piece] = []
    characters, is_continued = 0, False
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield pack(batch, tokenizer, is_continued)
            batch, characters, is_continued = [], 0, not piece.ends_document
    if batch:
        yield pack(batch, tokenizer, is_continued)


def load_tokenizer(source: str, setting: str = _SETTING) -> TextTokenizer:
    """Load a tokenizer.json, or a folder that has one. Reads only local files.

    Args:
        source: the path.
        setting: the option or key it comes from, for messages.

    Raises:
        DataError: the path does not exist or is not a tokenizer, the tokenizer has no entries, or
            its tokenizer_config.json is damaged.
        NoEndOfText: no token is known to end a document.
    """
    path = Path(source)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not os.path.exists(path):
        raise DataError(
            f"{setting} is a path (nothing is downloaded), but there is no {path.absolute()}; "
            "correct the path"
        )
    special = next(special_among(_possible_files(path)), None)
    if special is not None:
        raise DataError(f"{setting}: {special}; name another tokenizer")
    stated = _read_object(file.parent / CONFIG_FILE)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the bindings raise bare Exception
        raise DataError(
            f"{setting} must be a tokenizer.json or a folder with one, but {file} cannot be read "
            f"as one ({error}); save it with AutoTokenizer's save_pretrained"
        ) from error
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise DataError(f"{setting} must have entries, but {path} has none; download it again")
    return TextTokenizer(tokenizer, _find_end_of_text(tokenizer, file.parent), stated)


def tokenizer_files(source: str) -> list[Path]:
    """Return every file that ``load_tokenizer(source)`` may read, sorted."""
    return [file for file in _possible_files(Path(source).absolute()) if file.is_file()]


def _possible_files(path: Path) -> list[Path]:
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return sorted([file, *(file.parent / name for name in _CONFIG_FILES)])


def check_vocabulary(tokenizer_size: int, source: str, vocab_size: int) -> None:
    """Raise DataError unless every id of the tokenizer has a row in the model's embedding."""
    if tokenizer_size > vocab_size:
        raise DataError(
            "every token id must be below model.vocab_size, but the tokenizer "
            f"{source!r} has {tokenizer_size} entries while model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer_size} or use a smaller tokenizer"
        )


def _find_end_of_text(tokenizer: Tokenizer, folder: Path) -> int:
    """Find the id of the folder's ``eos_token``, or else of a token with a common name."""
    names = tuple(special_tokens(folder, "eos_token")) or _END_OF_TEXT_NAMES
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return token_id
    raise NoEndOfText(
        f"a document must end with a token of its own, but the tokenizer in {folder} has none of "
        f"{', '.join(names)}; name its eos_token in {folder / CONFIG_FILE}",
        tokenizer,
    )


def special_tokens(folder: Path, role: str) -> Iterator[str]:
    """Yield the token with a role such as "eos_token", from each file that names one.

    Raises DataError if a file is damaged.
    """
    for file in _CONFIG_FILES:
        token = _content(_read_object(folder / file).get(role))
        if token is not None:
            yield token


def _content(token: Any) -> str | None:
    """Return the text of a special token, which may be written as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file.

    Raises DataError if the file holds something else.
    """
    if not file.exists():
        return {}
    try:
        return read_json_object(file)[0]
    except JsonSyntaxError as error:
        raise DataError(
            f"{error}; copy it again from the source of the tokenizer, or remove it"
        ) from error


def check_trainable(vocab_size: int, setting: str = "model.vocab_size") -> None:
    """Raise DataError if ``vocab_size`` has no room for the bytes and the end-of-text token."""
    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level BPE has at least {_SMALLEST_VOCABULARY} entries (256 bytes and "
            f"{END_OF_TEXT}), but {setting} is {vocab_size}; raise it, or use an existing tokenizer"
        )


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> TextTokenizer:
    """Return a byte-level BPE of at most ``vocab_size`` entries; the first is ``<|endoftext|>``.

    It has fewer entries only if the text has no more pairs to merge. If the corpus is larger than
    32 MiB, it is trained on 32 MiB: documents in the order of their content hashes, a practically
    random sample.

    Raises DataError if ``vocab_size`` has no room for the 256 bytes and the end-of-text token.
    """
    check_trainable(vocab_size)
    # Each merge replaces two symbols by one, so the text limits the number of merges. The trainer
    # allocates memory for all entries before it reads text, so the vocabulary is limited here.
    text_bytes = sum(document.size_bytes for document in documents)
    most_entries = _SMALLEST_VOCABULARY + min(text_bytes, TRAINING_SAMPLE_BYTES + PIECE_BYTES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, most_entries),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_sample(documents), trainer)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None
    return TextTokenizer(tokenizer, end_of_text)


def _training_sample(documents: Sequence[Document]) -> Iterator[str]:
    """Yield the pieces of the first documents by content hash. The last document may be cut."""
    room_bytes = TRAINING_SAMPLE_BYTES
    room_for: dict[Document, int] = {}
    for document in sorted(documents, key=lambda document: document.content):
        if room_bytes <= 0:
            break
        room_for[document] = room_bytes
        room_bytes -= document.size_bytes
    # Read in the order of the files, because each is read from its beginning. The order does not
    # change a BPE, which counts words.
    chosen = sorted(room_for, key=lambda document: (document.file.place(), document.number))
    pieces = read_pieces(chosen)
    for document in chosen:
        room_bytes = room_for[document]
        for piece in pieces:
            if room_bytes > 0:
                yield piece.text
            room_bytes -= len(piece.text.encode("utf-8"))
            if piece.ends_document:
                break
