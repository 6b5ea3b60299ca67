"""The validation split holds complete documents, about the requested fraction."""

import hashlib
import random
from pathlib import Path

import pytest

from megaspeed.data.documents import Document
from megaspeed.data.errors import DataError
from megaspeed.data.hold_out import Cut, split_by_tokens, split_groups
from megaspeed.data.sources import SourceFile


def split_documents(
    documents: list[Document], fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training, validation) of a single group."""
    (training,), (validation,) = split_groups([documents], fraction, seed)
    return training, validation


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


def test_a_group_without_documents_stays_empty() -> None:
    (training, empty), (validation, also_empty) = split_groups([HUNDRED, []], 0.2, seed=1)
    assert (training, validation) == split_documents(HUNDRED, 0.2, seed=1)
    assert empty == also_empty == []


def test_every_group_that_cannot_be_split_is_named() -> None:
    with pytest.raises(DataError) as caught:
        split_groups([[document("a", 10)], HUNDRED, [document("b", 10)]], 0.1, seed=1)
    assert ["(a, " in caught.value.problems[0], "(b, " in caught.value.problems[1]] == [True, True]


# --- by tokens ------------------------------------------------------------------------------------


def share_of(groups: list[list[Document]], fraction: float) -> list[float]:
    """The share of each group's bytes that is held out. Asserts that no document is lost."""
    training, validation, cuts = split_by_tokens(groups, fraction, seed=1)
    shares = []
    for group, trained, held, cut in zip(groups, training, validation, cuts, strict=True):
        assert sorted(trained + held, key=group.index) == group
        part = 0.0 if cut is None else cut.fraction * trained[cut.document].size_bytes
        total = sum(document.size_bytes for document in group)
        shares.append((sum(document.size_bytes for document in held) + part) / total)
    return shares


THREE = [document("a", 29_000), document("b", 33_000), document("c", 38_000)]
SKEWED = [document(f"s{i}", 10 + 40_000 // (i + 1)) for i in range(500)]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("documents", [THREE, SKEWED, HUNDRED, [document("one", 50_000)]])
def test_the_share_is_the_fraction_however_long_documents_are(
    documents: list[Document], fraction: float
) -> None:
    assert share_of([documents], fraction) == pytest.approx([fraction], rel=0.1)


def test_without_cuts_three_long_documents_lose_one() -> None:
    _, (shortest,) = split_documents(THREE, 0.05, seed=1)
    assert shortest.size_bytes == 29_000
    assert split_by_tokens([THREE], 0.05, seed=1) == ([THREE], [[]], [Cut(2, 5_000 / 38_000)])


def test_documents_that_come_close_enough_are_not_cut() -> None:
    training, validation, cuts = split_by_tokens([HUNDRED], 0.2, seed=1)
    assert ((training[0], validation[0]), cuts) == (split_documents(HUNDRED, 0.2, seed=1), [None])


def test_a_text_that_occurs_twice_is_not_cut() -> None:
    copies = [document("c1", 38_000, "c"), document("c2", 38_000, "c"), *THREE[:2]]
    others = [document("b2", 33_000, "b"), document("d", 20_000)]
    training, validation, cuts = split_by_tokens([copies, others], 0.05, seed=1)
    assert (training, validation) == ([copies, others], [[], []])
    assert cuts == [Cut(2, 0.05 * 138_000 / 29_000), Cut(1, 0.05 * 53_000 / 20_000)]


def test_complete_documents_are_held_out_if_none_can_be_cut() -> None:
    twice = [document(f"{name}{i}", 30_000, name) for name in "abc" for i in range(2)]
    training, (validation,), cuts = split_by_tokens([twice], 0.2, seed=1)
    assert ([training[0], validation], cuts) == ([*split_documents(twice, 0.2, seed=1)], [None])
    assert len(validation) == 2


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.05])
def test_copies_that_are_far_more_than_the_fraction_are_refused(fraction: float) -> None:
    """With two texts of 300 copies each, 44.8 % were held out at any fraction."""
    copies = [document("all.jsonl", size, str(size)) for size in (448, 552) for _ in range(300)]
    with pytest.raises(DataError) as caught:
        split_by_tokens([copies, []], fraction, seed=1)
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"at most 2 x data.validation_fraction {fraction:g} may be held out, but it would be 44.8% "
        "of all.jsonl: no document of all.jsonl can be cut, because all have copies (600 "
        "documents, 2 distinct); "
    )
    with pytest.raises(DataError, match=r"29\.0% of a and 2 other files: no document of all"):
        split_by_tokens([THREE, copies], 0.05, seed=1)
    training, validation, _ = split_by_tokens([copies], 0.3, seed=1)
    assert (training[0], validation[0]) == split_documents(copies, 0.3, seed=1)


FRACTIONS = (0.001, 0.05, 0.3, 0.9)
SAVED = "9617b26326d5f8cba2f7763f0f582eb291e0f83fa3cb30ff8ab21b30fca110a9"
"""Of the splits below, made before those far from the fraction were refused."""


def test_splits_are_those_of_earlier_versions() -> None:
    """So a resumed run trains on the same text, to the token."""
    digest, refused = hashlib.sha256(), 0
    for number in range(600):
        draw = random.Random(number)
        groups = [
            [
                document(f"{number}-{i}", size, f"{number}-{size}")
                for i in range(draw.choice((1, 5, 40)))
                for size in [draw.randint(1, draw.choice((4, 100, 10_000)))]
                for _ in range(draw.choice((1, 1, 2)))
            ]
            for _ in range(draw.choice((1, 1, 3)))
        ]
        try:
            training, validation, cuts = split_by_tokens(groups, draw.choice(FRACTIONS), seed=1)
        except DataError:
            refused += 1
            continue
        names = [
            [[d.file.name for d in group] for group in side] for side in (training, validation)
        ]
        digest.update(repr((names, cuts)).encode())
    assert (digest.hexdigest(), refused) == (SAVED, 85)
