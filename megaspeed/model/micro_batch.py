"""The input of the pipeline stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megaspeed.model.documents import Documents

NOT_COUNTED = -100  # the target that torch's cross_entropy ignores
PADDING_SAMPLE = -1


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens and the token that follows each of them."""

    tokens: Tensor
    """(B, S) int64; input of the first stage. With a context axis, S are the rank's tokens."""
    targets: Tensor
    """(B, S) int64; the token after each token, or NOT_COUNTED. Used by the last stage."""
    samples: Tensor
    """(B,) int64; index of each row in the stream, or PADDING_SAMPLE. It determines dropout."""
    documents: Documents | None = None
    """Attention and positions stay within each of them; None if each row is one document."""

    def to(self, device: torch.device) -> Self:
        """A copy on ``device``. A GPU copies from pinned memory, so the host does not wait."""
        pinned = self.pin_memory() if device.type == "cuda" else self
        return pinned._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; tensors that are there already are not copied."""
        return self._moved(lambda tensor: tensor.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        documents = None if self.documents is None else self.documents.moved(move)
        return type(self)(move(self.tokens), move(self.targets), move(self.samples), documents)
