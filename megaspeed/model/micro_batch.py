"""The input of the pipeline stages.

first stage    tokens
last stage     targets
every stage    samples, which determine dropout masks, and documents, which determine the
               attention mask
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_COUNTED = -100  # the target that torch's cross_entropy ignores
PADDING_SAMPLE = -1


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens and what follows each of them.

    Attributes:
        tokens: (B, S) int64.
        targets: (B, S) int64; the token after each token, -100 where the loss does not count.
        samples: (B,) int64; each row's index in the stream, -1 for a row of padding.
        documents: (B, S) int32; in its row, the number of each token's document. None where a row
            is attended to as one.
    """

    tokens: Tensor
    targets: Tensor
    samples: Tensor
    documents: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """On `device`; the copy from pinned memory does not wait."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """In page-locked memory, from where a GPU copies on its own."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> MicroBatch:
        documents = None if self.documents is None else move(self.documents)
        return MicroBatch(move(self.tokens), move(self.targets), move(self.samples), documents)
