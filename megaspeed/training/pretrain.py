"""The main job: one JSON file in, a trained model's metrics and loss curve out.

    arguments -> launch environment -> run (checked) -> corpus
        -> process groups -> the job of all ranks (job.py) -> exit code

All input is checked before any process group exists, so a mistake is a message and not a hang.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import torch
from rich.console import Console
from rich.markup import escape

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import load_run
from megaspeed.config.overrides import add_config_options
from megaspeed.config.resolve import Run
from megaspeed.data.config_problems import find_problems_in_file
from megaspeed.data.errors import DataError
from megaspeed.data.prepare import prepare_corpus
from megaspeed.data.prepared import PreparedCorpus
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.failure import during, failures_reported
from megaspeed.topology.grid import TopologyError
from megaspeed.topology.groups import GroupError
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment
from megaspeed.training.agreement import RanksDisagree
from megaspeed.training.job import EXPECTED, run_job, tell_ending
from megaspeed.training.launch_warnings import launch_warnings
from megaspeed.training.resume import ResumeOptions, check_resume
from megaspeed.training.run_folder import check_run_folder
from megaspeed.training.stop_signal import StopSignal
from megaspeed.training.trainer import TrainingDiverged

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT = 0, 1, 2

# Launchers end the whole job when one process ends badly; rank 0 speaks for all, so it gets this
# head start.
_SECONDS_FOR_RANK_0_TO_SPEAK = 5.0
_COLLECTIVE_TIMEOUT_SECONDS = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit code.

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
        run, corpus = _check_input(options, launch, console)
    except (ConfigError, DataError, CheckpointError) as error:
        return _refuse(error, launch)
    for warning in launch_warnings(
        launch,
        run,
        visible_gpus=torch.cuda.device_count(),
        processors=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
    ):
        console.print("[yellow]warning:[/yellow]", warning, highlight=False, soft_wrap=True)
    return _train(run, corpus, ResumeOptions.of(options), launch, console)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _let_rank_0_speak()
        super().error(message)


def _let_rank_0_speak() -> None:
    """For mistakes that are found before a rank knows its place, or in its place."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description="Pretrain a GPT as a JSON file says.")
    add_config_options(parser)
    ResumeOptions.add_to(parser)
    # The deepspeed launcher passes it to every process; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _check_input(
    options: argparse.Namespace, launch: LaunchEnvironment, console: Console
) -> tuple[Run, PreparedCorpus]:
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
    check_resume(ResumeOptions.of(options), run)
    start = time.perf_counter()
    with console.status("preparing the corpus"):
        corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    components = len(corpus.train.components)
    mixed = f" mixed from {components} sources" if components > 1 else ""
    console.print(
        f"corpus: {corpus.train.tokens:,} training tokens, {corpus.training_sequences:,} "
        f"sequences{mixed}, ready in {time.perf_counter() - start:.1f} s",
        highlight=False,
    )
    return run, corpus


def _refuse(error: Exception, launch: LaunchEnvironment) -> int:
    if launch.rank != 0:
        time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)
    _say(error, launch)
    return EXIT_WRONG_INPUT


def _say(error: Exception, launch: LaunchEnvironment) -> None:
    speaker = f"[rank {launch.rank}] " if launch.rank else ""
    sys.stderr.write(f"{speaker}{error}\n")
    sys.stderr.flush()


def _train(
    run: Run,
    corpus: PreparedCorpus,
    resume: ResumeOptions,
    launch: LaunchEnvironment,
    console: Console,
) -> int:
    grid = run.grid
    try:
        with failures_reported(grid, launch.rank, expected=(TopologyError, GroupError)):
            context = ParallelContext.create(
                grid, launch, timeout_seconds=_COLLECTIVE_TIMEOUT_SECONDS
            )
    except TopologyError as error:
        return _refuse(error, launch)
    except GroupError as error:
        _say(error, launch)
        return EXIT_FAILED
    except Exception:  # reported with its traceback
        return EXIT_FAILED
    try:
        with failures_reported(grid, launch.rank, expected=EXPECTED):
            # A signal that comes from here on ends the run after a step, with a checkpoint.
            with context, StopSignal() as stop:
                summary = run_job(run, corpus, resume, context, stop, console)
            if summary is None:
                return EXIT_DONE
            if launch.rank == 0:
                with during("the loss curve"):
                    tell_ending(run, summary, console)
    except CheckpointError as error:  # of all ranks alike
        if launch.rank == 0:
            _say(error, launch)
        return EXIT_WRONG_INPUT
    except (RanksDisagree, TrainingDiverged) as error:
        console.print(
            "[red]training stopped:[/red]", escape(str(error)), highlight=False, soft_wrap=True
        )
        return EXIT_FAILED
    except OSError as error:  # a full disk, a folder that has gone
        _say(error, launch)
        return EXIT_FAILED
    except Exception:  # reported with its traceback
        return EXIT_FAILED
    return EXIT_DONE if summary.last_save.error is None else EXIT_FAILED
