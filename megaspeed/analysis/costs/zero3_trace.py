"""ZeRO-3: the order of modules that DeepSpeed has recorded, and what it can be asked."""

import bisect
from collections.abc import Mapping, Sequence

from megaspeed.analysis.costs.zero3_visits import Visit


class Trace:
    """Modules in the order in which passes entered them.

    Attributes:
        modules: full name at each step.
        queue: (parameter, step) in the order of use: what is fetched ahead is taken from its head.

    Args:
        visits: of the recorded passes, one after the other.
        sizes: elements of each parameter.
    """

    def __init__(self, visits: Sequence[Visit], sizes: Mapping[str, int]) -> None:
        entered = [visit for visit in visits if visit.kind == "enter"]
        self.modules = [visit.module for visit in entered]
        self.queue = [(name, step) for step, v in enumerate(entered) for name in v.parameters]
        self._elements_before = [0]
        self._uses: dict[str, list[int]] = {}
        for name, step in self.queue:
            self._uses.setdefault(name, []).append(step)
        for visit in entered:
            own = sum(sizes[name] for name in visit.parameters)
            self._elements_before.append(self._elements_before[-1] + own)

    def is_used_within(self, name: str, step: int, elements: int) -> bool:
        """Whether fewer than ``elements`` lie between ``step`` and the parameter's next use."""
        uses = self._uses.get(name, [])
        following = bisect.bisect_left(uses, step)
        if following == len(uses):
            return False
        between = self._elements_before[uses[following]] - self._elements_before[step]
        return between < elements
