"""The main job: one JSON file in, a trained model's metrics and loss curve out.

    arguments -> launch environment -> run (checked) -> corpus
        -> process groups -> training -> summary, curve

All input is checked before any process group exists, so a mistake is a message and not a hang.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from megaspeed.config import ConfigError, Run, load_run
from megaspeed.config.overrides import add_config_options
from megaspeed.data import DataError, PreparedCorpus, prepare_corpus
from megaspeed.data.config_problems import find_problems_in_file
from megaspeed.pipeline import layers_of_stages, parameters_of_stages
from megaspeed.topology import (
    Grid,
    GroupError,
    LaunchEnvironment,
    LaunchError,
    ParallelContext,
    TopologyError,
    read_launch_environment,
)
from megaspeed.training.agreement import RanksDisagree, check_agreement
from megaspeed.training.console import ConsoleObserver, NullObserver, plan_table, summary_table
from megaspeed.training.loss_curve import draw_loss_curve
from megaspeed.training.metrics import MetricsFile
from megaspeed.training.run_folder import (
    LOSS_CURVE,
    METRICS,
    check_run_folder,
    open_run_folder,
)
from megaspeed.training.trainer import Trainer, TrainingDiverged, TrainingSummary

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT = 0, 1, 2

# Launchers end the whole job when one process ends badly; rank 0 speaks for all, so it gets this
# head start.
_SECONDS_FOR_RANK_0_TO_SPEAK = 5.0
_COLLECTIVE_TIMEOUT_SECONDS = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the command line says; returns the exit code."""
    options = _parse(arguments)
    try:
        launch = read_launch_environment(os.environ)
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_WRONG_INPUT
    console = Console(stderr=False, quiet=launch.rank != 0)
    try:
        run, corpus = _check_input(options, launch, console)
    except (ConfigError, DataError) as error:
        return _refuse(error, launch)
    return _train(run, corpus, launch, console)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a GPT as a JSON file says.")
    add_config_options(parser)
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
    start = time.perf_counter()
    with console.status("preparing the corpus"):
        corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    console.print(
        f"corpus: {corpus.train.index.tokens:,} training tokens, "
        f"{corpus.training_sequences:,} sequences, ready in {time.perf_counter() - start:.1f} s",
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


def _train(run: Run, corpus: PreparedCorpus, launch: LaunchEnvironment, console: Console) -> int:
    try:
        context = _start_process_groups(run, launch)
    except TopologyError as error:
        return _refuse(error, launch)
    except GroupError as error:
        _say(error, launch)
        return EXIT_FAILED
    if launch.rank == 0:
        moved = open_run_folder(run)
        if moved is not None:
            line = f"an earlier run's files are now in {moved}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    run_dir = run.run_dir
    with context:
        console.print(plan_table(run, layers_of_stages(run), parameters_of_stages(run)))
        try:
            check_agreement(run, corpus, context)
            summary = _run_trainer(run, context, corpus, run_dir, console)
        except (RanksDisagree, TrainingDiverged) as error:
            console.print(
                "[red]training stopped:[/red]", escape(str(error)), highlight=False, soft_wrap=True
            )
            return EXIT_FAILED
    if launch.rank == 0:
        picture = run_dir / LOSS_CURVE
        draw_loss_curve(run_dir / METRICS, picture, title=run.name)
        console.print(summary_table(run, summary))
        files = f"metrics: {run_dir / METRICS}   loss curve: {picture}"
        console.print(files, highlight=False, markup=False, soft_wrap=True)
    return EXIT_DONE


def _start_process_groups(run: Run, launch: LaunchEnvironment) -> ParallelContext:
    degrees = run.degrees
    grid = Grid(pp=degrees.pp, dp=degrees.dp, tp=degrees.tp)
    return ParallelContext.create(grid, launch, timeout_seconds=_COLLECTIVE_TIMEOUT_SECONDS)


def _run_trainer(
    run: Run, context: ParallelContext, corpus: PreparedCorpus, run_dir: Path, console: Console
) -> TrainingSummary:
    if context.rank != 0:
        return Trainer(run, context, corpus, NullObserver()).train()
    with (
        MetricsFile(run_dir / METRICS) as metrics_file,
        ConsoleObserver(run, console, metrics_file) as observer,
    ):
        return Trainer(run, context, corpus, observer).train()
