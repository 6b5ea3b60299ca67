"""The loss of a step: the sum over predicted tokens divided by their global number (law 3)."""

from collections.abc import Callable

from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.tensor_parallel.axis import TensorAxis
from megaspeed.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megaspeed.tensor_parallel.plan import vocabulary_rows_per_rank


def make_loss_function(run: Run, axis: TensorAxis) -> Callable[[Tensor, Tensor], Tensor]:
    """(this rank's logits, targets (B, S)) -> losses (B, S), nats, the same on all tensor ranks."""
    vocab_size = run.config.model.vocab_size
    rows = vocabulary_rows_per_rank(vocab_size, axis.size)
    start = axis.rank * rows
    vocabulary = range(min(start, vocab_size), min(start + rows, vocab_size))
    return lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, vocabulary, axis)


def backward_scale(run: Run) -> float:
    """What a rank's sum of losses is multiplied by before its backward pass.

    ZeRO averages gradients over the data axis, so the mean over all tokens is dp / tokens times the
    local sum.
    """
    return run.grid.dp / run.tokens_per_step
