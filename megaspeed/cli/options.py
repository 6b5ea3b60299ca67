"""Options that several commands have, the run that they describe, and output of commands."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.config.document import add_config_options
from megaspeed.config.section import LARGEST_COUNT, LARGEST_WORLD
from megaspeed.files.durable import write_bytes
from megaspeed.files.paths import file_problem, path_argument

if TYPE_CHECKING:
    from megaspeed.bar_or_lines import BarOrLines
    from megaspeed.config.resolve import Run

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT = 0, 1, 2


def add_parser(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a subcommand with ``--json``."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    add_values(parser, ("--json", new_file, "FILE", None, "write the figures there too"))
    return parser


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    needs_world_size: bool = True,
) -> argparse.ArgumentParser:
    """Add a subcommand with ``--config``, ``--world-size``, ``--set`` and ``--json``."""
    parser = add_parser(commands, name, run, text)
    add_config_options(parser)
    default = ... if needs_world_size else None
    add_values(parser, ("--world-size", world_size, "N", default, "number of processes of the run"))
    return parser


def add_values(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    *rows: tuple[str, Callable[[str], Any], str, Any, str],
) -> None:
    """Add options that take one value.

    A row has the name, the function that parses the value, a placeholder for it, the default, and
    the help. If the default is ``...``, the option is required.
    """
    for name, parse, metavar, default, text in rows:
        value = None if default is ... else default
        option = parser.add_argument(name, type=parse, metavar=metavar, default=value, help=text)
        if default is ...:
            option.required = True


def add_flags(parser: argparse.ArgumentParser, *rows: tuple[str, str]) -> None:
    """Add options without a value. A row has the name and the help."""
    for name, text in rows:
        parser.add_argument(name, action="store_true", help=text)


def load(
    options: argparse.Namespace, device_type: str = "cpu", world_source: str = "--world-size"
) -> "Run":
    """Return the run of ``--config``, ``--set`` and ``--world-size``.

    Raises:
        ConfigError: with every problem, those of the data section included.
    """
    # Imported here, because a rank does not call this.
    from megaspeed.checked_run import load_checked_run
    from megaspeed.config.layout import World

    world = World(options.world_size, world_source, device_type)
    return load_checked_run(options.config, options.overrides, world)


def positive(text: str) -> int:
    """Return a count on the command line."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be a whole number, not {text!r}") from error
    return _in_range(number, LARGEST_COUNT)


def world_size(text: str) -> int:
    """Return a number of processes on the command line."""
    return _in_range(positive(text), LARGEST_WORLD)


def _in_range(number: int, largest: int) -> int:
    if not 1 <= number <= largest:
        raise argparse.ArgumentTypeError(f"it must be at least 1 and at most {largest:,}")
    return number


def not_negative(text: str) -> float:
    """Return a finite number on the command line, 0 or more."""
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it must be a number, not {text!r}") from error
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("it must be 0 or more")
    return number


def utf8_text(words: str) -> str:
    """Return the text of an argument, which must be UTF-8.

    Python represents other bytes as lone surrogates, which no tokenizer accepts.
    """
    try:
        words.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"it must be UTF-8, but its character {error.start + 1} is not; write it in UTF-8"
        ) from error
    return words


def new_file(text: str) -> Path:
    """Return a file on the command line that can be written: a new one, or one to replace."""
    file = path_argument(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file.parent} is not a folder; create it first")
    if os.path.exists(file) and (problem := file_problem(file)) is not None:
        raise argparse.ArgumentTypeError(f"{file} must be a file, but it {problem}; name a file")
    return file


@contextmanager
def busy(text: str) -> Iterator["BarOrLines"]:
    """Show a text and a bar, whose end the caller may state. Nothing may be printed meanwhile."""
    from megaspeed.bar_or_lines import BarOrLines  # not above, because rank processes need none

    with BarOrLines(0) as bar:
        bar.show(0, text)
        yield bar


# What a command prints, and the same figures as JSON.


def say(text: str, *, error: bool = False) -> None:
    """Print a line to standard output, or to standard error if it is an error message."""
    (sys.stderr if error else sys.stdout).write(text + "\n")


def write_json(options: argparse.Namespace, figures: Any) -> None:
    """Write the figures to the file of ``--json``, if it was given: all or nothing."""
    if options.json is not None:
        text = json.dumps(figures, indent=2) + "\n"
        write_bytes(options.json, text.encode())
