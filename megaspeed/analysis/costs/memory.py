"""Bytes of one rank by what they are for: the words in which memory is predicted and measured."""

from dataclasses import dataclass
from typing import Literal

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
