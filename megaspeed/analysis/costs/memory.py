"""Bytes of one rank by what they are for: the words in which memory is predicted and measured."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megaspeed.config.resolve import Precision

Category = Literal[
    "parameters", "gradients", "optimizer_states", "activations", "communication_buffers"
]
"""The fields of ``MemoryBytes``."""


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """What one rank holds at one moment.

    Attributes:
        parameters: what the model computes with and keeps between steps: 1/dp of it at ZeRO-3.
        gradients: of parameters, whether of one micro-batch or added up.
        optimizer_states: fp32 master weights and AdamW's two moments.
        activations: what forward keeps for backward, and what operations work with for a moment,
            logits among them.
        communication_buffers: buckets, parameters that ZeRO-3 has gathered, messages in flight.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    communication_buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        # Not astuple, which copies deeply: a plan asks a hundred thousand times.
        return (
            self.parameters
            + self.gradients
            + self.optimizer_states
            + self.activations
            + self.communication_buffers
        )


# A running account of memory that remembers its highest moment.


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


# Bytes of one number of each type.

BYTES_OF: Mapping[Precision, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
