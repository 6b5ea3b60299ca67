"""Ranks that save a tiny run, and ranks that resume it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.tensors import kinds_of
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.verify import gather_fragments, gather_weights
from megaspeed.model.parameters import parameters_of
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.worker import StepInputs, Worker
from megaspeed.zero.model_states import Fragment
from tests.support.machine import limit


@dataclass
class Stretch:
    """A few steps of a run, and the complete state before them.

    Attributes:
        state: kind -> logical name -> tensor; on rank 0; empty on others.
        computed: the weights with which the model computes; on rank 0; empty on others.
        copies_differ_by: largest difference between two ranks' copies of an element.
        losses, norms, rates, samples: values of each step; samples is the first sample of each.
    """

    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    computed: dict[str, Tensor] = field(default_factory=dict)
    copies_differ_by: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


@dataclass
class SavedRun:
    """One rank of a run: built, stepped, saved and loaded by hand."""

    worker: Worker
    inputs: StepInputs
    checkpointing: Checkpointing
    progress: Progress

    @classmethod
    def start(cls, run: Run, corpus: PreparedCorpus, context: ParallelContext) -> "SavedRun":
        """Build the rank, before its first step."""
        worker = Worker(run, context)
        return cls(
            worker, StepInputs(run, corpus, context), Checkpointing(worker, corpus), Progress()
        )

    def train_step(self, stretch: Stretch | None = None) -> float:
        """Train one step. Return its loss."""
        run, progress = self.worker.run, self.progress
        rate = self.inputs.learning_rate(progress.steps_taken)
        result = self.worker.train_step(self.inputs.load(progress.samples), rate)
        if stretch is not None:
            stretch.losses.append(result.loss)
            stretch.norms.append(result.grad_norm)
            stretch.rates.append(rate)
            stretch.samples.append(progress.samples)
        self.progress = Progress(
            step=progress.step + 1,
            steps_taken=progress.steps_taken + 1,
            samples=progress.samples + run.batch.train_batch_size,
            tokens=progress.tokens + run.tokens_per_step,
            loss=result.loss,
        )
        return result.loss

    def stretch(self, steps: int) -> Stretch:
        """Return the state now, and ``steps`` steps from here."""
        stretch = Stretch()
        config = self.worker.run.config
        kinds = {
            name: kinds_of(parameter, config.optimizer.type)
            for name, parameter in parameters_of(config.model).items()
        }
        for kind in dict.fromkeys(chain(*kinds.values())):
            fragments = (
                Fragment(f.name, f.start, f.tensors[kind])
                for f in self.worker.engine.state_fragments()
                if kind in f.tensors
            )
            gathered = gather_fragments(self.worker, fragments)
            if gathered is not None:
                tensors = gathered.tensors.items()
                stretch.state[kind] = {name: t for name, t in tensors if kind in kinds[name]}
                stretch.copies_differ_by = max(stretch.copies_differ_by, gathered.copies_differ_by)
        if self.worker.balance is not None:
            own = {piece.key: piece.values.clone() for piece in self.worker.balance.pieces()}
            found = [own] * self.worker.context.grid.world_size
            dist.all_gather_object(found, own, self.worker.context.world_group)
            stretch.state["router_bias"] = {k: v for each in found for k, v in each.items()}
            copies = (
                (v, stretch.state["router_bias"][k]) for each in found for k, v in each.items()
            )
            assert all(torch.equal(one, other) for one, other in copies)
        computed = gather_weights(self.worker)
        stretch.computed = {} if computed is None else dict(computed.tensors)
        for _ in range(steps):
            self.train_step(stretch)
        return stretch


def started(launch: LaunchEnvironment, run: Run) -> ParallelContext:
    """Create the process groups of one rank."""
    torch.set_num_threads(1)
    grid = run.grid
    return ParallelContext.create(grid, launch, timeout_seconds=limit(60))


def save_only(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> None:
    """Train a step and save it."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        rank.train_step()
        rank.checkpointing.save(rank.progress)
        (report,) = rank.checkpointing.close()
        assert report.error is None, report.error


def save_and_continue(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, before: int, after: int
) -> Stretch:
    """Train ``before`` steps, save into the run's folder, and train ``after`` more without
    interruption.
    """
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        for _ in range(before):
            rank.train_step()
        rank.checkpointing.save(rank.progress)
        (report,) = rank.checkpointing.close()
        assert report.error is None, report.error
        return rank.stretch(after)


def continue_from(
    launch: LaunchEnvironment,
    run: Run,
    corpus: PreparedCorpus,
    checkpoints: Sequence[Path],
    steps: int,
) -> list[Stretch]:
    """Load one checkpoint after the other into the same engine. Train some steps from each."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        stretches = []
        for checkpoint in checkpoints:
            rank.progress = rank.checkpointing.load(checkpoint)
            stretches.append(rank.stretch(steps))
        return stretches


def only_checkpoint(folder: Path) -> Path:
    """Return the only checkpoint in a run's folder."""
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return checkpoint
