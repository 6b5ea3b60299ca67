"""One process of a row: trains, measures the time of the steps, and watches one step.

    step     1          2 ... K            K + 1
             warms up   time is measured   memory and traffic are counted, which slows the step

The process that launches the row writes `task` to a folder. Each rank reads it, and writes what it
measured, or why it failed, to `rank0`, `rank1`, ... All of them are pickles.
"""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.files.durable import write_file

if TYPE_CHECKING:
    from megaspeed.analysis.compare.result import Engine, RankRecord
    from megaspeed.topology.context import ParallelContext

Baseline = Literal["ddp", "fsdp"]

# The launcher ends all ranks when one fails. This is the time for the others to write their reason.
_SECONDS_FOR_OTHERS_TO_WRITE = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks of one row train."""

    engine: "Engine"
    run: Run
    corpus: PreparedCorpus
    steps: int  # optimizer steps whose time is measured; one more step is watched
    device_type: str  # "cpu" or "cuda"
    timeout_seconds: float  # limit of a row, and of a collective that waits for other ranks


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank failed."""

    reason: str  # one line, with the rank
    out_of_memory: bool
    at_seconds: float  # by the machine's clock, to find the first of several failures


def run_rank(folder: Path) -> int:
    """Train the task in ``folder`` as one rank. Returns the exit code."""
    task: Task = pickle.loads((folder / "task").read_bytes())
    if task.device_type == "cpu":
        # A launcher assigns GPUs to its processes even if the run is to use the CPU.
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    outcome: RankRecord | RankFailure
    try:
        outcome = _train(task)
    except Exception as error:
        traceback.print_exc()
        outcome = _failure(error)
    # A rank that is killed meanwhile leaves no file.
    write_file(folder / f"rank{_rank()}", lambda file: pickle.dump(outcome, file))
    if isinstance(outcome, RankFailure):
        time.sleep(_SECONDS_FOR_OTHERS_TO_WRITE)
        return 1
    return 0


def _train(task: Task) -> "RankRecord":
    # Imported here: DeepSpeed chooses its accelerator when it is imported.
    from megaspeed.analysis.compare.result import RankRecord
    from megaspeed.topology.context import ParallelContext
    from megaspeed.topology.launch import read_launch_environment
    from megaspeed.training.step_inputs import StepInputs

    launch = read_launch_environment(os.environ)
    timeout = task.timeout_seconds
    with ParallelContext.create(task.run.grid, launch, timeout_seconds=timeout) as context:
        train_step, watched_step = _steps(task, context)
        inputs = StepInputs(task.run, task.corpus, context)
        samples = inputs.shape.train_batch_size
        losses, seconds, skipped = [], [], 0
        for number in range(task.steps):
            start = time.perf_counter()
            # The step returns the loss as a number, so a GPU has finished the step by then.
            result = train_step(
                inputs.load(number * samples), inputs.learning_rate(number - skipped)
            )
            seconds.append(time.perf_counter() - start)
            losses.append(result.loss)
            skipped += result.skipped
        result, measured = watched_step(
            inputs.load(task.steps * samples), inputs.learning_rate(task.steps - skipped)
        )
        inputs.close()
        name, memory = _device(context)
    return RankRecord(
        **vars(measured),
        losses=[*losses, result.loss],
        grad_norm=result.grad_norm,
        skipped_steps=skipped + result.skipped,
        step_times_seconds=seconds,
        device=name,
        device_memory_bytes=memory,
    )


def _steps(task: Task, context: "ParallelContext") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The training step of this row, and the same step under observation."""
    if task.engine == "zero":
        from megaspeed.analysis.measurement.watched_step import measure_step
        from megaspeed.training.worker import Worker

        worker = Worker(task.run, context)
        return worker.train_step, lambda load, rate: measure_step(worker, load, rate)
    from megaspeed.analysis.compare.baselines import BaselineWorker
    from megaspeed.analysis.measurement.watched_step import measure

    baseline = BaselineWorker(task.engine, task.run, context)
    return baseline.train_step, lambda load, rate: measure(baseline, load, rate)


def _device(context: "ParallelContext") -> tuple[str, int]:
    """Name and memory of this rank's device. On a CPU, all ranks share the machine's memory."""
    import torch

    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        return properties.name, properties.total_memory
    return "CPU", psutil.virtual_memory().total // context.world_group.size()


def _failure(error: Exception) -> RankFailure:
    import torch

    # torch's CPU allocator raises a plain RuntimeError.
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "DefaultCPUAllocator" in str(error)
    )
    first_line = (str(error).strip().splitlines() or [""])[0]
    return RankFailure(
        reason=f"{type(error).__name__}: {first_line} (rank {_rank()})",
        out_of_memory=out_of_memory,
        at_seconds=time.time(),
    )


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    # Imported under its own name, because a pickle of a class of "__main__" cannot be read.
    from megaspeed.analysis.compare import rank_program
    from megaspeed.topology.process_end import end_process

    end_process(rank_program.run_rank(Path(sys.argv[-1])))
