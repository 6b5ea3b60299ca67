"""Saves and loads the state of compressed gradients (``zero/compression.py``).

    the run has             feedback                              PowerSGD's Q
    the same dp, pp, tp     the same on each rank                 the same
    another dp              each rank gets the mean of all        the same
    another pp              each rank gets its part of it         the same
    another tp              each rank gets its part of it         as before the first step
    no compression, dp 1    is dropped: no step would send it     is dropped

A step sends the mean over the data ranks of gradient and feedback. So if each rank gets the mean of
the feedback, all that was not sent is still sent. A tied weight on two pipeline stages has feedback
on both. If one stage holds the weight now, it gets the sum. If the weight was on one stage and is
on two now, the first stage gets all.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import FACTOR, FEEDBACK, Piece, key, pieces_of
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT
from megaspeed.training.worker import Worker


def compression_pieces(worker: Worker) -> Iterator[Piece]:
    """The pieces that this rank writes to a checkpoint: views of its state."""
    context, engine = worker.context, worker.engine
    for parameter, values in engine.gradients.feedback():
        name = engine.names[parameter]
        tensor = key(f"{FEEDBACK}{context.dp_rank}", name)
        yield from pieces_of(tensor, worker.shards[name], 0, values)
    if context.dp_rank == 0:  # all data ranks have the same
        for parameter, factor in engine.gradients.factors():
            yield _factor_piece(worker, engine.names[parameter], factor)


def load_compression(
    worker: Worker, checkpoint: Path, saved: RunState, group: dist.ProcessGroup
) -> None:
    """Load this rank's state from a checkpoint. All ranks of ``group`` call this together.

    Args:
        worker: this rank before its first step.
        checkpoint: its folder, with correct checksums.
        saved: its run state.
        group: all ranks.
    """
    from megaspeed.checkpoint.reading import (
        read_pieces,
    )  # takes a second

    there = saved.compression_tensors(worker.run.config.model)
    if not there or worker.run.compression is None:
        return
    assert saved.layout is not None, "a run has saved these tensors"
    gradients, names = worker.engine.gradients, worker.engine.names
    factors = [_factor_piece(worker, names[p], factor) for p, factor in gradients.factors()]
    if saved.layout.tp == worker.run.grid.tp:
        read_pieces(
            checkpoint, [p for p in factors if there.get(p.key) == tuple(p.full_shape)], group
        )
    joins_ends = worker.run.grid.pp == 1 and worker.run.config.model.tie_word_embeddings
    same = saved.layout.dp == worker.run.grid.dp
    ranks = [worker.context.dp_rank] if same else list(range(saved.layout.dp))
    feedback = {names[parameter]: values for parameter, values in gradients.feedback()}
    for rank in ranks:
        pieces: list[Piece] = []
        read: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, values in feedback.items():
            for source in (
                (name, HEAD_WEIGHT) if joins_ends and name == EMBEDDING_WEIGHT else (name,)
            ):
                tensor = key(f"{FEEDBACK}{rank}", source)
                if tensor in there:
                    read.append((values, torch.zeros_like(values)))
                    pieces += pieces_of(tensor, worker.shards[name], 0, read[-1][1])
        read_pieces(checkpoint, pieces, group)
        for values, part in read:
            values.add_(part, alpha=1 / len(ranks))


def _factor_piece(worker: Worker, name: str, factor: torch.Tensor) -> Piece:
    tensor = key(f"{FACTOR}{worker.context.tp_rank}", name)
    return Piece(tensor, tuple(factor.shape), (0, 0), factor)
