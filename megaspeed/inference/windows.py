"""A document cut into windows of the model's length. Pure arithmetic.

Every token of it is predicted exactly once, from the ids that open the document (`opening.py`; here
one, e) and from as many tokens before it as its window has. Length 4:

    stride 4    e 1 2 3            predicts 1 2 3 4
                        4 5 6 7             5 6 7 8
    stride 2    e 1 2 3            predicts 1 2 3 4
                    2 3 4 5                     5 6     3 and 4 are predicted already
                        4 5 6 7                     7 8

A smaller stride gives every token more to be predicted from, for length / stride times the work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """What the model sees at once.

    Attributes:
        seen: at most as many ids as the model has positions.
        targets: the id that follows each of them.
        counted: how many of the last targets count; the others were predicted before.
    """

    seen: Sequence[int]
    targets: Sequence[int]
    counted: int


class WindowCutter:
    """Cuts documents one after the other, of which ids come in stretches of any length.

    It holds the ids from the next window's beginning on, and knows how many of them, behind the
    first, were predicted already or open the document, and are not to be predicted.

    Args:
        opening: the ids before a document, at least one: its first token is predicted from them.
        length: ids of a window, at least 1.
        stride: from one window's beginning to the next one's, 1 to ``length``.
    """

    def __init__(self, *, opening: Sequence[int], length: int, stride: int) -> None:
        assert opening and 1 <= stride <= length, (opening, stride, length)
        self._opening = opening
        self._length = length
        self._stride = stride
        self._held: list[int] = []
        self._predicted = 0
        self._begin()

    def feed(self, ids: Sequence[int]) -> Iterator[Window]:
        """The windows that are full once the document goes on with ``ids``."""
        held = [*self._held, *ids]
        start = 0
        while start + self._length < len(held):
            if self._predicted < self._length:  # else it has nothing behind a long opening
                yield self._window(held[start : start + self._length + 1])
            start += self._stride
            self._predicted = max(self._predicted, self._length) - self._stride
        self._held = held[start:]

    def end(self) -> Iterator[Window]:
        """The rest of the document, if there is any; the next ids are another document's."""
        if len(self._held) - 1 > self._predicted:
            yield self._window(self._held)
        self._begin()

    def _begin(self) -> None:
        self._held = [*self._opening]
        self._predicted = len(self._opening) - 1

    def _window(self, ids: list[int]) -> Window:
        return Window(ids[:-1], ids[1:], len(ids) - 1 - self._predicted)
