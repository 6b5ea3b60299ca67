"""A corpus whose token at position p is p, so that a row shows where it was read."""

from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megaspeed.data import PreparedCorpus
from megaspeed.data.cache import Cache, Facts
from megaspeed.data.tokens import TokenFile, TokenIndex


def write_numbered_tokens(folder: Path, tokens: int, name: str) -> TokenFile:
    index = TokenIndex(
        tokens=tokens,
        documents=1,
        dtype="<u4",
        largest_id=tokens - 1,
        vocab_size=tokens,
        end_of_text=0,
        tokenizer_fingerprint="numbers",
        corpus_fingerprint=name,
    )

    def fill(stream: BinaryIO) -> Facts:
        stream.write(np.arange(tokens, dtype="<u4").tobytes())
        return asdict(index)

    cache = Cache(folder)
    with cache.lock():
        cache.write(folder / f"{name}.bin", fill)
    file = TokenFile.open(cache, folder / f"{name}.bin")
    assert file is not None
    return file


def numbered_corpus(
    folder: Path, *, train_tokens: int, validation_tokens: int, sequence_length: int
) -> PreparedCorpus:
    return PreparedCorpus(
        train=write_numbered_tokens(folder, train_tokens, "train"),
        validation=write_numbered_tokens(folder, validation_tokens, "validation"),
        tokenizer=folder / "none.json",
        sequence_length=sequence_length,
        seed=5,
    )
