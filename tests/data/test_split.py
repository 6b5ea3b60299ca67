"""The validation split holds whole documents, about the fraction that was asked for."""

from pathlib import Path

import pytest

from megaspeed.data.errors import DataError
from megaspeed.data.text.documents import Document
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.text.split import split_documents, split_groups


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


def test_every_group_holds_out_its_own_fraction_and_none_trains_on_what_another_holds_out() -> None:
    shared = [document(f"copy{i}", 60, content=f"d{i}") for i in range(0, 100, 3)]
    (training, also_training), (validation, also_validation) = split_groups(
        [HUNDRED, shared], 0.2, seed=1
    )
    assert sorted(training + validation, key=HUNDRED.index) == HUNDRED
    assert validation and also_validation
    trained_on = {d.content for d in training + also_training}
    assert not trained_on & {d.content for d in validation + also_validation}


def test_a_group_without_documents_stays_without() -> None:
    (training, empty), (validation, also_empty) = split_groups([HUNDRED, []], 0.2, seed=1)
    assert (training, validation) == split_documents(HUNDRED, 0.2, seed=1)
    assert empty == also_empty == []


def test_every_group_that_cannot_be_split_is_named() -> None:
    with pytest.raises(DataError) as caught:
        split_groups([[document("a", 10)], HUNDRED, [document("b", 10)]], 0.1, seed=1)
    assert ["(a, " in caught.value.problems[0], "(b, " in caught.value.problems[1]] == [True, True]
