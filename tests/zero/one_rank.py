"""One rank of a tiny run, which a job of the rank pool steps by hand."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.measurement.verification.reference import ReferenceRun, train_reference
from megaspeed.measurement.verification.verify import whole_batch
from megaspeed.measurement.watched_step import RankMeasurement, measure
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.rank_model import context_axis
from megaspeed.training.worker import StepResult, Worker
from megaspeed.zero.engine import ZeroEngine
from tests.support.machine import limit
from tests.support.tiny import merge, tiny_run

LEARNING_RATE = 1e-3

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}}


@dataclass(frozen=True)
class OneRank:
    """A worker and the samples that it trains on."""

    worker: Worker
    loader: TrainingLoader

    @property
    def engine(self) -> ZeroEngine:
        return self.worker.engine

    @property
    def optimizer(self) -> Any:
        """Return DeepSpeed's ZeRO optimizer."""
        return self.engine.optimizer

    @property
    def context(self) -> ParallelContext:
        return self.worker.context

    def train_step(
        self,
        step: int,
        rate: float = LEARNING_RATE,
        look: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> StepResult:
        """Train on the samples of step ``step``, counted from 0.

        ``look`` is called when the gradients are reduced. ``options`` are of ``update_weights``.
        """
        samples_consumed = step * self.worker.run.batch.train_batch_size
        load = functools.partial(self.loader.micro_batch, samples_consumed)
        executor = self.worker.compute_gradients(load)
        look()
        return self.worker.update_weights(executor, rate, **options)

    def measured_steps(
        self, load: Callable[[int, int], MicroBatch] | None = None
    ) -> RankMeasurement:
        """Train one step, which creates the optimizer's states, and two that are measured. Return
        the one with the smaller peak.

        A thread of gloo may hold a message for a moment after it has arrived, so a peak can be one
        message too high.

        Args:
            load: (step, micro-batch) -> the samples, if they are not those of the run.
        """
        size = self.worker.run.batch.train_batch_size
        load = load or (lambda step, index: self.loader.micro_batch(step * size, index))
        self.worker.train_step(functools.partial(load, 0), LEARNING_RATE)
        measured = [
            measure(self.worker, functools.partial(load, step), LEARNING_RATE)[1] for step in (1, 2)
        ]
        return min(measured, key=lambda step: step.peak.total)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights with which the rank computes, by full parameter name."""
        return dict(self.engine.gather_parameters())


def small_run(text: Path, **changes: Any) -> Run:
    """Return a tiny run of 3 blocks and 2 micro-batches a step, for tests that need no more."""
    small = {"gradient_accumulation_steps": 2}
    return tiny_run(text, **merge(small, changes))


def reference_of(run: Run, corpus: PreparedCorpus, steps: int = 1) -> ReferenceRun:
    """Return the run of one process of plain torch."""
    return train_reference(run, functools.partial(whole_batch, run, corpus), steps=steps)


@contextmanager
def one_rank(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> Iterator[OneRank]:
    """Build this rank of ``run``, ready to train."""
    grid = run.grid
    with ParallelContext.create(grid, launch, timeout_seconds=limit(60)) as context:
        worker = Worker(run, context)
        batch = run.batch
        shape = LoaderShape(
            batch.micro_batch_size,
            batch.gradient_accumulation_steps,
            context.dp_rank,
            context.grid.dp,
            context_axis(run, context).tokens,
        )
        yield OneRank(worker, TrainingLoader(corpus, shape, context.device))


def put_an_infinity(rank: OneRank) -> str:
    """Put an infinity into the last gradient that this rank holds. Return the parameter's name."""
    fragment = [f for f in rank.engine.gradients.fragments if f.values.numel()][-1]
    fragment.values[-1] = math.inf
    return fragment.name


def without_memory(result: StepResult) -> StepResult:
    """Remove the memory from the result, because the peak of a process never decreases."""
    return dataclasses.replace(result, peak_memory_bytes=())
