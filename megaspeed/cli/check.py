"""``megaspeed check``: every mistake in a configuration, at once, without loading torch."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaspeed.cli.common_options import EXIT_DONE, add_command
from megaspeed.cli.output import say, write_json
from megaspeed.config.check import check_config
from megaspeed.config.document import read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import default_run_dir
from megaspeed.data.selection import find_problems_in_file
from megaspeed.files.places import folder_problem, path_problem


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands, "check", run, "find every mistake in a configuration", needs_world_size=False
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="kind of device to check for"
    )


def run(options: argparse.Namespace) -> int:
    """Reports every problem, those of the data section included, without reading the corpus."""
    problems = [
        *check_config(
            options.config,
            options.overrides,
            world_size=options.world_size,
            device_type=options.device,
        ),
        *find_problems_in_file(options.config, options.overrides),
        *_run_dir_problems(options),
    ]
    write_json(options, {"config": str(options.config), "problems": problems})
    if problems:
        raise ConfigError(problems, where=str(options.config))
    say(f"{options.config}: no problem found")
    return EXIT_DONE


def _run_dir_problems(options: argparse.Namespace) -> Iterator[str]:
    """Whether the run could write its folder, as a run checks when it starts. Creates nothing."""
    document = read_document(options.config, options.overrides)
    training = document.values.get("training")
    stated = training.get("run_dir") if isinstance(training, dict) else None
    run_dir = default_run_dir(options.config.stem) if stated is None else stated
    if not document.is_complete or not isinstance(run_dir, str) or path_problem(run_dir or "\0"):
        return  # the other problems say so
    problem = folder_problem("training.run_dir", Path(run_dir))
    if problem is not None:
        yield problem
