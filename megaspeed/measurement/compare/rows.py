"""Makes the rows of a comparison, and trains each of them on ranks of this machine.

ZeRO-0, ZeRO-1    one row: gradients are reduced once a step
ZeRO-2, ZeRO-3    two rows if a step has several micro-batches: reducing after each of them
                  takes less memory, reducing once sends less
DDP, FSDP2        DDP reduces once a step; FSDP2 has the same two rows as ZeRO-3

Rows take turns, and each turn starts new processes:

turn 1    ZeRO-0, ZeRO-1, ...    step 1 warms up, the others are timed. One more step, which is
                                 not compiled, counts memory and traffic.
turn 2    ZeRO-0, ZeRO-1, ...    step 1 warms up, the others are timed
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import GradientReduction, Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.compare.baselines import BaselineWorker
from megaspeed.measurement.compare.result import Baseline, Engine, Row, StageBytes, TimedRank
from megaspeed.measurement.local_ranks import DeviceType, RanksFailed, run_on_ranks
from megaspeed.measurement.turns import take_turns
from megaspeed.measurement.watched_step import RankMeasurement, WatchedZero, measure
from megaspeed.planning.costs.stage_memory import predict_memory
from megaspeed.planning.costs.traffic import predict_traffic
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import Worker


def zero_rows(run: Run, zero_stages: Sequence[int], device_type: DeviceType) -> list[Row]:
    """One row for each ZeRO stage, or two if ``gradient_reduction`` makes a difference."""
    return [
        _row(run, "zero", f"ZeRO-{stage}", stage, reduction, device_type)
        for stage in sorted(set(zero_stages))
        for reduction in _reductions(run, stage)
    ]


def baseline_rows(run: Run, baselines: Sequence[Baseline], device_type: DeviceType) -> list[Row]:
    """The rows of torch's own data parallelism: DDP, then FSDP2.

    Raises:
        ConfigError: DDP and FSDP2 cannot train this run.
    """
    problems = []
    if baselines and (run.grid.pp > 1 or run.grid.tp > 1):
        problems.append(
            "DDP and FSDP2 have only a data axis, but this layout has parallel.pipeline "
            f"{run.grid.pp} and parallel.tensor {run.grid.tp}; set both to 1, or omit --baselines"
        )
    if baselines and run.precision == "fp16":
        problems.append(
            "DDP and FSDP2 are run without a loss scale, but fp16.enabled is true; set "
            "bf16.enabled instead, or omit --baselines"
        )
    if problems:
        raise ConfigError(problems, where=f"{run.name} with --baselines {' '.join(baselines)}")
    rows = []
    if "ddp" in baselines:
        # DDP keeps complete gradients, so it would gain nothing by reducing more than once.
        rows.append(_row(run, "ddp", "DDP", run.zero_stage, None, device_type))
    if "fsdp" in baselines:
        for reduction in _reductions(run, 3):
            rows.append(_row(run, "fsdp", "FSDP2", run.zero_stage, reduction, device_type))
    return rows


def _reductions(run: Run, zero_stage: int) -> tuple[GradientReduction | None, ...]:
    """The reductions that make a difference at this ZeRO stage; (None,) if none does."""
    if run.compression is not None:
        return (None,)  # it needs complete gradients
    several = run.batch.gradient_accumulation_steps > 1 and run.grid.dp > 1
    return ("per_micro_batch", "per_step") if zero_stage >= 2 and several else (None,)


def _row(
    run: Run,
    engine: Engine,
    name: str,
    zero_stage: int,
    reduction: GradientReduction | None,
    device_type: DeviceType,
) -> Row:
    """A row that trains ``run`` at this ZeRO stage.

    If ``reduction`` is None, gradients are reduced once a step. PowerSGD starts at step 1, because
    the first steps are measured.
    """
    keys = {
        "zero_optimization.stage": zero_stage,
        "parallel.gradient_reduction": reduction or "per_step",
    }
    resolved = resolve_run(
        run.config.compressed_from_step_1().changed(keys),
        World(run.grid.world_size, "--world-size", device_type),
        name=run.name,
    )
    # On a GPU, the peak is the allocator's in the timed steps.
    watched = resolved if device_type == "cuda" else _uncompiled(resolved)
    return Row(
        label=name if reduction is None else f"{name} {reduction}",
        engine=engine,
        run=resolved,
        predicted=_predict(watched, device_type) if engine == "zero" else None,
    )


def _uncompiled(run: Run) -> Run:
    return replace(run, config=run.config.changed({"training.compile": False}))


def _predict(run: Run, device_type: DeviceType) -> list[StageBytes]:
    predicted = []
    for stage in range(run.grid.pp):
        memory = predict_memory(run, stage, device_type=device_type)
        traffic = predict_traffic(run, stage, device_type)
        predicted.append(StageBytes(states=memory.states, peak=memory.peak, traffic=traffic))
    return predicted


def train_rows(
    rows: Sequence[Row],
    corpus: PreparedCorpus,
    *,
    turns: int,
    steps: int,
    device_type: DeviceType,
    folder: Path,
    timeout_seconds: float,
    on_turn: Callable[[int, str], None] = lambda done, text: None,
) -> tuple[list[Row], bool]:
    """Trains the rows in turns, each of ``steps`` timed steps after one that warms up.

    ``folder`` exists; the output of each turn's ranks goes to a file in its ``logs``. The time
    limit is that of one turn, and of counting memory and traffic. For ``on_turn``, see
    ``take_turns``.

    Returns the rows with their figures or why they failed, and whether Ctrl-C or a signal has
    stopped them. If no turn had ended by then, KeyboardInterrupt is raised.
    """
    by_label = {row.label: row for row in rows}

    def launch(label: str, number: int, log: Path) -> Sequence[TimedRank]:
        row = by_label[label]
        try:
            ranks: Sequence[list[Any]] = run_on_ranks(
                *(train_rank, row.engine, row.run, corpus, steps, timeout_seconds, number == 1),
                world_size=row.run.grid.world_size,
                device_type=device_type,
                log=log,
                timeout_seconds=timeout_seconds,
            )
        except RanksFailed as failure:
            if number > 1 or not failure.yielded:
                raise
            ranks = failure.yielded
            by_label[label] = replace(row, unwatched=f"{failure}; see {log}")
        else:
            if number == 1:
                by_label[label] = replace(row, watched=[watched for _, watched in ranks])
        return [timed for timed, *_ in ranks]

    results, failures, stopped = take_turns(
        [*by_label], turns, launch, folder=folder, on_turn=on_turn
    )
    done = [
        replace(row, turns=results[label], reason=failures.get(label))
        for label, row in by_label.items()
    ]
    return [row for row in done if row.turns or row.reason], stopped


def train_rank(
    launch: LaunchEnvironment,
    engine: Engine,
    run: Run,
    corpus: PreparedCorpus,
    steps: int,
    timeout_seconds: float,
    watches: bool,
) -> Iterator[TimedRank | RankMeasurement]:
    """Trains as one rank of a row, and yields the times of its steps.

    If ``watches``, it then yields the memory and traffic of one more step.
    """
    with ParallelContext.create(run.grid, launch, timeout_seconds=timeout_seconds) as context:
        if engine == "zero":
            watched: WatchedZero | BaselineWorker = WatchedZero(Worker(run, context))
        else:
            watched = BaselineWorker(engine, run, context)
        inputs = StepInputs(run, corpus, context)
        samples, on_gpu = run.batch.train_batch_size, context.device.type == "cuda"
        losses, seconds, skipped = [], [], 0
        for number in range(1 + steps):
            if on_gpu and number == 1:  # the first step also compiles
                torch.cuda.reset_peak_memory_stats(context.device)
            start = time.perf_counter()
            # The step returns the loss as a number, so a GPU has finished the step by then.
            result = watched.train_step(
                inputs.load(number * samples), inputs.learning_rate(number - skipped)
            )
            seconds.append(time.perf_counter() - start)
            losses.append(result.loss)
            skipped += result.skipped
        peak = torch.cuda.max_memory_allocated(context.device) if on_gpu else None
        device, memory = _device(context)
        yield TimedRank(
            pipeline_stage=context.pp_rank,
            losses=losses,
            grad_norm=result.grad_norm,
            skipped_steps=skipped,
            step_seconds=seconds,
            allocator_peak_bytes=peak,
            device=device,
            device_memory_bytes=memory,
        )
        if watches:
            load = inputs.load((1 + steps) * samples)
            yield measure(watched, load, inputs.learning_rate(1 + steps - skipped))[1]
        inputs.close()


def _device(context: ParallelContext) -> tuple[str, int]:
    """Name and memory of this rank's device. On a CPU, all ranks share the machine's memory."""
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        return properties.name, properties.total_memory
    return "CPU", psutil.virtual_memory().total // context.world_group.size()
