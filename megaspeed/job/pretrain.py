"""The main job: one JSON file in, a trained model's metrics and loss curve out.

    arguments -> launch environment -> run (checked) -> ranks meet, and watch each other
        -> the job of all ranks (job.py) -> exit code

A mistake in the configuration is reported before any rank waits for another.
"""

import argparse
import os
import time
from collections.abc import Sequence
from typing import NoReturn

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from megaspeed.checked_run import load_checked_run
from megaspeed.checkpoint.errors import CheckpointError, StorageFailed
from megaspeed.config.document import add_config_options, with_hint
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import Run
from megaspeed.data.errors import DataError
from megaspeed.job.console import (
    describe_spare_ranks,
    launch_warnings,
    print_line,
    print_warning,
)
from megaspeed.job.continuing import command_line, how_to_continue
from megaspeed.job.job import EXPECTED, STOPPED, Job
from megaspeed.job.reporting import check_packages
from megaspeed.job.resume import Restarts, ResumeOptions, check_resume, restart_number
from megaspeed.job.run_folder import RunFolderLost, check_run_folder
from megaspeed.model.bf16_on_cpu import bf16_warning
from megaspeed.supervision.answers import RankFailed
from megaspeed.supervision.failure import write_error_file
from megaspeed.supervision.meeting import RanksDisagree, check_in
from megaspeed.supervision.process_end import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    StopSignal,
    launcher_processes,
)
from megaspeed.topology.activity import START_UP_TIMEOUTS, Activity
from megaspeed.topology.grid import TopologyError
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment
from megaspeed.topology.process_settings import set_defaults
from megaspeed.topology.store import GroupError, print_error
from megaspeed.training.faults import inject_into_process

_SECONDS_FOR_RANK_0_TO_PRINT = 5.0
"""Launchers end the whole job if one process fails. Only rank 0 prints errors that all ranks have,
so the other ranks wait this long before they end."""

_SPARE_PERIOD_SECONDS = 0.5

_WRONG_INPUT = (ConfigError, DataError, TopologyError, RanksDisagree, CheckpointError)


def main(
    arguments: Sequence[str] | None = None,
    *,
    as_command: bool = False,
    launchers: Sequence[int] | None = None,
) -> int:
    """Train as the command line states, and return the exit code.

    Args:
        arguments: the command line; this process's own if omitted.
        as_command: whether messages and help name ``megaspeed train``, not the script.
        launchers: process ids of the launchers above this process; looked up if omitted.

    The caller must exit with ``end_process``, because threads may still wait for other ranks.
    """
    set_defaults()  # first of all: a check of the GPU for a warning initialises CUDA
    options = parse_arguments(arguments, as_command=as_command)
    activity, resume = Activity(), ResumeOptions.of(options)
    rank = os.environ.get("RANK", "0")
    try:
        launch = read_launch_environment(os.environ)
        rank = str(launch.rank)
        console = Console(stderr=False, quiet=launch.rank != 0)
        run = _checked_run(options, resume, launch)
        for note in run.notes:
            print_line(console, escape(f"note: {note}"))
        inject_into_process(activity, launch.rank)
    except (LaunchError, ConfigError, DataError, CheckpointError) as error:
        _wait_unless_rank_0(rank)
        _report(error, rank)
        return EXIT_WRONG_INPUT
    _print_warnings(run, launch, console)
    try:
        timeout = START_UP_TIMEOUTS * run.config.training.hang_timeout_seconds
        meeting = check_in(launch, run.common_json(), timeout)
    except (TopologyError, GroupError, RanksDisagree) as error:
        is_of_this_rank = isinstance(error, TopologyError)
        no_rank_0 = launch.rank == 1 and isinstance(error, GroupError)  # rank 0 may be missing
        _report(error, rank, prints=launch.local_rank == 0 or is_of_this_rank or no_rank_0)
        return _exit_code(error)
    # From here on, a stop signal does not end the process by itself.
    with StopSignal() as stop:
        if (final_code := Restarts(meeting).final_code) is not None:
            return final_code
        if run.spare_ranks:
            meeting = meeting.without_spare_ranks(run.grid.world_size)
            print_line(console, describe_spare_ranks(run))
        above = launcher_processes() if launchers is None else launchers
        command = command_line(above)  # now, because a launcher may end before its ranks
        job = Job(
            run=run,
            config_file=str(options.config),
            options=resume,
            meeting=meeting,
            activity=activity,
            stop=stop,
            console=console,
            launchers=above,
        )
        code = _run(job)
        # Without ``launchers``, a Python program has called this, not a command.
        if launchers is not None and (line := how_to_continue(job, code, command)) is not None:
            print_line(console, Text(line))
        return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _wait_unless_rank_0(os.environ.get("RANK", "0"))
        _note_for_torchrun(f"error: {message}")
        super().error(with_hint(message))


def parse_arguments(
    arguments: Sequence[str] | None = None, *, as_command: bool = False
) -> argparse.Namespace:
    """Parse the options of the main job. A wrong option ends the process with exit code 2."""
    program = "megaspeed train" if as_command else None
    parser = _Parser(program, description="Pretrain a GPT that a JSON file describes.")
    if as_command:  # only for the help: cli/train.py reads it before the ranks start
        text = "processes to start on this machine; if omitted, one for each visible GPU"
        parser.add_argument("--world-size", type=int, help=text)
    add_config_options(parser)
    ResumeOptions.add_to(parser)
    # The deepspeed launcher passes this to every process. It is unused, as LOCAL_RANK is the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _checked_run(
    options: argparse.Namespace, resume: ResumeOptions, launch: LaunchEnvironment
) -> Run:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    world = World(launch.world_size, launch.source, device_type)
    run = load_checked_run(options.config, options.overrides, world)
    check_run_folder(run)
    check_packages(run)
    if not restart_number():  # after a restart, the folder may have this launch's own checkpoints
        check_resume(resume, run)
    return run


def _print_warnings(run: Run, launch: LaunchEnvironment, console: Console) -> None:
    if console.quiet:
        return
    by_torchrun, on_gpu = "TORCHELASTIC_RUN_ID" in os.environ, torch.cuda.is_available()
    warnings = launch_warnings(
        launch,
        run,
        visible_gpus=torch.cuda.device_count(),
        has_bf16=on_gpu and torch.cuda.is_bf16_supported(False),
        processors=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        torchrun_restarts=int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) if by_torchrun else None,
    )
    for warning in (*warnings, *bf16_warning(run.config, "cuda" if on_gpu else "cpu")):
        print_warning(console, warning)


def _run(job: Job) -> int:
    """Run the job while the ranks watch each other, and report how it ended."""
    watch, launch = job.watch, job.meeting.launch
    expected = (*EXPECTED, *_WRONG_INPUT, GroupError)
    try:
        with job.log, watch, watch.failures.reported(expected=expected):
            if launch.rank >= job.run.grid.world_size:
                return _wait_as_spare(job)
            summary = job.train()
    except expected as error:
        on_all_ranks = isinstance(error, (*STOPPED, RankFailed))
        prints = launch.rank == 0 if on_all_ranks else watch.failures.must_report
        if isinstance(error, STOPPED):
            print_line(job.console, f"[red]training stopped:[/red] {escape(str(error))}")
            prints = False
        _report(error, str(launch.rank), prints=prints)
        code = _exit_code(error)
        if code == EXIT_WRONG_INPUT or isinstance(error, RunFolderLost):
            Restarts(job.meeting).give_up(code)
        return code
    except Exception:  # reported with its traceback
        return watch.failures.exit_code
    well = summary is None or summary.last_save.error is None
    return EXIT_DONE if well else EXIT_FAILED


def _wait_as_spare(job: Job) -> int:
    """Wait on a spare rank until the run ends. Returns the exit code."""
    job.stop.can_save = True  # the ranks that train get the signal, too, and save
    with job.activity.during("waiting as a spare rank"):
        try:
            while not job.watch.has_failed and not job.watch.rank_0_has_ended():
                time.sleep(_SPARE_PERIOD_SECONDS)
        except RuntimeError:  # the store is gone
            return EXIT_FAILED
    # After a failure, exit code 0 would tell torchrun's agent that its node is no longer needed.
    return job.watch.failures.exit_code if job.watch.has_failed else EXIT_DONE


def _exit_code(error: Exception) -> int:
    wrong_input = isinstance(error, _WRONG_INPUT) and not isinstance(error, StorageFailed)
    return EXIT_WRONG_INPUT if wrong_input else EXIT_FAILED


def _wait_unless_rank_0(rank: str) -> None:
    """Wait on ranks other than 0, so that only rank 0 prints an error that all ranks have."""
    if rank != "0":
        time.sleep(_SECONDS_FOR_RANK_0_TO_PRINT)


def _report(error: Exception, rank: str, *, prints: bool = True) -> None:
    """Report an error without its traceback.

    If several ranks have the same error, only one of them ``prints`` it.
    """
    text = str(error) if rank == "0" else f"[rank {rank}] {error}"
    if prints:
        print_error(text)
    _note_for_torchrun(text if prints else text.split("\n")[0])


def _note_for_torchrun(text: str) -> None:
    """Let torchrun's report of the failed ranks include this error."""
    write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE"), text or "no message")
