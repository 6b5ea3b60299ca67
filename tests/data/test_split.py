"""Complete documents of text are held out, and the end of a long one: about the fraction."""

import hashlib
import random
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.data.documents import Document
from megaspeed.data.errors import DataError
from megaspeed.data.hold_out import Cut, Groups, split_documents
from megaspeed.data.sources import SourceFile


def document(name: str, size_bytes: int, content: str | None = None) -> Document:
    return Document(SourceFile(name, Path(name)), 0, size_bytes, content or name)


def contents(documents: list[Document]) -> set[str]:
    return {each.content for each in documents}


HUNDRED = [document(f"d{i}", 50 + i) for i in range(100)]
THREE = [document("a", 29_000), document("b", 33_000), document("c", 38_000)]
SKEWED = [document(f"s{i}", 10 + 40_000 // (i + 1)) for i in range(500)]
ONE = [document("one", 50_000)]


def share_held_out(groups: Groups, fraction: float) -> list[float]:
    """Return the share of each group's bytes that is held out."""
    training, validation, cuts = split_documents(groups, fraction, seed=1)
    shares = []
    for group, trained, held, cut in zip(groups, training, validation, cuts, strict=True):
        part = 0.0 if cut is None else cut.fraction * trained[cut.document].size_bytes
        held_bytes = sum(each.size_bytes for each in held) + part
        shares.append(held_bytes / sum(each.size_bytes for each in group))
    return shares


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("group", [THREE, SKEWED, HUNDRED, ONE], ids=["3", "skewed", "100", "1"])
def test_the_share_is_the_fraction_however_long_documents_are(
    group: list[Document], fraction: float
) -> None:
    assert share_held_out([group], fraction) == pytest.approx([fraction], rel=0.1)


SIZES = st.lists(st.integers(1, 9), max_size=30)


@given(st.lists(SIZES, max_size=3), st.sampled_from([0.0, 0.01, 0.1, 0.4, 0.9]), st.integers(0, 99))
def test_every_document_is_on_one_side_and_its_copies_are_there_too(
    sizes: list[list[int]], fraction: float, seed: int
) -> None:
    """Documents of one size are copies. The order of documents does not matter."""
    groups = [[document(f"{i}", size, str(size)) for i, size in enumerate(g)] for g in sizes]
    try:
        training, validation, cuts = split_documents(groups, fraction, seed)
    except DataError:
        return
    for group, trained, held, cut in zip(groups, training, validation, cuts, strict=True):
        assert sorted(trained + held, key=group.index) == group
        assert [d for d in group if d in trained] == trained
        if cut is not None:
            content = trained[cut.document].content
            assert sum(each.content == content for g in groups for each in g) == 1
            assert 0 < cut.fraction < 1
    assert not contents(list(chain(*training))) & contents(list(chain(*validation)))
    backwards = split_documents([group[::-1] for group in groups], fraction, seed)
    assert list(map(contents, backwards[1])) == list(map(contents, validation))


def test_the_split_depends_on_the_seed() -> None:
    splits = [split_documents([HUNDRED], 0.2, seed)[1][0] for seed in range(3)]
    assert splits[0] != splits[1] != splits[2] != splits[0]


def test_the_end_of_the_longest_document_is_cut_if_no_complete_one_fits() -> None:
    assert split_documents([THREE], 0.05, seed=1) == ([THREE], [[]], [Cut(2, 5_000 / 38_000)])
    assert split_documents([HUNDRED, []], 0.2, seed=1)[2] == [None, None]


def test_a_text_that_occurs_twice_is_not_cut() -> None:
    copies = [document("c1", 38_000, "c"), document("c2", 38_000, "c"), *THREE[:2]]
    others = [document("b2", 33_000, "b"), document("d", 20_000)]
    training, validation, cuts = split_documents([copies, others], 0.05, seed=1)
    assert (training, validation) == ([copies, others], [[], []])
    assert cuts == [Cut(2, 0.05 * 138_000 / 29_000), Cut(1, 0.05 * 53_000 / 20_000)]


def test_complete_documents_are_held_out_if_none_can_be_cut() -> None:
    twice = [document(f"{name}{i}", 30_000, name) for name in "abc" for i in range(2)]
    _, (validation,), cuts = split_documents([twice], 0.2, seed=1)
    assert (len(validation), len(contents(validation)), cuts) == (2, 1, [None])


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.05])
def test_copies_that_are_far_more_than_the_fraction_are_refused(fraction: float) -> None:
    """With two texts of 300 copies each, 44.8 % were held out at any fraction."""
    copies = [document("all.jsonl", size, str(size)) for size in (448, 552) for _ in range(300)]
    with pytest.raises(DataError, match=r"44\.8% of all\.jsonl.*\(600 documents, 2 distinct\)"):
        split_documents([copies, []], fraction, seed=1)
    with pytest.raises(DataError, match=r"29\.0% of a and 2 other files: no document of all"):
        split_documents([THREE, copies], 0.05, seed=1)
    assert share_held_out([copies], 0.3) == [0.448]


def test_every_group_with_one_text_that_cannot_be_cut_is_named() -> None:
    groups = [[document(name, 10, "x"), document(name, 10, "x")] for name in "ab"]
    with pytest.raises(DataError) as caught:
        split_documents([*groups, HUNDRED], 0.1, seed=1)
    assert ["(a, " in caught.value.problems[0], "(b, " in caught.value.problems[1]] == [True, True]


FRACTIONS = (0.001, 0.05, 0.3, 0.9)
SAVED = "9617b26326d5f8cba2f7763f0f582eb291e0f83fa3cb30ff8ab21b30fca110a9"
"""The hash of the splits below. The version that computed it did not yet refuse splits far from the
fraction.
"""


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
            training, validation, cuts = split_documents(groups, draw.choice(FRACTIONS), seed=1)
        except DataError:
            refused += 1
            continue
        names = [
            [[d.file.name for d in group] for group in side] for side in (training, validation)
        ]
        digest.update(repr((names, cuts)).encode())
    assert (digest.hexdigest(), refused) == (SAVED, 85)
