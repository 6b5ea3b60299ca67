"""What the sampler hands to the first and the last pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NOT_COUNTED = -100  # the target that torch's cross_entropy ignores
PADDING_SAMPLE = -1


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens and what follows each of them.

    Attributes:
        tokens: (B, S) int64.
        targets: (B, S) int64; the token after each token, -100 where the loss does not count.
        samples: B indices in the stream, one a row; -1 for a row of padding.
    """

    tokens: Tensor
    targets: Tensor
    samples: tuple[int, ...]

    def to(self, device: torch.device) -> MicroBatch:
        """On `device`; the copy from pinned memory does not wait."""
        return MicroBatch(
            self.tokens.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.samples,
        )

    def pin_memory(self) -> MicroBatch:
        """In page-locked memory, from where a GPU copies on its own."""
        return MicroBatch(self.tokens.pin_memory(), self.targets.pin_memory(), self.samples)


def read_micro_batch(
    tokens: NDArray[np.unsignedinteger],
    sequences: Sequence[int],
    samples: Sequence[int],
    *,
    micro_batch_size: int,
    sequence_length: int,
) -> MicroBatch:
    """Rows `sequences` of a token file, padded with uncounted rows up to `micro_batch_size`.

    Row j is tokens[j * S : j * S + S + 1]: its first S tokens, and its last S as targets.
    """
    length = sequence_length
    padding = micro_batch_size - len(sequences)
    rows = np.zeros((micro_batch_size, length + 1), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        rows[row] = tokens[sequence * length : sequence * length + length + 1]
    both = torch.from_numpy(rows)
    targets = both[:, 1:].contiguous()
    targets[len(sequences) :] = NOT_COUNTED
    return MicroBatch(
        tokens=both[:, :-1].contiguous(),
        targets=targets,
        samples=(*samples, *[PADDING_SAMPLE] * padding),
    )
