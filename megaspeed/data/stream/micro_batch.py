"""What a loader hands to the pipeline stages.

first stage    tokens
last stage     targets
every stage    samples, of which dropout masks are a function, and documents, of which the
               attention mask is one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def read_micro_batch(
    rows: Sequence[NDArray[np.integer]],
    samples: Sequence[int],
    *,
    micro_batch_size: int,
    sequence_length: int,
    end_of_text: int | None = None,
) -> MicroBatch:
    """The rows of S + 1 tokens, padded with uncounted rows up to `micro_batch_size`.

    The first S tokens of a row are its inputs, its last S the targets.

    With `end_of_text`, the id that stands after each document, attention and positions are to begin
    anew with every document. The end-of-text token after one opens the next: so each token is
    predicted from its own document alone, and a document's first one from end-of-text alone.
    """
    padding = micro_batch_size - len(rows)
    both = torch.zeros(micro_batch_size, sequence_length + 1, dtype=torch.int64)
    for number, row in enumerate(rows):
        both[number] = torch.from_numpy(row.astype(np.int64))
    targets = both[:, 1:].contiguous()
    targets[len(rows) :] = NOT_COUNTED
    tokens = both[:, :-1].contiguous()
    documents = None
    if end_of_text is not None:
        documents = (tokens == end_of_text).cumsum(dim=1, dtype=torch.int32)
    return MicroBatch(
        tokens=tokens,
        targets=targets,
        samples=torch.tensor([*samples, *[PADDING_SAMPLE] * padding], dtype=torch.int64),
        documents=documents,
    )
