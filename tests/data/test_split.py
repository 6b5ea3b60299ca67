"""The validation split holds whole documents, about the fraction that was asked for."""

from pathlib import Path

import pytest

from megaspeed.data import DataError
from megaspeed.data.corpus import Document
from megaspeed.data.sources import SourceFile
from megaspeed.data.split import split_documents


def document(name: str, size_bytes: int, content: str | None = None) -> Document:
    return Document(SourceFile(name, Path(name)), 0, size_bytes, content or name)


HUNDRED = [document(f"d{i}", 50 + i) for i in range(100)]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_validation_is_at_most_the_fraction_and_close_to_it(fraction: float) -> None:
    training, validation = split_documents(HUNDRED, fraction, seed=1)
    total = sum(d.size_bytes for d in HUNDRED)
    held_out = sum(d.size_bytes for d in validation)
    assert fraction * total - 150 < held_out <= fraction * total
    assert sorted(training + validation, key=HUNDRED.index) == HUNDRED
    assert training == sorted(training, key=HUNDRED.index)


def test_the_split_depends_on_the_seed_and_contents_not_on_the_order() -> None:
    _, first = split_documents(HUNDRED, 0.2, seed=1)
    _, backwards = split_documents(HUNDRED[::-1], 0.2, seed=1)
    _, other = split_documents(HUNDRED, 0.2, seed=2)
    assert {d.content for d in backwards} == {d.content for d in first}
    assert {d.content for d in other} != {d.content for d in first}


def test_equal_documents_are_never_on_both_sides() -> None:
    copies = [document(f"copy{i}", 60, content=f"same{i % 20}") for i in range(80)]
    training, validation = split_documents(copies, 0.3, seed=3)
    assert training and validation
    assert not {d.content for d in training} & {d.content for d in validation}


def test_both_sides_have_a_document_however_small_or_large_the_fraction() -> None:
    two = [document("large", 1_000_000), document("small", 10)]
    training, validation = split_documents(two, 1e-9, seed=0)
    assert ([d.content for d in training], [d.content for d in validation]) == (
        ["large"],
        ["small"],
    )
    training, validation = split_documents(two, 0.999999999, seed=0)
    assert len(training) == len(validation) == 1


def test_a_fraction_of_zero_holds_nothing_out() -> None:
    assert split_documents(HUNDRED, 0.0, seed=1) == (HUNDRED, [])


def test_one_distinct_document_cannot_be_split() -> None:
    same = [document("a", 100, "x"), document("b", 100, "x")]
    with pytest.raises(DataError, match=r"1 distinct document.*<\|endoftext\|>.*data\.validation"):
        split_documents(same, 0.1, seed=1)
