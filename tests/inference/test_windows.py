"""Every token of a document is predicted once, from all that its window shows before it."""

import random
from collections.abc import Iterable, Sequence

import pytest

from megaspeed.inference.windows import Window, WindowCutter

END = 0


def cut(
    stretches: Iterable[Sequence[int]], length: int, stride: int, opening: Sequence[int] = (END,)
) -> list[Window]:
    cutter = WindowCutter(opening=opening, length=length, stride=stride)
    windows = [window for ids in stretches for window in cutter.feed(ids)]
    return [*windows, *cutter.end()]


def predictions(windows: Iterable[Window]) -> list[tuple[int, tuple[int, ...]]]:
    """(token, what it is predicted from) of all that count."""
    return [
        (window.targets[place], tuple(window.seen[: place + 1]))
        for window in windows
        for place in range(len(window.targets) - window.counted, len(window.targets))
    ]


def test_the_two_drawings_of_the_module() -> None:
    disjoint = [Window([END, 1, 2, 3], [1, 2, 3, 4], 4), Window([4, 5, 6, 7], [5, 6, 7, 8], 4)]
    assert cut([range(1, 9)], length=4, stride=4) == disjoint
    overlapping = [
        Window([END, 1, 2, 3], [1, 2, 3, 4], 4),
        Window([2, 3, 4, 5], [3, 4, 5, 6], 2),
        Window([4, 5, 6, 7], [5, 6, 7, 8], 2),
    ]
    assert cut([range(1, 9)], length=4, stride=2) == overlapping


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 4), (4, 3), (4, 1), (7, 5), (50, 20)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("opening", [[END], [-3, -2, END]], ids=["one opens", "three open"])
def test_each_token_is_predicted_once_from_its_window(
    opening: list[int], tokens: int, length: int, stride: int
) -> None:
    text = list(range(1, tokens + 1))
    document = [*opening, *text]
    windows = cut([text], length, stride, opening)
    assert all(window.counted > 0 for window in windows)
    told = predictions(windows)
    assert [token for token, _ in told] == text
    for place, (_, seen) in enumerate(told, start=len(opening)):
        # The window in which it counts is the first one that reaches it.
        window = 0 if place <= length else -(-(place - length) // stride)
        assert list(seen) == document[window * stride : place]


def test_it_is_all_one_in_which_stretches_a_document_comes() -> None:
    generator = random.Random(5)
    document = list(range(1, 40))
    for _ in range(50):
        length = generator.randint(1, 12)
        stride = generator.randint(1, length)
        cuts = sorted(generator.choices(range(40), k=generator.randint(0, 6)))
        stretches = [document[a:b] for a, b in zip([0, *cuts], [*cuts, 39], strict=True)]
        assert cut(stretches, length, stride) == cut([document], length, stride)


def test_a_document_knows_nothing_of_the_one_before() -> None:
    cutter = WindowCutter(opening=[END], length=4, stride=2)
    first = [*cutter.feed([1, 2, 3, 4, 5]), *cutter.end()]
    again = [*cutter.feed([1, 2, 3, 4, 5]), *cutter.end()]
    assert first == again
