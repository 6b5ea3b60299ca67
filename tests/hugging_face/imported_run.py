"""Ranks that train an imported model. They do not import transformers, which takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape
from megaspeed.tensor_parallel.loss import TokenLosses
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint.saved_runs import SavedRun, started


def train_imported(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, checkpoint: Path, steps: int
) -> tuple[Tensor | None, list[float]]:
    """Load a checkpoint, save it again as it is, train some steps, and save again."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        rank.progress = rank.checkpointing.load(checkpoint)
        logits = whole_logits(rank, context)
        rank.checkpointing.save(rank.progress)
        losses = [rank.train_step() for _ in range(steps)]
        rank.checkpointing.save(rank.progress)
        assert [report.error for report in rank.checkpointing.close()] == [None, None]
        return logits, losses


def whole_logits(rank: SavedRun, context: ParallelContext) -> Tensor | None:
    """Return the logits (rows, S, V) of the first step's samples, on rank 0."""
    worker, shape = rank.worker, rank.inputs.shape
    run, loss = worker.run, worker.engine.loss
    seen: list[Tensor] = []

    def look(logits: Tensor, targets: Tensor, scales: Tensor | None) -> TokenLosses:
        sequence = run.config.data.sequence_length
        seen.append(logits.clone().unflatten(0, (-1, sequence)))
        return loss.cross_entropy(logits, targets, scales)

    loss.chunk_losses = look
    rows = run.batch.train_batch_size
    worker.evaluate(
        rank.inputs.load(0),
        shape.gradient_accumulation_steps,
        rows * run.config.data.sequence_length,
    )
    loss.chunk_losses = loss.cross_entropy
    own = {(row, context.tp_rank): logits for row, logits in _rows_of(seen, shape)}
    everyones: list[dict[tuple[int, int], Tensor]] = [{} for _ in range(context.grid.world_size)]
    dist.all_gather_object(everyones, own, context.world_group)
    parts = {place: logits for one in everyones for place, logits in one.items()}
    whole = [
        torch.cat([parts[row, tp] for tp in range(context.grid.tp)], -1) for row in range(rows)
    ]
    padded = torch.stack(whole)  # (rows, S, padded vocabulary)
    return padded[..., : run.config.model.vocab_size].clone() if context.rank == 0 else None


def _rows_of(seen: list[Tensor], shape: LoaderShape) -> Iterator[tuple[int, Tensor]]:
    """Yield (row of the step, its logits) for each row of this rank."""
    for micro_batch, logits in enumerate(seen):
        yield from zip(shape.rows(micro_batch), logits, strict=True)
