"""``megaspeed check``: every mistake in a configuration, at once, without loading torch."""

import argparse
from typing import Any

from megaspeed.cli.common_options import EXIT_DONE, add_command
from megaspeed.cli.output import say, write_json
from megaspeed.config.check import check_config
from megaspeed.config.errors import ConfigError
from megaspeed.data.config_problems import find_problems_in_file


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
    ]
    write_json(options, {"config": str(options.config), "problems": problems})
    if problems:
        raise ConfigError(problems, where=str(options.config))
    say(f"{options.config}: no problem found")
    return EXIT_DONE
