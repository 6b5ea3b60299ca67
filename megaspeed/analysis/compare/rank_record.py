"""What a row's ranks are told, and what each of them leaves behind: its figures, or why it failed.

    folder/task                       what to train, for all ranks
    folder/rank0, folder/rank1, ...   what became of it

They are pickles, written and read by this package on one machine within one comparison.
"""

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaspeed.analysis.compare.variants import Engine
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one row's ranks do.

    Attributes:
        engine: what shares memory over the data axis.
        run: what is trained.
        corpus: on what.
        steps: optimizer steps whose time is taken; one more is watched.
        device_type: "cpu" or "cuda".
        timeout_seconds: a collective that waits longer for other ranks fails.
    """

    engine: Engine
    run: Run
    corpus: PreparedCorpus
    steps: int
    device_type: str
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's figures.

    Attributes:
        rank: counted over all ranks.
        pipeline_stage: of this rank.
        losses: of each step in turn, the watched one last; mean over the step's tokens, nats.
        grad_norm: of the last step, before clipping.
        skipped_steps: not taken, because loss or norm was not finite.
        step_times_seconds: of the steps that were not watched, the first one too.
        states: what is held between two micro-batches.
        peak: what was held at the watched step's highest moment.
        allocator_peak_bytes: the most that torch's CUDA allocator had handed out; None on a CPU.
        traffic: bytes sent in the watched step.
        device: on what it ran, in words.
    """

    rank: int
    pipeline_stage: int
    losses: Sequence[float]
    grad_norm: float
    skipped_steps: int
    step_times_seconds: Sequence[float]
    states: MemoryBytes
    peak: MemoryBytes
    allocator_peak_bytes: int | None
    traffic: Traffic
    device: str


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What ended a rank.

    Attributes:
        rank: which one.
        reason: one line.
        out_of_memory: whether there was too little memory.
        at_seconds: when, by the machine's clock, so that the first of several is known.
    """

    rank: int
    reason: str
    out_of_memory: bool
    at_seconds: float


def write_task(folder: Path, task: Task) -> None:
    """For all ranks to read."""
    _write(folder / "task", task)


def read_task(folder: Path) -> Task:
    """What ``write_task`` wrote."""
    task: Task = pickle.loads((folder / "task").read_bytes())
    return task


def write_outcome(folder: Path, outcome: RankRecord | RankFailure) -> None:
    """One rank's; whole or not at all, should the rank be killed."""
    _write(folder / f"rank{outcome.rank}", outcome)


def read_outcomes(folder: Path, world_size: int) -> list[RankRecord | RankFailure]:
    """Those that there are, by rank."""
    files = [folder / f"rank{rank}" for rank in range(world_size)]
    return [pickle.loads(file.read_bytes()) for file in files if file.exists()]


def _write(file: Path, content: object) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(content))
    os.replace(part, file)
