"""Rows take turns on ranks of this machine. A row is one way to train: a run, or a peer.

    turn 1    A   B   C     each a launch of its own, with new processes
    turn 2    A   B   C
    ...

    log of a turn's step = row + drift of the machine in this turn + rest
    noise                = Student's t (99 %) x standard error of a difference, from the rests

If the machine is slower in a turn, all its rows are, so this does not count as noise.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import psutil

from megaspeed.config.resolve import Run
from megaspeed.measurement.local_ranks import DeviceType, RanksFailed, run_on_ranks
from megaspeed.units import counted

_STUDENT_99 = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17)
"""Two-sided 99 % quantiles for 2 to 10 degrees of freedom. For more, the last one is cautious."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a rank trains on."""

    name: str  # the GPU's name, or "CPU"
    memory_bytes: int  # on a CPU, this rank's share of the machine's memory
    threads: int  # of the rank, on a CPU


@dataclass(frozen=True, kw_only=True)
class TimedRank:
    """What one rank measured in one turn."""

    losses: Sequence[float]  # of each step, mean over the rank's tokens, in nats
    grad_norm: float  # of the last step, before clipping
    skipped_steps: int  # skipped because the loss or the norm was not finite
    warm_up_seconds: Sequence[float]  # of the steps before the timed ones
    step_seconds: Sequence[float]  # of the timed steps
    peak_bytes: int  # of the CUDA allocator; on a CPU, of the resident set with all libraries
    device: Device


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, and what its ranks measured once it has taken its turns.

    Each rank returns a ``TimedRank`` and, depending on the command, one more value.
    """

    label: str  # different for every row
    run: Run
    turns: Sequence[Sequence[TimedRank]] = ()  # turn -> rank
    extras: Sequence[Sequence[Any]] = ()  # turn -> rank -> the second value
    failure: str | None = None  # why a turn failed; the row takes no turn after it
    no_extras: str | None = None  # why the second value is not known although the row trained

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

    def after_turn(self, number: int, ranks: Sequence[list[Any]], failure: str | None) -> Self:
        """Return the row with what the ranks of a turn returned, or why they failed.

        If all ranks of the first turn have returned their times, it counts even if they failed
        later. Any other failure ends the row.
        """
        if failure is not None and (number > 1 or not ranks):
            return replace(self, failure=f"failed in turn {number}: {failure}")
        turns = [*self.turns, [timed for timed, *_ in ranks]]
        if failure is not None:
            return replace(self, turns=turns, no_extras=failure)
        extras = [extra for _, *more in ranks for extra in more]
        return replace(self, turns=turns, extras=[*self.extras, *([extras] if extras else [])])


AnyRow = TypeVar("AnyRow", bound=Row)


def take_turns(
    rows: Sequence[AnyRow],
    turns: int,
    part: Callable[[AnyRow, int], tuple[Callable[..., Any], *tuple[Any, ...]]],
    *,
    device_type: DeviceType,
    folder: Path,
    timeout_seconds: float,
    on_turn: Callable[[int, str], None] = lambda done, text: None,
) -> tuple[list[AnyRow], bool]:
    """Let rows take turns. A row that fails takes no further turn.

    Args:
        rows: with different labels.
        turns: of each row.
        part: (row, number of the turn, from 1) -> the function that its ranks call, and arguments.
        device_type: of the ranks.
        folder: exists; what the ranks of each turn print goes to a file in its ``logs``.
        timeout_seconds: the time limit of one turn.
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
                *part(row, number),
                world_size=row.run.grid.world_size,
                device_type=device_type,
                log=log,
                timeout_seconds=timeout_seconds,
            )
        except RanksFailed as failed:
            ranks, failure = failed.yielded, f"{failed}; see {log}"
        except KeyboardInterrupt:
            if not any(each.turns for each in by_label.values()):
                raise
            stopped = True
            break
        by_label[label] = row.after_turn(number, ranks, failure)
    return [row for row in by_label.values() if row.turns or row.failure], stopped


@dataclass(frozen=True, kw_only=True)
class Result(Generic[AnyRow]):
    """All rows of a command."""

    rows: Sequence[AnyRow]  # in the order in which they take turns
    turns: int  # of each row
    steps: int  # timed steps of a turn
    stopped: bool = False  # by Ctrl-C or a signal, before the last turn
    share_of_others: float = 0.0  # of the processors

    @property
    def done(self) -> list[AnyRow]:
        """The rows that have figures, and of which no turn failed."""
        return [row for row in self.rows if row.done]

    @property
    def device(self) -> Device | None:
        """Rank 0's; None if no row has figures."""
        return next((row.turns[0][0].device for row in self.rows if row.turns), None)

    @property
    def succeeded(self) -> bool:
        """Whether every row took all its turns."""
        return not self.stopped and all(row.done and row.no_extras is None for row in self.rows)

    @property
    def notes(self) -> Iterator[str]:
        """Yield what disturbed the times, and what went wrong in each row."""
        yield from busy_warning(self.share_of_others)
        if self.stopped:
            taken = sum(len(row.turns) for row in self.rows)
            yield f"stopped after {counted(taken, 'turn')}; the figures are of these"
        for row in self.rows:
            if row.failure is not None:
                yield f"{row.label} {row.failure}"
            if row.no_extras is not None:
                yield f"{row.label}: only the times are known: {row.no_extras}"
            if row.done and (skipped := row.turns[0][0].skipped_steps):
                yield (
                    f"{row.label} skipped {skipped} of {len(row.losses)} steps, because the loss "
                    "or the gradient norm was not finite"
                )


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


def share_of_others() -> float:
    """Measure the share of this process's processors that is busy in a second while it sleeps."""
    shares, own = psutil.cpu_percent(1.0, percpu=True), os.sched_getaffinity(0)
    return statistics.fmean([shares[i] for i in own if i < len(shares)] or shares) / 100


def busy_warning(share: float) -> Iterator[str]:
    """Yield a sentence if other processes have disturbed the times."""
    if share > 0.1:
        yield (
            f"other processes took {share:.0%} of the processors while no rank ran (the higher of "
            "a second before the first rank and one after the last), so the times are too long"
        )
