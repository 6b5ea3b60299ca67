"""Commands that compute figures of a run without starting it: ``plan`` and ``schedule``."""

import argparse
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.table import Table

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_command,
    add_flags,
    add_values,
    load,
    new_file,
    not_negative,
    positive,
    say,
    write_json,
)
from megaspeed.config.document import parse_override, read_json_object
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config
from megaspeed.config.section import TOKEN_UNITS
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.buckets import Bucket, reduction_of_matrices
from megaspeed.data_axis.orthogonalization import Orthogonalization
from megaspeed.data_axis.steps import Work, check_data_axis, steps_of
from megaspeed.files.json_values import json_value
from megaspeed.pipeline.picture import SUFFIXES, draw_schedule, save
from megaspeed.pipeline.schedules import Pipeline, pipeline_of
from megaspeed.pipeline.simulation import check_schedule, format_grid
from megaspeed.planning.cluster import CPU, ClusterConfig, read_cluster
from megaspeed.planning.forecast import complete_training
from megaspeed.planning.longest_sequence import longest_sequences
from megaspeed.planning.measured_cpu import CpuSpeedError, measure_cpu
from megaspeed.planning.plan import plan
from megaspeed.planning.report import longest_report, report, what_if_report
from megaspeed.planning.variants import Training
from megaspeed.planning.what_if import what_if
from megaspeed.supervision.process_end import end_with_starter
from megaspeed.topology.launch import usable_processors
from megaspeed.units import counted, show, table_of


def add_to(commands: Any) -> None:
    """Add both commands and their options."""
    parser = add_command(
        commands,
        "plan",
        run_plan,
        "predict memory, traffic and time of a run",
        needs_world_size=False,
    )
    nic = "network bandwidth of each device, one way, in Gb/s (that of the vendor's system)"
    calibrate = "measured / predicted step of a run on such devices; multiplies all times"
    loads = "rows of the fullest rank / mean rows, if ranks share experts (1)"
    add_values(
        parser,
        ("--device", str, "NAME", None, "accelerator, such as h100-80gb, or cpu"),
        ("--nodes", positive, "N", None, "nodes of the cluster"),
        ("--gpus-per-node", positive, "K", None, "devices of one node (8)"),
        ("--nic-gbps", not_negative, "GBPS", None, nic),
        ("--dollars-per-gpu-hour", not_negative, "D", None, "price of a device"),
        ("--tokens", _tokens, "T", None, "length of the training, such as 300B or 1.4T"),
        ("--write", new_file, "FILE", None, "write the best variant as a configuration"),
        ("--calibrate", not_negative, "FACTOR", None, calibrate),
        ("--load-factor", not_negative, "FACTOR", 1.0, loads),
    )
    add_flags(
        parser,
        ("--what-if", "list every variant that fits, the fastest first"),
        ("--longest-sequence", "find the longest sequence that fits, for each layout"),
    )
    parser = add_command(commands, "schedule", run_schedule, "print the pipeline's timetable")
    add_values(
        parser,
        ("--picture", _picture, "FILE", None, "draw it, as .png, .svg or .pdf"),
        (
            "--data-axis",
            _stage,
            "STAGE",
            None,
            "also print what pipeline stage STAGE (from 0) reduces and gathers, and when",
        ),
    )


def _stage(text: str) -> int:
    """Return the number of a pipeline stage on the command line, counted from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, counted from 0")
    return int(text)


def _picture(text: str) -> Path:
    """Return a file on the command line to which a picture can be written."""
    file = new_file(text)
    if file.suffix.lower() not in SUFFIXES:
        suffixes = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise argparse.ArgumentTypeError(f"{file} must end with {suffixes}")
    return file


def _tokens(text: str) -> int:
    """Return a number of tokens on the command line: 2000000, 300B, 1.4T."""
    number, unit = text, 1
    if text[-1:].upper() in TOKEN_UNITS:
        number, unit = text[:-1], TOKEN_UNITS[text[-1].upper()]
    tokens = not_negative(number) * unit
    if not 1 <= tokens <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"it must be at least 1 and at most {_MOST_TOKENS:.0e}")
    return round(tokens)


_MOST_TOKENS = 1e18


_CPU_SPEED = (sys.executable, "-m", "megaspeed.measurement.cpu_speed")


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan. The exit code is 0 whether the run fits or not; 1 if nothing is written."""
    stated = _stated_cluster(options)
    training = _training(options, stated)
    try:
        cluster = stated.cluster()
        if stated.device == CPU:
            say(f"measuring this machine with {counted(training.run.grid.world_size, 'rank')}")
            cluster = replace(measure_cpu(training.run, _CPU_SPEED), calibration=stated.calibrate)
    except CpuSpeedError as error:
        say(f"megaspeed plan: {error}", error=True)
        return EXIT_FAILED
    planned = plan(training, cluster, stated.gpus_per_node)
    training = replace(training, run=planned.run)
    figures = planned.as_json()
    complete = None
    if planned.forecast is not None:
        complete = complete_training(planned.forecast, stated, options.tokens)
        figures["training"] = json_value(complete)
    show(report(planned, complete))
    code = EXIT_DONE
    if cluster is not None and (options.what_if or options.write):
        text = "comparing the variants of the run"
        with _processes() as executor:
            found = _searched(what_if, text, training, cluster, executor)
        figures["what_if"] = found.as_json()
        show(what_if_report(found))
        if options.write and found.best is not None:
            changes = [*options.overrides, *found.best.set_text]
            _write_config(options.write, options.config, changes)
            say(f"written: {options.write}")
        elif options.write:
            reason = f"no variant fits {cluster.device.name}"
            say(f"{options.write} is not written: {reason}", error=True)
            code = EXIT_FAILED
    if cluster is not None and options.longest_sequence:
        text = "searching for the longest sequence of each layout"
        longest = _searched(longest_sequences, text, training, cluster)
        figures["longest_sequences"] = [each.as_json() for each in longest]
        show(longest_report(longest, training.run.config.model))
    write_json(options, figures)
    return code


_Found = TypeVar("_Found")


def _searched(find: Callable[..., _Found], text: str, *arguments: Any) -> _Found:
    """Return what a search finds, and show its progress."""
    # Imported here, because a plan without a search starts faster without it.
    from megaspeed.bar_or_lines import BarOrLines

    with BarOrLines(1, text) as bar:
        return find(*arguments, show=bar.show)


_STOPS = signal.SIGINT, signal.SIGTERM


@contextmanager
def _processes() -> Iterator[Executor | None]:
    """Yield an executor with a process for each processor; None if the system cannot start them.

    They end at a stop signal, and if this process ends. While they start, stop signals are blocked.

    Raises:
        ChildProcessError: one of them was killed.
    """
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import active_children

    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        executor = ProcessPoolExecutor(usable_processors(), initializer=_prepare)
        executor.submit(int)  # starts all of them
    except (ImportError, NotImplementedError, OSError):  # no semaphores, or no more processes
        for process in active_children():
            process.terminate()
        executor = None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    with executor or nullcontext():
        try:
            yield executor
        except BaseException as error:
            for process in active_children():
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "a process that compares variants was killed, perhaps because the memory of "
                    "this machine is full; run the command again, or on another machine"
                ) from error
            raise


def _prepare() -> None:
    gc.disable()  # a search creates no cycles, and garbage collection would take 15 % of its time
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    end_with_starter()


def _stated_cluster(options: argparse.Namespace) -> ClusterConfig:
    """Return the cluster of the options, if it has what other options need."""
    stated = read_cluster({key: getattr(options, key) for key in ClusterConfig.model_fields})
    wants = ("what_if", "longest_sequence", "write", "tokens", "calibrate", "dollars_per_gpu_hour")
    wanted = next((name for name in wants if getattr(options, name)), None)
    if stated.device is None and wanted is not None:
        raise _wrong(
            f"--{wanted.replace('_', '-')} needs the figures of a device: add --device h100-80gb"
        )
    return stated


def _training(options: argparse.Namespace, stated: ClusterConfig) -> Training:
    """Return the run on the stated number of ranks, or on all devices."""
    world_source = "--nodes" if options.world_size is None else "--world-size"
    options.world_size = stated.ranks(options.world_size)
    device_type: Literal["cuda", "cpu"] = "cpu" if stated.device == CPU else "cuda"
    run = load(options, device_type, world_source)
    ep, factor = run.grid.ep or 1, options.load_factor
    if factor != 1.0 and ep == 1:
        raise _wrong(f"--load-factor {factor:g} needs parallel.expert above 1; remove it")
    if not 1.0 <= factor <= ep:
        raise _wrong(f"--load-factor {factor:g} must be between 1 and parallel.expert {ep}")
    training = Training(
        run=replace(run, load_factor=factor),
        stated=read_config(options.config, options.overrides),
        device_type=device_type,
    )
    if options.write and options.write.exists():
        for file in _extended_files(options.config):
            if options.write.samefile(file):
                raise _wrong(f"--write {options.write} would replace {file}, which it extends")
    return training


def _extended_files(config: Path) -> Iterator[Path]:
    """Yield a configuration that was read without problems, and all files that it extends."""
    file: Path | None = config
    while file is not None:
        yield file
        extended = read_json_object(file)[0].get("extends")
        file = None if extended is None else file.parent / extended


def _wrong(problem: str) -> ConfigError:
    return ConfigError([problem], "the command line")


def _write_config(file: Path, extended: Path, changes: Sequence[str]) -> None:
    """Write a configuration that extends a file and states the changes of ``--set``."""
    values: dict[str, Any] = {"extends": os.path.relpath(extended.resolve(), file.parent.resolve())}
    for change in changes:
        tree, _ = parse_override(change)
        _put(values, tree)
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _put(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Replace values. Unlike in a merge, null stays: it removes a key of the extended file."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _put(values[key], value)
        else:
            values[key] = value


def run_schedule(options: argparse.Namespace) -> int:
    """Print the timetable of the run's pipeline: rows are pipeline stages, columns are time.

    With --data-axis, also print what one stage reduces and gathers: on GPUs, as ``plan`` does.
    """
    run = load(options, "cpu" if options.data_axis is None else "cuda")
    pipeline, stage = pipeline_of(run), options.data_axis
    if stage is not None and stage >= pipeline.stages:
        last = pipeline.stages - 1
        raise _wrong(
            f"--data-axis {stage} names no pipeline stage: they are counted from 0 to {last}"
        )
    check_schedule(pipeline)
    say(format_grid(pipeline, shutil.get_terminal_size().columns))
    bubble = pipeline.ideal_bubble
    times = {2: "twice", 3: "three times"}[pipeline.backward_ticks]
    say(f"ideal bubble: {bubble:.1%} of the step (a backward takes {times} a forward's time)")
    if options.picture is not None:
        sums_visits = reduction_of_matrices(run, "cuda", run.grid.copies).when == "visit"
        save(draw_schedule(pipeline, sums_visits=sums_visits), options.picture)
        say(f"written: {options.picture}")
    figures: dict[str, Any] = {"bubble_fraction": bubble}
    if stage is not None:
        axis = data_axis_of(run, stage, "cuda")
        check_data_axis(axis, pipeline, stage)
        buckets = [_row_of(bucket, pipeline) for bucket in axis.buckets]
        works = [_counts_of(work) for work in steps_of(axis, pipeline, stage)]
        figures["data_axis"] = {"pipeline_stage": stage, "buckets": buckets, "works": works}
        show(_data_axis(stage, buckets, works))
        plans = (axis.orthogonalization, axis.expert_orthogonalization)
        names = ("orthogonalization", "expert_orthogonalization")
        for name, plan_of_muon in zip(names, plans, strict=True):
            if plan_of_muon is not None:
                shared = _orthogonalization(plan_of_muon)
                figures["data_axis"][name] = shared
                what = "experts" if plan_of_muon is plans[1] else "matrices"
                show(_shared_matrices(stage, what, shared))
    write_json(options, figures)
    return EXIT_DONE


def _counts_of(work: Work) -> dict[str, Any]:
    """Return what an instruction gathers and reduces. Bytes are those of the messages of a rank.

    Those of compressed gradients depend on the method. ``plan`` counts them.
    """
    gathers = [gather for gather in work.gathers if gather.parameters]
    reduced = [b for b in work.reduces if b.reduction.collective and not b.is_sent_compressed]
    sizes = [bucket.sent_bytes for bucket in reduced]
    sizes += [bucket.part_bytes for bucket in work.sums if bucket.compression is None]
    return {
        "instruction": repr(work.instruction),
        "gathers": len(gathers),
        "gathered_bytes": sum(gather.message_bytes for gather in gathers),
        "reductions": len(sizes),
        "reduced_bytes": sum(sizes),
        "compressed": sum(bucket.compression is not None for bucket in work.sums),
    }


def _orthogonalization(plan: Orthogonalization) -> dict[str, Any]:
    """Return how the ranks share the matrices. Loads are proportional to FLOPs."""
    owners = range(plan.members * plan.groups)
    return {
        "sections": len(plan.sections),
        "batches": sum(map(len, plan.rounds)),
        "rounds": len(plan.rounds),
        "owners": len(owners),
        "largest / mean load": max(plan.costs) * len(owners) / max(1, sum(plan.costs)),
        "most elements sent": max(map(plan.sent_by, owners)),
    }


def _shared_matrices(stage: int, what: str, shared: Mapping[str, Any]) -> Iterator[str | Table]:
    yield ""
    yield f"{what.capitalize()} that the ranks of pipeline stage {stage} orthogonalize in a step"
    table = table_of(right=[*shared])
    table.add_row(*(f"{n:.2f}" if isinstance(n, float) else f"{n:,}" for n in shared.values()))
    yield table


_WHEN = {
    "after": "after the backwards",
    "step": "in the last backward",
    "visit": "at the end of a visit",
    "micro_batch": "in each backward",
}


def _row_of(bucket: Bucket, pipeline: Pipeline) -> dict[str, Any]:
    how, method = bucket.reduction, bucket.compression
    over, collectives = [], [] if how.collective is None else [f"{how.collective} in {how.sent}"]
    if bucket.shards > 1:
        over.append(counted(bucket.shards, "shard"))
    if how.holders > bucket.shards:
        over.append(counted(how.holders // bucket.shards, "replica"))
    if bucket.is_sent_compressed:
        collectives = []
    if method is not None:
        collectives.append(method.type)
    elif how.replica_axis is not None:
        collectives.append("all_reduce")
    is_reduced = how.collective is not None
    when = "after a forward" if bucket.is_from_loss else _WHEN[how.when]
    return {
        "parameters": [parameter.name for parameter in bucket.parameters],
        "keeps": how.keeps,
        "when": when if is_reduced else "never",
        "collective": ", then ".join(collectives).replace("_", "-"),
        "over": " x ".join(over) if is_reduced else "",
        "elements": bucket.elements,
        "times a step": bucket.times(pipeline) if is_reduced else 0,
    }


def _data_axis(
    stage: int, buckets: Sequence[dict[str, Any]], works: Sequence[dict[str, Any]]
) -> Iterator[str | Table]:
    yield ""
    yield f"Buckets of gradients on each GPU of pipeline stage {stage}"
    left = ("parameters", "keeps", "when", "collective", "over")
    table = table_of(left=left, right=("elements", "times a step"))
    for bucket in buckets:
        (first, *others), *words, elements, times = bucket.values()
        more = f" and {len(others)} more" if others else ""
        table.add_row(first + more, *words, f"{elements:,}", str(times))
    yield table
    yield ""
    yield "What each instruction gathers and reduces"
    compresses = any(work["compressed"] for work in works)
    sizes = ["gathers", "gathered\nbytes", "reductions", "reduced\nbytes"]
    sizes += ["compressed\nbuckets"] * compresses
    table = table_of(left=("instruction",), right=sizes)
    for work in works:
        name, *counts = work.values()
        cells = (f"{count:,}" if count else "" for count in counts[: len(sizes)])
        table.add_row(name, *cells)
    yield table
