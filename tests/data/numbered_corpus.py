"""Corpora in which token p of a file has the id first_id + p, so a row shows where it was read."""

from pathlib import Path

import numpy as np

from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.token_file import TokenFile, TokenIndex


def write_numbered_tokens(folder: Path, tokens: int, name: str, first_id: int = 0) -> TokenFile:
    index = TokenIndex(
        tokens=tokens,
        documents=1,
        dtype="<u4",
        largest_id=first_id + tokens - 1,
        end_of_text=0,
        tokenizer_fingerprint="numbers",
        corpus_fingerprint=name,
    )

    path = folder / f"{name}.bin"
    path.write_bytes(np.arange(first_id, first_id + tokens, dtype="<u4").tobytes())
    return TokenFile(path, index)


def alone(*files: TokenFile) -> Mixture:
    return Mixture((Component(files, weight=1.0, name="numbers"),))


def numbered_corpus(
    folder: Path, *, train_tokens: int, validation_tokens: int, sequence_length: int
) -> PreparedCorpus:
    return PreparedCorpus(
        train=alone(write_numbered_tokens(folder, train_tokens, "train")),
        validation=alone(write_numbered_tokens(folder, validation_tokens, "validation")),
        tokenizer=None,
        sequence_length=sequence_length,
        seed=5,
    )


def numbered_mixture(folder: Path, sequence_length: int) -> PreparedCorpus:
    """Three components of weights 0.5, 0.2 and 0.3 with 11, 5 and 4 + 3 sequences.

    The ids of the files begin at 0, 10000, 20000 and 30000. Held out are 9, 40 and 20 sequences.
    """

    def file(name: str, sequences: int, first_id: int, rest: int) -> TokenFile:
        tokens = sequences * sequence_length + 1 + rest
        return write_numbered_tokens(folder, tokens, name, first_id)

    train = (
        Component((file("a", 11, 0, 3),), 0.5, "a"),
        Component((file("b", 5, 10_000, 0),), 0.2, "b"),
        Component((file("c", 4, 20_000, 1), file("d", 3, 30_000, 2)), 0.3, "c and d"),
    )
    validation = (
        Component((file("va", 9, 0, 0),), 0.5, "a"),
        Component((file("vb", 40, 10_000, 0),), 0.2, "b"),
        Component((file("vc", 20, 20_000, 0),), 0.3, "c"),
    )
    return PreparedCorpus(Mixture(train), Mixture(validation), None, sequence_length, seed=5)
