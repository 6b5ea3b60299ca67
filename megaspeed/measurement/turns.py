"""Contestants take turns, and the noise of their step times is what the turns do not share.

    turn 1    A   B   C     each a launch of its own
    turn 2    A   B   C
    ...

    log of a turn's step = contestant + drift of the machine in this turn + rest
    noise                = Student's t (99 %) x standard error of a difference, from the rests

If the machine is slower in a turn, all its contestants are, so this does not count as noise.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from megaspeed.measurement.local_ranks import RanksFailed

_STUDENT_99 = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17)
"""Two-sided 99 % quantiles for 2 to 10 degrees of freedom. For more, the last one is cautious."""

_Result = TypeVar("_Result")


def take_turns(
    names: Sequence[str],
    turns: int,
    launch: Callable[[str, int, Path], _Result],
    *,
    folder: Path,
    on_turn: Callable[[int, str], None] = lambda done, text: None,
) -> tuple[dict[str, list[_Result]], dict[str, str], bool]:
    """Lets contestants take turns. A contestant that fails takes no further turn.

    ``launch`` takes a turn, given the contestant, the turn's number and a file in ``folder`` for
    what is printed. ``on_turn`` is called before each turn, with the number of earlier turns and a
    description.

    Returns the results and the failures by contestant, and whether Ctrl-C or a signal has stopped
    them. If no turn had ended by then, KeyboardInterrupt is raised.
    """
    results: dict[str, list[_Result]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    (folder / "logs").mkdir(exist_ok=True)
    for done, (number, name) in enumerate(product(range(1, turns + 1), names)):
        if name in failures:
            continue
        on_turn(done, f"{name}, turn {number} of {turns}")
        log = folder / "logs" / f"{name.lower().replace(' ', '-')}-{number}.log"
        log.write_text("")  # the ranks append to it
        try:
            results[name].append(launch(name, number, log))
        except RanksFailed as failure:
            failures[name] = f"failed in turn {number}: {failure}; see {log}"
        except KeyboardInterrupt:
            if not any(results.values()):
                raise
            return results, failures, True
    return results, failures, False


def noise_of(seconds: Sequence[Sequence[float]]) -> float | None:
    """The relative difference of two step times that chance explains; None if it is not known.

    ``seconds``: contestant -> turn -> time of a step. Only turns that all have taken count.
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
    """The share of this process's processors that is busy in a second in which it sleeps."""
    shares, own = psutil.cpu_percent(1.0, percpu=True), os.sched_getaffinity(0)
    return statistics.fmean([shares[i] for i in own if i < len(shares)] or shares) / 100


def busy_warning(share: float) -> Iterator[str]:
    """A sentence if other processes have disturbed the times."""
    if share > 0.1:
        yield (
            f"other processes took {share:.0%} of the processors while no rank ran (the higher of "
            "a second before the first rank and one after the last), so the times are too long"
        )
