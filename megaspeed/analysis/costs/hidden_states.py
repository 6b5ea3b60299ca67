"""Hidden states of one micro-batch: what travels within a layer and between layers.

whole   (B, S, D)       in column- and row-parallel layers
split   (B, S/tp, D)    between them and between pipeline stages, with sequence parallelism
"""

from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run


def whole_tokens(run: Run) -> int:
    """B S: tokens of a micro-batch."""
    return run.batch.micro_batch_size * run.config.data.sequence_length


def split_tokens(run: Run) -> int:
    """Those that one rank has between layers; all of them without sequence parallelism."""
    ranks = run.grid.tp if run.config.parallel.sequence_parallel else 1
    return whole_tokens(run) // ranks


def whole_hidden_bytes(run: Run) -> int:
    """(B, S, D) in the model's precision."""
    return _hidden_bytes(run, whole_tokens(run))


def hidden_bytes(run: Run) -> int:
    """What one rank has of it between layers: all, or (B, S/tp, D)."""
    return _hidden_bytes(run, split_tokens(run))


def _hidden_bytes(run: Run, tokens: int) -> int:
    return tokens * run.config.model.hidden_size * BYTES_OF[run.precision]
