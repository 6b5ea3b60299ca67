"""The ``megaspeed`` command.

    megaspeed check    --config FILE [--world-size N]     every mistake in a configuration, at once
    megaspeed verify   --config FILE --world-size N       these degrees against one plain process
    megaspeed schedule --config FILE --world-size N       the pipeline's timetable, as a grid

Exit codes: 0 done, 1 the check failed, 2 the input is wrong.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megaspeed.config import ConfigError, Run, check_config, load_run
from megaspeed.data import DataError, prepare_corpus
from megaspeed.data.config_problems import find_problems_in_file

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parse(arguments)
    try:
        code: int = options.command(options)
    except (ConfigError, DataError) as error:
        _say(str(error), error=True)
        return EXIT_WRONG_INPUT
    return code


def _check(options: argparse.Namespace) -> int:
    """Reports every problem, those of the data section included, without reading the corpus."""
    problems = [
        *check_config(
            options.config,
            options.overrides,
            world_size=options.world_size,
            device_type=options.device,
        ),
        *find_problems_in_file(options.config, options.overrides),
    ]
    _write_json(options, {"config": str(options.config), "problems": problems})
    if problems:
        raise ConfigError(problems, where=str(options.config))
    _say(f"{options.config}: no problem found")
    return EXIT_DONE


def _verify(options: argparse.Namespace) -> int:
    """Trains the layout and one plain process, and prints their numbers side by side."""
    # Imported here: torch and DeepSpeed take seconds, which `check` need not wait for.
    from megaspeed.analysis.verification.report import gradient_table, step_table, verdict
    from megaspeed.analysis.verification.verify import verify

    run = _load(options)
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    comparison = verify(run, corpus, options.steps)
    console = Console()
    console.print(step_table(run, comparison))
    console.print(gradient_table(comparison))
    console.print(verdict(comparison), highlight=False)
    _write_json(options, comparison.as_json())
    return EXIT_DONE if comparison.equal else EXIT_FAILED


def _schedule(options: argparse.Namespace) -> int:
    """Prints the timetable of the run's pipeline: rows are pipeline stages, columns are time."""
    from megaspeed.pipeline import SCHEDULES, bubble_fraction, check_schedule, format_grid

    run = _load(options)
    stages, micro_batches = run.degrees.pp, run.batch.gradient_accumulation_steps
    schedule = SCHEDULES[run.config.parallel.schedule]
    check_schedule(schedule, stages, micro_batches)
    bubble = bubble_fraction(schedule, stages, micro_batches)
    _say(format_grid(schedule, stages, micro_batches))
    _say(f"ideal bubble: {bubble:.1%} of the step (a backward takes twice a forward's time)")
    _write_json(options, {"bubble_fraction": bubble})
    return EXIT_DONE


def _load(options: argparse.Namespace) -> Run:
    try:
        return load_run(
            options.config,
            options.overrides,
            world_size=options.world_size,
            world_source="--world-size",
            device_type="cpu",
        )
    except ConfigError as error:
        others = find_problems_in_file(options.config, options.overrides)
        raise ConfigError([*error.problems, *others], error.where) from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megaspeed", description="3D-parallel GPT pretraining on DeepSpeed."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    check = _command(commands, "check", _check, "find every mistake in a configuration")
    check.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="kind of device to check for"
    )
    verify = _command(commands, "verify", _verify, "compare a layout with one plain process")
    verify.add_argument("--steps", type=_positive, default=10, help="optimizer steps (10)")
    _command(commands, "schedule", _schedule, "print the pipeline's timetable")
    return parser.parse_args(arguments)


def _command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=function)
    parser.add_argument("--config", required=True, type=Path, help="the run's JSON file")
    parser.add_argument(
        "--world-size",
        type=_positive,
        required=name != "check",
        help="number of processes of the run",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="key.path=value",
        help="replace single values of the file",
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="write the figures there too"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 10**9:
        raise argparse.ArgumentTypeError("it must be at least 1 and at most 10^9")
    return number


def _new_file(text: str) -> Path:
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file.parent} is not a folder; create it first")
    return file


def _say(text: str, *, error: bool = False) -> None:
    (sys.stderr if error else sys.stdout).write(text + "\n")


def _write_json(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
