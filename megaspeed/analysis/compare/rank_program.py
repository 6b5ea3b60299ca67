"""What the launcher starts in each process of a row: train, take the time, watch one step.

    step     1          2 ... K           K + 1
             warms up   time is taken     memory and traffic are counted, which slows it

Every rank writes what it found, or why it failed, for the process that launched it.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaspeed.analysis.compare.rank_record import (
    RankFailure,
    RankRecord,
    Task,
    read_task,
    write_outcome,
)

if TYPE_CHECKING:
    import torch

    from megaspeed.analysis.measurement.watched_step import RankMeasurement
    from megaspeed.topology.context import ParallelContext
    from megaspeed.training.step_inputs import StepInputs
    from megaspeed.training.worker import Load, StepResult

    Step = Callable[[Load, float], StepResult]
    WatchedStep = Callable[[Load, float], tuple[StepResult, RankMeasurement]]

# Launchers end all ranks when one ends badly; the others get this long to say what they met.
_SECONDS_FOR_OTHERS_TO_WRITE = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Carries out the task in ``--folder``; returns the exit code."""
    parser = argparse.ArgumentParser(description="One rank of `megaspeed compare`.")
    parser.add_argument("--folder", required=True, type=Path, help="where the task is")
    folder: Path = parser.parse_args(arguments).folder
    task = read_task(folder)
    if task.device_type == "cpu":
        # A launcher names GPUs to its processes even where the run is to be on the CPU.
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    try:
        write_outcome(folder, _carry_out(task))
    except Exception as error:
        traceback.print_exc()
        write_outcome(folder, _failure(error))
        time.sleep(_SECONDS_FOR_OTHERS_TO_WRITE)
        return 1
    return 0


def _carry_out(task: Task) -> RankRecord:
    # Imported here: as it is imported, DeepSpeed looks for its accelerator.
    from megaspeed.topology.context import ParallelContext
    from megaspeed.topology.launch import read_launch_environment
    from megaspeed.training.step_inputs import StepInputs

    grid = task.run.grid
    launch = read_launch_environment(os.environ)
    with ParallelContext.create(grid, launch, timeout_seconds=task.timeout_seconds) as context:
        step, watched_step = _build(task, context)
        inputs = StepInputs(task.run, task.corpus, context)
        record = _train(step, watched_step, inputs, task.steps, _name_of(context.device))
        inputs.close()
        return record


def _build(task: Task, context: "ParallelContext") -> "tuple[Step, WatchedStep]":
    """How this row takes a step, and how it takes one under observation."""
    if task.engine == "zero":
        from megaspeed.analysis.measurement.watched_step import measure_step
        from megaspeed.training.worker import Worker

        worker = Worker(task.run, context)
        return worker.train_step, lambda load, rate: measure_step(worker, load, rate)
    from megaspeed.analysis.compare.baseline_measurement import measure_baseline_step
    from megaspeed.analysis.compare.baselines import BaselineWorker

    baseline = BaselineWorker(task.engine, task.run, context)
    return baseline.train_step, lambda load, rate: measure_baseline_step(baseline, load, rate)


def _train(
    step: "Step", watched_step: "WatchedStep", inputs: "StepInputs", steps: int, device: str
) -> RankRecord:
    losses, seconds, skipped = [], [], 0
    samples = inputs.shape.train_batch_size
    for number in range(steps):
        start = time.perf_counter()
        # It returns the loss as a number, so a GPU has done all of the step by then.
        result = step(inputs.load(number * samples), inputs.learning_rate(number - skipped))
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
        skipped += result.skipped
    rate = inputs.learning_rate(steps - skipped)
    result, measured = watched_step(inputs.load(steps * samples), rate)
    return RankRecord(
        rank=measured.rank,
        pipeline_stage=measured.pipeline_stage,
        losses=[*losses, result.loss],
        grad_norm=result.grad_norm,
        skipped_steps=skipped + result.skipped,
        step_times_seconds=seconds,
        states=measured.states,
        peak=measured.peak,
        allocator_peak_bytes=measured.allocator_peak_bytes,
        traffic=measured.traffic,
        device=device,
    )


def _name_of(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _failure(error: Exception) -> RankFailure:
    import torch

    # torch's CPU allocator raises a plain RuntimeError.
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "DefaultCPUAllocator" in str(error)
    )
    lines = str(error).strip().splitlines() or [""]
    return RankFailure(
        rank=int(os.environ.get("RANK", "0")),
        reason=f"{type(error).__name__}: {lines[0]}",
        out_of_memory=out_of_memory,
        at_seconds=time.time(),
    )


if __name__ == "__main__":
    from megaspeed.topology.process_end import end_process

    end_process(main(sys.argv[1:]))
