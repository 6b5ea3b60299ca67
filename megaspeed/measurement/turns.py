"""Rows take turns on ranks of this machine. A row is one way to train: a run, or a peer.

    turn 1    A   B   C     each a launch of its own, with new processes
    turn 2    A   B   C
    ...

    steps of a turn    1 .. W     W + 1 .. W + S    then, if the command asks for it,
                       warm up    timed             "memory"   one more step, whose memory and
                                                               traffic are measured
                                                    "parts"    the times of each step's parts

    log of a turn's step = row + drift of the machine in this turn + rest
    noise                = Student's t (99 %) x standard error of a difference, from the rests

A step lasts from the end of the step before until its loss is read as a number. By then, a GPU has
finished it. If the machine is slower in a turn, all its rows are, so this is not noise.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import psutil
import torch

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.local_ranks import DeviceType, RanksFailed, run_on_ranks
from megaspeed.measurement.watched_step import measure
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.metrics import PartMetrics
from megaspeed.training.worker import StepInputs, peak_memory
from megaspeed.units import counted

WARM_UP_STEPS = 3
"""Of ``bench`` and ``scaling``. DeepSpeed's engine records its ZeRO-3 gathers in the first two."""

Extra = Literal["memory", "parts"]
"""What a turn measures beside the times."""

_STUDENT_99 = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17)
"""Two-sided 99 % quantiles for 2 to 10 degrees of freedom. For more, the last one is cautious."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How a turn is taken."""

    warm_up: int
    timed: int
    timeout_seconds: float  # of a turn, and of a collective
    extra: Extra | None = None

    @property
    def total(self) -> int:
        """The number of steps, without the one that is measured."""
        return self.warm_up + self.timed


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a rank trains on."""

    name: str  # the GPU's name, or "CPU"
    memory_bytes: int  # on a CPU, this rank's share of the machine's memory


@dataclass(frozen=True, kw_only=True)
class TimedRank:
    """What one rank measured in one turn."""

    losses: Sequence[float]  # of each step, mean over the rank's tokens, in nats
    grad_norm: float  # of the last step, before clipping
    skipped_steps: int  # skipped because the loss or the norm was not finite
    step_seconds: Sequence[float]  # of the timed steps
    peak_bytes: int  # of the CUDA allocator; on a CPU, of the resident set with all libraries
    device: Device


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One way to train, and what its ranks measured once it has taken its turns."""

    label: str  # different for every row
    run: Run
    make: Callable[[Run, ParallelContext], Any]  # makes what has ``Worker``'s ``train_step``
    turns: Sequence[Sequence[TimedRank]] = ()  # turn -> rank
    extras: Sequence[Any] = ()  # rank -> what the command has asked for, in the first turn
    failure: str | None = None  # why a turn failed; the row takes no turn after it

    @property
    def done(self) -> bool:
        """Whether the row has taken a turn, and none has failed."""
        return bool(self.turns) and self.failure is None

    @property
    def loss(self) -> float:
        """The loss of the last step in the first turn."""
        return self.losses[-1]

    @property
    def losses(self) -> list[float]:
        """The losses of the first turn, mean over the ranks."""
        losses = [rank.losses for rank in self.turns[0]]
        return [statistics.fmean(each) for each in zip(*losses, strict=True)]

    def after_turn(self, ranks: Sequence[list[Any]], failure: str | None) -> Self:
        """Return the row with what the ranks of a turn have yielded, and why they failed, if so.

        If all ranks have yielded their times before one failed, the times count.
        """
        number = len(self.turns) + 1
        turns = [*self.turns, [timed for timed, *_ in ranks]] if ranks else self.turns
        if failure is not None:
            return replace(self, turns=turns, failure=f"failed in turn {number}: {failure}")
        extras = self.extras or [extra for _, *more in ranks for extra in more]
        return replace(self, turns=turns, extras=extras)


AnyRow = TypeVar("AnyRow", bound=MeasuredRow)


@dataclass(frozen=True, kw_only=True)
class Result(Generic[AnyRow]):
    """All rows of a command."""

    rows: Sequence[AnyRow]  # in the order in which they take turns
    turns: int  # of each row
    steps: int  # timed steps of a turn
    stopped: bool = False  # by Ctrl-C or a signal, before the last turn

    @property
    def timed(self) -> list[AnyRow]:
        """The rows that have taken a turn, even if they failed later."""
        return [row for row in self.rows if row.turns]

    @property
    def done(self) -> list[AnyRow]:
        """The rows that have taken a turn, and of which no turn failed."""
        return [row for row in self.rows if row.done]

    @property
    def device(self) -> Device | None:
        """Rank 0's; None if no row has taken a turn."""
        return next((row.turns[0][0].device for row in self.timed), None)

    @property
    def succeeded(self) -> bool:
        """Whether every row took all its turns."""
        return not self.stopped and all(row.done for row in self.rows)

    @property
    def notes(self) -> Iterator[str]:
        """Yield what went wrong in each row."""
        if self.stopped:
            taken = sum(len(row.turns) for row in self.rows)
            yield f"stopped after {counted(taken, 'turn')}; the figures are of these"
        for row in self.rows:
            if row.failure is not None:
                yield f"{row.label} {row.failure}"
            if row.turns and (skipped := row.turns[0][0].skipped_steps):
                yield (
                    f"{row.label} skipped {skipped} of {len(row.losses)} steps, because the loss "
                    "or the gradient norm was not finite"
                )


def take_turns(
    rows: Sequence[AnyRow],
    turns: int,
    corpus: PreparedCorpus,
    steps: Steps,
    *,
    device_type: DeviceType,
    folder: Path,
    on_turn: Callable[[int, str], None] = lambda done, text: None,
) -> tuple[list[AnyRow], bool]:
    """Let rows take turns. A row that fails takes no further turn.

    Args:
        rows: with different labels.
        turns: of each row.
        corpus: of all rows.
        steps: of a turn; what it asks for beside the times is measured only in the first turn.
        device_type: of the ranks.
        folder: exists; what the ranks of each turn print goes to a file in its ``logs``.
        on_turn: called before each turn, with the number of earlier turns and a description.

    Returns:
        The rows that have taken a turn or failed, and whether Ctrl-C or a signal has stopped them.

    Raises:
        KeyboardInterrupt: they were stopped before any turn had ended.
    """
    by_label, stopped = {row.label: row for row in rows}, False
    (folder / "logs").mkdir(exist_ok=True)
    for done, (number, label) in enumerate(product(range(1, turns + 1), by_label)):
        row = by_label[label]
        if row.failure is not None:
            continue
        on_turn(done, f"{label}, turn {number} of {turns}")
        log = folder / "logs" / f"{label.lower().replace(' ', '-')}-{number}.log"
        log.write_text("")  # the ranks append to it
        ranks: Sequence[list[Any]]
        failure = None
        try:
            ranks = run_on_ranks(
                *(take_turn, row.make, row.run, corpus),
                steps if number == 1 else replace(steps, extra=None),
                world_size=row.run.grid.world_size,
                device_type=device_type,
                log=log,
                timeout_seconds=steps.timeout_seconds,
            )
        except RanksFailed as failed:
            ranks, failure = failed.yielded, f"{failed}; see {log}"
        except KeyboardInterrupt:
            if not any(each.turns for each in by_label.values()):
                raise
            stopped = True
            break
        by_label[label] = row.after_turn(ranks, failure)
    return [row for row in by_label.values() if row.turns or row.failure], stopped


def take_turn(
    launch: LaunchEnvironment,
    make: Callable[[Run, ParallelContext], Any],
    run: Run,
    corpus: PreparedCorpus,
    steps: Steps,
) -> Iterator[Any]:
    """Train as one rank. Yield its ``TimedRank``, and then what ``steps.extra`` asks for.

    ``make`` builds what has ``Worker``'s ``train_step``: for "memory" a ``Worker`` or a
    ``Watched``, for "parts" a ``Worker``.
    """
    with ParallelContext.create(run.grid, launch, timeout_seconds=steps.timeout_seconds) as context:
        trainer, inputs = make(run, context), StepInputs(run, corpus, context)
        samples, skipped, losses = run.batch.train_batch_size, 0, []
        timelines, ends = [], [time.perf_counter()]
        for number in range(steps.total):
            if number == steps.warm_up and context.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(context.device)  # the first step also compiles
            if number >= steps.warm_up and steps.extra == "parts":
                context.timeline.begin(number + 1)
            result = trainer.train_step(
                inputs.load(number * samples), inputs.learning_rate(number - skipped)
            )
            context.timeline.end()
            ends.append(time.perf_counter())
            losses.append(result.loss)
            skipped += result.skipped
            timelines.append(result.timelines)  # of the step before
        yield TimedRank(
            losses=losses,
            grad_norm=result.grad_norm,
            skipped_steps=skipped,
            step_seconds=[end - start for start, end in pairwise(ends)][steps.warm_up :],
            peak_bytes=peak_memory(context.device),
            device=_describe_device(context.device, run.grid.world_size),
        )
        if steps.extra == "memory":
            load = inputs.load(steps.total * samples)
            yield measure(trainer, load, inputs.learning_rate(steps.total - skipped))[1]
        elif steps.extra == "parts":
            timelines.append(trainer.timelines_of_last_step())
            found = [PartMetrics.of(ranks) for ranks in timelines]
            known = [each.parts_seconds for each in found if each is not None]
            if not known:
                raise RuntimeError(f"the parts of none of {steps.timed} steps are known")
            yield known
        inputs.close()


def _describe_device(device: torch.device, ranks: int) -> Device:
    """Return the name and memory of a rank's device. On a CPU, all ranks share the memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(name=properties.name, memory_bytes=properties.total_memory)
    return Device(name="CPU", memory_bytes=psutil.virtual_memory().total // ranks)


def noise_of(seconds: Sequence[Sequence[float]]) -> float | None:
    """Return the relative difference of two step times that chance explains, if it is known.

    ``seconds``: row -> turn -> time of a step. Only turns that all have taken count.
    """
    turns = min(map(len, seconds), default=1)
    freedom = (len(seconds) - 1) * (turns - 1)
    if freedom < 2:
        return None
    logs = np.log([each[:turns] for each in seconds])
    rests = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    error = math.sqrt(2 / turns * float((rests**2).sum()) / freedom)
    return math.expm1(_STUDENT_99[min(freedom, 10) - 2] * error)
