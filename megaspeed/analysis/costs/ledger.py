"""A running account of memory that remembers its highest moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from megaspeed.analysis.costs.memory import Category, MemoryBytes


class Ledger:
    """Bytes held now, by category, and what was held when most was held."""

    def __init__(self) -> None:
        self._held: dict[Category, int] = {}
        self._total = 0
        self.peak = MemoryBytes()
        """The highest moment so far."""

    def held(self, category: Category) -> int:
        """Bytes of one category now."""
        return self._held.get(category, 0)

    def hold(self, category: Category, size_bytes: int) -> None:
        """From now on this is held too."""
        self._held[category] = self._held.get(category, 0) + size_bytes
        self._total += size_bytes
        if self._total > self.peak.total:
            self.peak = MemoryBytes(**self._held)

    def free(self, category: Category, size_bytes: int) -> None:
        """It is no longer held."""
        assert self.held(category) >= size_bytes, f"{category} {size_bytes} was never held"
        self.hold(category, -size_bytes)

    @contextmanager
    def briefly(self, category: Category, size_bytes: int) -> Iterator[None]:
        """Holds something within a block."""
        self.hold(category, size_bytes)
        yield
        self.free(category, size_bytes)

    def touch(self, category: Category, size_bytes: int) -> None:
        """Holds something for a moment."""
        with self.briefly(category, size_bytes):
            pass
