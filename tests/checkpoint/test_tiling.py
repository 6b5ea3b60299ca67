"""Boxes that tile a tensor and boxes that do not, compared with a count of every element."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.checkpoint.tensors import Box, tiling_problem

SHAPE = (13, 9)


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether every element is in exactly one box, by adding 1 to each."""
    seen = torch.zeros(shape)
    for box in boxes:
        seen[tuple(slice(*span) for span in zip(box.offsets, box.ends, strict=True))] += 1
    return bool((seen == 1).all())


@st.composite
def tilings(draw: st.DrawFn) -> list[Box]:
    """Draw a tiling: SHAPE is cut repeatedly along a row or a column."""
    boxes = [Box((0, 0), SHAPE)]
    for _ in range(draw(st.integers(0, 12))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, 1))
        size = draw(st.integers(0, box.sizes[dim]))
        sizes, rest, start = list(box.sizes), list(box.sizes), list(box.offsets)
        sizes[dim], rest[dim], start[dim] = size, box.sizes[dim] - size, box.offsets[dim] + size
        boxes += [Box(box.offsets, tuple(sizes)), Box(tuple(start), tuple(rest))]
    return draw(st.permutations(boxes))


@given(tilings(), st.data())
def test_it_agrees_with_counting_whatever_is_moved_left_out_or_doubled(
    tiling: list[Box], data: st.DataObject
) -> None:
    assert counted(SHAPE, tiling) and tiling_problem(SHAPE, tiling) is None
    box, *others = tiling
    row = data.draw(st.integers(0, SHAPE[0] - box.sizes[0]))
    moved = Box((row, box.offsets[1]), box.sizes)
    for changed in (others, [*tiling, box], [*others, moved]):
        assert (tiling_problem(SHAPE, changed) is None) == counted(SHAPE, changed)


def test_what_is_wrong_is_reported_in_numbers() -> None:
    left, right = Box((0, 0), (4, 2)), Box((0, 2), (4, 3))
    assert tiling_problem((4, 5), [left, right]) is None
    assert tiling_problem((4, 5), [left]) == "12 of its 20 elements are in no file"
    assert tiling_problem((4, 4), [left, right]) == "[0:4, 2:5] is not inside its 4 x 4"
    assert tiling_problem((4, 5), [left, Box((3, 1), (1, 4))]) == (
        "[0:4, 0:2] and [3:4, 1:5] both hold some of its elements"
    )


def test_a_vector_and_boxes_of_another_number_of_dims() -> None:
    assert tiling_problem((5,), [Box((3,), (2,)), Box((0,), (3,)), Box((2,), (0,))]) is None
    assert tiling_problem((5,), [Box((0, 0), (5, 1))]) == "[0:5, 0:1] is not inside its 5"
    assert tiling_problem((5,), [Box((-1,), (6,))]) == "[-1:5] is not inside its 5"


def test_the_pieces_of_a_thousand_ranks_are_checked_quickly() -> None:
    """There are 8 column shards of 1,000 pieces each, and every piece is cut in the middle of a
    row.
    """
    rows, width = 2_000, 4
    pieces = [
        box
        for column in range(0, 8 * width, width)
        for row in range(0, rows, 2)
        for box in (
            Box((row, column), (1, width)),
            Box((row + 1, column), (1, 1)),
            Box((row + 1, column + 1), (1, width - 1)),
        )
    ]
    assert len(pieces) == 24_000
    assert tiling_problem((rows, 8 * width), pieces) is None
