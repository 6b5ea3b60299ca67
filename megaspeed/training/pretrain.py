"""The main job: one JSON file in, a trained model's metrics and loss curve out.

    arguments -> launch environment -> run (checked) -> ranks meet, and watch each other
        -> corpus -> process groups -> the job of all ranks (job.py) -> exit code

A mistake in the configuration is found before any rank waits for another.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import torch
from rich.console import Console
from rich.markup import escape

from megaspeed.checkpoint.errors import CheckpointError, StorageFailed
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import load_run
from megaspeed.config.overrides import add_config_options
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import prepare_corpus
from megaspeed.data.errors import DataError
from megaspeed.data.selection import find_problems_in_file
from megaspeed.topology.activity import START_UP_PATIENCE, Activity
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import TopologyError
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment
from megaspeed.topology.meeting import GroupError, RanksDisagree, check_in
from megaspeed.topology.process_exit import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT
from megaspeed.topology.processes import launcher_processes
from megaspeed.topology.rank_log import RankLog
from megaspeed.topology.stop_signal import StopSignal
from megaspeed.topology.watch import Watch
from megaspeed.training.console_lines import describe_corpus, describe_spare_ranks
from megaspeed.training.faults import inject_into_process
from megaspeed.training.job import EXPECTED, STOPPED, Job
from megaspeed.training.launch_warnings import launch_warnings
from megaspeed.training.predictions import Predictions
from megaspeed.training.reporting import check_packages
from megaspeed.training.restarts import Restarts, restart_number
from megaspeed.training.resume import ResumeOptions, check_resume
from megaspeed.training.resumed_split import keep_split
from megaspeed.training.run_folder import check_run_folder
from megaspeed.training.trainer import TrainingSummary

# Launchers end the whole job if one process fails. Only rank 0 prints errors that all ranks have,
# so the other ranks wait this long before they end.
_SECONDS_FOR_RANK_0_TO_SPEAK = 5.0
_COLLECTIVE_TIMEOUT_SECONDS = 1800.0
"""The minimum timeout of collectives. The watch usually ends a run that hangs much earlier."""

_SPARE_PERIOD_SECONDS = 0.5

_INPUT_ERRORS = (DataError, TopologyError)


def main(
    arguments: Sequence[str] | None = None,
    predictions: Predictions | None = None,
    launchers: Sequence[int] | None = None,
) -> int:
    """Trains as the command line says; returns the exit code.

    Args:
        arguments: the command line; this process's own if omitted.
        predictions: used for the banner, and if memory runs out.
        launchers: process numbers of the launchers that were above this process when it started.
            If omitted, the launchers that are above it now.

    The caller must leave by ``end_process``. After a failure, threads may still wait for other
    ranks, and an ordinary exit would wait for these threads.
    """
    options = _parse(arguments)
    try:
        launch = read_launch_environment(os.environ)
    except LaunchError as error:
        _let_rank_0_speak()
        sys.stderr.write(f"{error}\n")
        return EXIT_WRONG_INPUT
    console = Console(stderr=False, quiet=launch.rank != 0)
    try:
        run = _checked_run(options, launch, console)
        activity = Activity()
        inject_into_process(activity, launch.rank)
    except (ConfigError, DataError, CheckpointError) as error:
        return _refuse(error, launch)
    for warning in launch_warnings(
        launch,
        run,
        visible_gpus=torch.cuda.device_count(),
        has_bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(False),
        processors=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        is_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
    ):
        console.print("[yellow]warning:[/yellow]", warning, highlight=False, soft_wrap=True)
    try:
        meeting = check_in(launch, run.common_json(), _start_up_seconds(run))
    except TopologyError as error:  # of this rank alone
        _say(error, launch)
        return EXIT_WRONG_INPUT
    except (GroupError, RanksDisagree) as error:
        if launch.local_rank == 0 or (launch.rank == 1 and isinstance(error, GroupError)):
            _say(error, launch)  # one rank of each host
        return EXIT_FAILED if isinstance(error, GroupError) else EXIT_WRONG_INPUT
    # From here on, a stop signal does not end the process by itself.
    with StopSignal() as stop:
        if Restarts(meeting).given_up:
            return EXIT_FAILED
        if run.spare_ranks:
            meeting = meeting.without_spare_ranks(run.grid.world_size)
            console.print(describe_spare_ranks(run), highlight=False, soft_wrap=True)
        log = RankLog(run.run_dir, launch.rank)
        watch = Watch(
            meeting,
            run.grid,
            activity,
            stop,
            log,
            launchers=launcher_processes() if launchers is None else launchers,
            hang_timeout_seconds=run.config.training.hang_timeout_seconds,
        )
        job = Job(
            run=run,
            stated=ResumeOptions.of(options),
            meeting=meeting,
            activity=activity,
            stop=stop,
            watch=watch,
            log=log,
            console=console,
            predictions=predictions or Predictions(),
        )
        return _exit_code(job)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _let_rank_0_speak()
        super().error(message)


def _let_rank_0_speak() -> None:
    """For errors in the launcher's variables or the command line: other ranks wait for rank 0."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description="Pretrain a GPT that a JSON file describes.")
    add_config_options(parser)
    ResumeOptions.add_to(parser)
    # The deepspeed launcher passes it to every process. It is not used: LOCAL_RANK has the value.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _checked_run(options: argparse.Namespace, launch: LaunchEnvironment, console: Console) -> Run:
    try:
        run = load_run(
            options.config,
            options.overrides,
            world_size=launch.world_size,
            world_source=launch.source,
            device_type="cuda" if torch.cuda.is_available() else "cpu",
        )
    except ConfigError as error:
        others = find_problems_in_file(options.config, options.overrides)
        raise ConfigError([*error.problems, *others], error.where) from error
    check_run_folder(run)
    check_packages(run)
    resume = ResumeOptions.of(options)
    if not restart_number():  # after a restart, the folder may have this launch's own checkpoints
        check_resume(resume, run)
    run, kept = keep_split(resume, run)
    if kept is not None:
        console.print(kept, highlight=False, markup=False, soft_wrap=True)
    return run


def _start_up_seconds(run: Run) -> float:
    return START_UP_PATIENCE * run.config.training.hang_timeout_seconds


def _refuse(error: Exception, launch: LaunchEnvironment) -> int:
    if launch.rank != 0:
        time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)
    _say(error, launch)
    return EXIT_WRONG_INPUT


def _say(error: Exception, launch: LaunchEnvironment) -> None:
    speaker = f"[rank {launch.rank}] " if launch.rank else ""
    sys.stderr.write(f"{speaker}{error}\n")
    sys.stderr.flush()


def _exit_code(job: Job) -> int:
    """Runs the job while the ranks watch each other, and reports how it ended."""
    watch, launch = job.watch, job.meeting.launch
    expected = (*EXPECTED, *_INPUT_ERRORS, GroupError)
    try:
        with job.log, watch, watch.failures_reported(expected=expected):
            if launch.rank >= job.run.grid.world_size:
                return _wait_as_spare(job)
            summary = _train(job)
    except (*_INPUT_ERRORS, GroupError) as error:
        if watch.speaks:
            _say(error, launch)
        return EXIT_FAILED if isinstance(error, GroupError) else EXIT_WRONG_INPUT
    except CheckpointError as error:  # raised on all ranks
        if launch.rank == 0:
            _say(error, launch)
        return EXIT_FAILED if isinstance(error, StorageFailed) else EXIT_WRONG_INPUT
    except STOPPED as error:
        line = ("[red]training stopped:[/red]", escape(str(error)))
        job.console.print(*line, highlight=False, soft_wrap=True)
        return EXIT_WRONG_INPUT if isinstance(error, RanksDisagree) else EXIT_FAILED
    except OSError as error:  # a full disk, a deleted folder
        if watch.speaks:
            _say(error, launch)
        return EXIT_FAILED
    except Exception:  # reported with its traceback
        return watch.exit_code
    if summary is None:
        return EXIT_DONE
    return EXIT_DONE if summary.last_save.error is None else EXIT_FAILED


def _train(job: Job) -> TrainingSummary | None:
    """From the corpus to the last figures."""
    run, during = job.run, job.activity.during
    with during("preparing the corpus", patience=math.inf):
        start = time.perf_counter()
        with job.console.status("preparing the corpus"):
            corpus = prepare_corpus(
                run.config.data,
                run.config.model.vocab_size,
                speaks=job.meeting.launch.local_rank == 0,
            )
        line = describe_corpus(corpus, time.perf_counter() - start)
        job.console.print(line, highlight=False, soft_wrap=True)
    with during("creating the process groups", patience=START_UP_PATIENCE):
        context = ParallelContext.create(
            run.grid,
            job.meeting.launch,
            timeout_seconds=max(_COLLECTIVE_TIMEOUT_SECONDS, 2 * _start_up_seconds(run)),
            store=job.meeting.store,
            activity=job.activity,
        )
    with context:
        summary = job.train(corpus, context)
    if summary is not None and context.rank == 0:
        with during("the loss curve", patience=math.inf):
            job.print_summary(summary)
    return summary


def _wait_as_spare(job: Job) -> int:
    """A spare rank waits until the run ends, and then ends as the run does."""
    job.stop.can_save = True  # the ranks that train get the signal, too, and save
    with job.activity.during("waiting as a spare rank", patience=math.inf):
        try:
            while not job.watch.has_failed and not job.watch.rank_0_has_ended():
                time.sleep(_SPARE_PERIOD_SECONDS)
        except RuntimeError:  # the store is gone
            return EXIT_FAILED
    # After a failure, exit code 0 would tell torchrun's agent that its node is no longer needed.
    return job.watch.exit_code if job.watch.has_failed else EXIT_DONE
