"""A byte-level BPE trained on the corpus.

A byte-level BPE (Radford et al., "Language models are unsupervised multitask learners", 2019,
section 2.2) begins with the 256 bytes, so it can write any text, and merges the most frequent
pair until the vocabulary is full. Training it is deterministic, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megaspeed.data.errors import DataError
from megaspeed.data.text.documents import Document, read_pieces
from megaspeed.data.text.pieces import PIECE_BYTES
from megaspeed.data.tokenizer.text_tokenizer import END_OF_TEXT, TextTokenizer

# A BPE gains little from more text than this, and its training time grows with it.
TRAINING_SAMPLE_BYTES = 32 << 20

_SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end-of-text token


def check_trainable(vocab_size: int, setting: str = "model.vocab_size") -> None:
    """Raises DataError where `vocab_size` has no room for the bytes and the end-of-text token.

    Args:
        vocab_size: the largest number of entries.
        setting: where it comes from, for the message.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level BPE has at least {_SMALLEST_VOCABULARY} entries (256 bytes and "
            f"{END_OF_TEXT}), and {setting} is {vocab_size}; raise it, "
            "or use a tokenizer that exists"
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
        vocab_size=min(vocab_size, _most_entries(documents)),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_sample(documents), trainer)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None
    return TextTokenizer(tokenizer, end_of_text)


def _most_entries(documents: Sequence[Document]) -> int:
    """More than any training on them comes to: a merge makes one symbol of two, of each byte one.

    The trainer takes memory for all the entries that it is asked for before it sees any text.
    """
    text_bytes = sum(document.size_bytes for document in documents)
    return _SMALLEST_VOCABULARY + min(text_bytes, TRAINING_SAMPLE_BYTES + PIECE_BYTES)


def _training_sample(documents: Sequence[Document]) -> Iterator[str]:
    """The pieces of the documents that are first by content hash, the last of them in part."""
    room_bytes = TRAINING_SAMPLE_BYTES
    room_for: dict[Document, int] = {}
    for document in sorted(documents, key=lambda document: document.content):
        if room_bytes <= 0:
            break
        room_for[document] = room_bytes
        room_bytes -= document.size_bytes
    # In the order of the files, because each of them is read from its beginning; a BPE counts
    # words, and does not see in which order they come.
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
