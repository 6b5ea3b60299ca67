r"""Trains a layout and one process from the same JSON, and compares them.

    run (this layout) --N processes--> losses, norms, weights and gradients, gathered
    run (plain torch) --this process-> losses, norms, weights and gradients
                                        \-> Comparison

If only later steps differ, the single process trains again with shuffled samples. This determines
the tolerance of those steps (``comparison``). Everything runs on this machine: on the CPU with
gloo, or on GPUs with NCCL and a GPU for each rank. The single process uses the first GPU.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megaspeed.analysis.local_ranks import DeviceType, run_on_ranks
from megaspeed.analysis.verification.comparison import (
    TIMES_SHUFFLED,
    TOLERANCES,
    Comparison,
    allowed_at_steps,
    compare_gradients,
    compare_numbers,
    shuffled,
)
from megaspeed.analysis.verification.logical_tensors import (
    LogicalTensors,
    gather_gradients,
    gather_weights,
)
from megaspeed.analysis.verification.reference import CPU, ReferenceRun, train_reference
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.model.gpt import DTYPES
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import Worker

_TIMEOUT_SECONDS = 300.0


@dataclass(kw_only=True)
class ParallelRun(ReferenceRun):
    """The record of the ranks' training."""

    copies_differ_by: float  # largest absolute difference between ranks' copies of an element


def verify(
    run: Run, corpus: PreparedCorpus, steps: int, device_type: DeviceType = "cpu"
) -> Comparison:
    """Trains the layout and one process for ``steps`` steps, and compares them.

    If only steps after the first differ too much, the single process trains ``TIMES_SHUFFLED``
    more times, with the samples of each step in other orders.

    Args:
        run: the layout, in fp32, bf16, or fp16 with a constant loss scale. TF32 is turned off for
            both trainings, because its rounding is a thousand times as large as the tolerance.
        corpus: the corpus of the run.
        steps: number of steps.
        device_type: "cpu", or "cuda", which needs a GPU for each rank.
    """
    training = run.config.training.model_copy(update={"allow_tf32": False})
    run = replace(run, config=run.config.model_copy(update={"training": training}))
    device = torch.device(device_type)
    batches = functools.partial(whole_batch, run, corpus)
    reference = train_reference(run, batches, steps, device)
    if device_type == "cuda":
        torch.cuda.empty_cache()  # rank 0 shares this GPU
    parallel = train_on_ranks(run, corpus, steps, device_type)
    comparison = compare(run, parallel, reference)
    if not comparison.differs_only_after_step_1:
        return comparison
    return compare(run, parallel, reference, train_shuffled(run, corpus, steps, device))


def train_shuffled(
    run: Run, corpus: PreparedCorpus, steps: int, device: torch.device = CPU
) -> list[ReferenceRun]:
    """The reference again, ``TIMES_SHUFFLED`` times, with each step's samples in another order."""

    def batches(times: int, step: int) -> list[MicroBatch]:
        return shuffled(whole_batch(run, corpus, step), seed=times * steps + step)

    return [
        train_reference(run, functools.partial(batches, times), steps, device)
        for times in range(TIMES_SHUFFLED)
    ]


def compare(
    run: Run,
    parallel: ParallelRun,
    reference: ReferenceRun,
    again: Sequence[ReferenceRun] = (),
) -> Comparison:
    """Compares every number of the two trainings, with the tolerance of the run's precision.

    Args:
        run: the run that was trained.
        parallel, reference: the two trainings.
        again: trainings of the reference with reordered samples. The more these differ from the
            reference, the more later steps may differ.
    """
    allowed = TOLERANCES[run.precision]
    dtype = DTYPES[run.precision]
    return Comparison(
        losses=compare_numbers(
            "loss",
            parallel.losses,
            reference.losses,
            allowed_at_steps(allowed.loss, reference.losses, [other.losses for other in again]),
        ),
        grad_norms=compare_numbers(
            "gradient norm",
            parallel.grad_norms,
            reference.grad_norms,
            allowed_at_steps(
                allowed.grad_norm, reference.grad_norms, [other.grad_norms for other in again]
            ),
        ),
        gradients=compare_gradients(
            parallel.first_gradients, reference.first_gradients, allowed.gradient
        ),
        weights_bitwise_equal=parallel.initial_weights.keys() == reference.initial_weights.keys()
        and all(
            torch.equal(value.to(dtype), reference.initial_weights[name].to(dtype))
            for name, value in parallel.initial_weights.items()
        ),
        copies_differ_by=parallel.copies_differ_by,
    )


def whole_batch(run: Run, corpus: PreparedCorpus, step: int) -> list[MicroBatch]:
    """All samples of step ``step`` (from 0), in parts of the run's micro-batch size."""
    size = run.batch.micro_batch_size
    parts = run.batch.train_batch_size // size
    loader = TrainingLoader(corpus, LoaderShape(size, parts, dp_rank=0, dp_size=1))
    return [loader.micro_batch(step * run.batch.train_batch_size, part) for part in range(parts)]


def train_on_ranks(
    run: Run, corpus: PreparedCorpus, steps: int, device_type: DeviceType = "cpu"
) -> ParallelRun:
    """Trains on the run's ranks, which are processes of this machine. Raises RanksFailed."""
    world_size = run.grid.world_size
    results = run_on_ranks(
        train_rank, run, corpus, steps, world_size=world_size, device_type=device_type
    )
    parallel: ParallelRun = results[0]
    return parallel


def train_rank(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    """One rank's part of the training. Rank 0 returns the record, other ranks return None."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=_TIMEOUT_SECONDS) as context:
        worker = Worker(run, context)
        return _record_steps(worker, StepInputs(run, corpus, context), steps)


def _record_steps(worker: Worker, inputs: StepInputs, steps: int) -> ParallelRun | None:
    initial = gather_weights(worker)
    gathered: list[LogicalTensors | None] = []
    worker.engine.before_step = lambda: gathered.append(gather_gradients(worker))
    losses, grad_norms = [], []
    for step in range(steps):
        samples = step * worker.run.batch.train_batch_size
        result = worker.train_step(inputs.load(samples), inputs.learning_rate(step))
        worker.engine.before_step = lambda: None
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
    final = gather_weights(worker)
    gradients = gathered[0]
    if initial is None or gradients is None or final is None:
        return None
    return ParallelRun(
        losses=losses,
        grad_norms=grad_norms,
        initial_weights=dict(initial.tensors),
        first_gradients=dict(gradients.tensors),
        weights=dict(final.tensors),
        copies_differ_by=max(g.copies_differ_by for g in (initial, gradients, final)),
    )
