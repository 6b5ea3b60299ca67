"""What is held out of token files: their tails, cut between documents, nothing on both sides."""

from pathlib import Path

import numpy as np
import pytest

from megaspeed.config.data import Source
from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.tokens.hold_out import hold_out
from megaspeed.data.tokens.token_file import TokenFile, TokenIndex
from megaspeed.data.tokens.token_sources import open_token_source
from tests.data.foreign_tokens import write_megatron

END = 0


def token_file(folder: Path, documents: list[int], end_of_text: int | None = END) -> TokenFile:
    """Documents of these lengths: 1, 2, 3 ... and an end."""
    ids = [token for length in documents for token in (*range(1, length), END)]
    path = folder / "tokens.bin"
    path.write_bytes(np.array(ids, dtype="<u2").tobytes())
    index = TokenIndex(
        tokens=len(ids),
        documents=len(documents),
        dtype="<u2",
        largest_id=max(ids),
        vocab_size=None,
        end_of_text=end_of_text,
        tokenizer_fingerprint=None,
        corpus_fingerprint="all",
    )
    return TokenFile(path, index)


def cut_of(file: TokenFile, fraction: float) -> int:
    """How many tokens are for training, once it is seen that the two sides make up the file."""
    (train,), (validation,) = hold_out([file], fraction)
    both = np.concatenate([train.map(), validation.map()])
    assert both.tolist() == file.map().tolist()
    fingerprints = {each.index.corpus_fingerprint for each in (file, train, validation)}
    assert len(fingerprints) == 3
    return train.index.tokens


@pytest.mark.parametrize(
    ("documents", "fraction", "cut"),
    [
        ([10, 10, 10, 10], 0.25, 30),  # just where a document ends
        ([10, 10, 10, 10], 0.3, 30),  # the first end from token 28 on
        ([10, 10, 10, 10], 0.2, 30),  # from token 32 on there is only the file's own
        ([10, 10, 10, 10], 0.999, 10),
        ([10, 30], 0.5, 10),
        ([40], 0.25, 30),  # one document is cut in two
        ([40], 0.0001, 39),  # neither side is empty
        ([40], 0.9999, 1),
    ],
)
def test_the_cut_is_at_the_end_of_a_document(
    tmp_path: Path, documents: list[int], fraction: float, cut: int
) -> None:
    assert cut_of(token_file(tmp_path, documents), fraction) == cut


@pytest.mark.parametrize(
    ("documents", "fraction", "cut"),
    [
        ([10, 10, 10, 10], 0.3, 30),
        ([10, 10, 10, 10], 0.2, 30),
        ([40], 0.25, 30),
        ([10, 30], 0.5, 10),
    ],
)
def test_megatrons_documents_are_known_without_an_end_of_text(
    tmp_path: Path, documents: list[int], fraction: float, cut: int
) -> None:
    prefix = write_megatron(tmp_path / "corpus", [[[7] * length] for length in documents])
    (file,) = open_token_source(Source(path=str(prefix)), Cache(tmp_path / "cache"))
    assert file.index.end_of_text is None
    assert cut_of(file, fraction) == cut


def test_where_nothing_is_known_of_documents_the_cut_is_where_the_fraction_says(
    tmp_path: Path,
) -> None:
    assert cut_of(token_file(tmp_path, [10, 10, 10, 10], end_of_text=None), 0.2) == 32


def test_a_fraction_of_zero_holds_nothing_out(tmp_path: Path) -> None:
    file = token_file(tmp_path, [10, 10])
    assert hold_out([file], 0.0) == ((file,), ())


def test_a_single_token_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes at least 2 tokens, and it has 1"):
        hold_out([token_file(tmp_path, [1])], 0.5)


def test_an_id_beyond_the_vocabulary_is_told_of_the_side_that_has_it(tmp_path: Path) -> None:
    (train,), (validation,) = hold_out([token_file(tmp_path, [5, 20])], 0.5)
    train.check_vocabulary(10)  # the largest id of the file, 19, is held out
    with pytest.raises(DataError, match=r"has id 10 at token 14 \(byte 28\)"):
        validation.check_vocabulary(10)
