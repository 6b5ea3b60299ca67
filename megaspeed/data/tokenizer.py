"""The tokenizer: a byte-level BPE trained on the corpus, or one that exists on disk.

A byte-level BPE (Radford et al., "Language models are unsupervised multitask learners", 2019,
section 2.2) begins with the 256 bytes, so it can write any text, and merges the most frequent
pair until the vocabulary is full. Training it is deterministic, on any number of threads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megaspeed.data.corpus import Document, read_pieces
from megaspeed.data.errors import DataError
from megaspeed.data.sources import expand_home

TRAIN = "train"
END_OF_TEXT = "<|endoftext|>"
# A BPE gains little from more text than this, and its training time grows with it.
TRAINING_SAMPLE_BYTES = 32 << 20

_SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end-of-text token
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER_FILES = ("*.json", "*.txt", "*.model")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the id of the token that ends a document."""

    tokenizer: Tokenizer
    end_of_text: int

    def __post_init__(self) -> None:
        # A tokenizer.json may carry the limits of the model it was made for. They would cut
        # documents short or pad them.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
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

    def to_json(self) -> bytes:
        """The tokenizer as the bytes of a tokenizer.json."""
        return self.tokenizer.to_str(pretty=True).encode("utf-8")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens, on all threads."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def check_trainable(vocab_size: int) -> None:
    """Raises DataError where `vocab_size` has no room for the bytes and the end-of-text token."""
    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level BPE has at least {_SMALLEST_VOCABULARY} entries (256 bytes and "
            f"{END_OF_TEXT}), and model.vocab_size is {vocab_size}; raise it, "
            "or name a tokenizer that exists in data.tokenizer"
        )


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE of at most `vocab_size` entries, the first of them `<|endoftext|>`.

    It has fewer entries only where the text has no more pairs to merge. Of a corpus above 32 MiB
    it sees 32 MiB, documents in the order of their content hashes, which is as good as random.

    Raises:
        DataError: `vocab_size` has no room for the 256 bytes and the end-of-text token.
    """
    check_trainable(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_sample(documents), trainer)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None
    return TextTokenizer(tokenizer, end_of_text)


def load_tokenizer(source: str) -> TextTokenizer:
    """The tokenizer of a tokenizer.json, or of a folder as Hugging Face writes it.

    Only local files are read. A folder without a tokenizer.json goes through transformers'
    `AutoTokenizer`, which knows the older file formats.

    Raises:
        DataError: no such path, not a tokenizer, or no token known to end a document.
    """
    path = expand_home(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise DataError(
            f'data.tokenizer is "{TRAIN}" or a path (nothing is downloaded), and there is no '
            f"{path.absolute()}; correct the path"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else _older_format(path)
    except Exception as error:  # the bindings raise bare Exception, transformers many kinds
        raise DataError(
            f"data.tokenizer must be a tokenizer.json or a folder with one, and {path} cannot be "
            f"read as such ({error}); save it with save_pretrained"
        ) from error
    return TextTokenizer(tokenizer, _find_end_of_text(tokenizer, file.parent))


def tokenizer_files(source: str) -> list[Path]:
    """Every file that `load_tokenizer(source)` may read, sorted."""
    path = expand_home(source).absolute()
    if path.is_dir():
        files = {file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)}
    else:
        files = {path, *(path.parent / name for name in _CONFIG_FILES)}
    return sorted(file for file in files if file.is_file())


def check_vocabulary(tokenizer_size: int, source: str, vocab_size: int) -> None:
    """Raises DataError unless every id of the tokenizer has a row in the model's embedding."""
    if tokenizer_size > vocab_size:
        raise DataError(
            "every token id must be below model.vocab_size, and the tokenizer "
            f"{source!r} has {tokenizer_size} entries while model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {tokenizer_size} or use a smaller tokenizer"
        )


def _training_sample(documents: Sequence[Document]) -> Iterator[str]:
    room_bytes = TRAINING_SAMPLE_BYTES
    ordered = sorted(documents, key=lambda document: document.content)
    for piece in read_pieces(ordered):
        if room_bytes <= 0:
            return
        room_bytes -= len(piece.text.encode("utf-8"))
        yield piece.text


def _find_end_of_text(tokenizer: Tokenizer, folder: Path) -> int:
    """The id of the folder's `eos_token`; where it names none, of a name in common use."""
    names = tuple(_configured_names(folder)) or _END_OF_TEXT_NAMES
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return token_id
    raise DataError(
        f"a document must end with a token of its own, and the tokenizer in {folder} has none of "
        f"{', '.join(names)}; name its eos_token in {folder / _CONFIG_FILES[0]}"
    )


def _configured_names(folder: Path) -> Iterator[str]:
    for file in _CONFIG_FILES:
        try:
            eos = json.loads((folder / file).read_text("utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(eos, dict):  # an added token written out in full
            eos = eos.get("content")
        if isinstance(eos, str):
            yield eos


def _older_format(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # slow to import, and rarely needed

    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer = loaded.backend_tokenizer
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer
