"""What the commands that train on ranks of this machine share: options, folder and results."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.options import positive, say, write_json, write_text
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.files.paths import folder_problem, path_argument

if TYPE_CHECKING:
    from megaspeed.measurement.local_ranks import DeviceType


def add_results_options(
    parser: argparse.ArgumentParser, command: str, each: str, option: str = "--output"
) -> None:
    """Adds the options for the folder of the results, and for the time limit of each training."""
    parser.add_argument(
        option,
        dest="output",
        type=path_argument,
        metavar="DIR",
        help=f"folder for the results (runs/<name>-{command})",
    )
    parser.add_argument(
        "--timeout", type=positive, default=1800, help=f"seconds for each {each} (1800)"
    )


def device_type_here() -> "DeviceType":
    """Where ranks of this machine train: on its GPUs if it has any."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def results_folder(
    options: argparse.Namespace,
    run: Run,
    device_type: "DeviceType",
    *,
    command: str,
    what: str,
    option: str = "--output",
    size_option: str = "--world-size",
) -> Path:
    """The folder for the results of ``what``. It need not exist.

    Raises:
        ConfigError: the folder cannot be written, or this machine cannot run the ranks of ``run``.
    """
    from megaspeed.measurement.local_ranks import too_many_ranks

    folder: Path = options.output or Path("runs") / f"{run.name}-{command}"
    problem = folder_problem(option, folder)
    problems = [] if problem is None else [problem]
    problems += too_many_ranks(run.grid.world_size, device_type, size_option)
    if problems:
        raise ConfigError(problems, where=f"the {what} of {options.config}")
    return folder


def write_results(
    folder: Path, name: str, figures: Any, text: str, pictures: Mapping[str, Callable[[Path], None]]
) -> list[Path]:
    """Writes NAME.json, NAME.md and pictures to a folder. Returns the files.

    Args:
        folder: an existing folder.
        name: of the first two files, without the suffix.
        figures: for the JSON file.
        text: Markdown.
        pictures: name of each file -> the function that draws it.
    """
    json_file, markdown = folder / f"{name}.json", folder / f"{name}.md"
    write_text(json_file, json.dumps(figures, indent=2) + "\n")
    write_text(markdown, text)
    for picture, draw in pictures.items():  # last, so that an error in drawing loses no figures
        draw(folder / picture)
    return [json_file, markdown, *(folder / picture for picture in pictures)]


def show_results(
    options: argparse.Namespace, figures: Any, text: str, files: Sequence[Path]
) -> None:
    """Prints the text and the names of the files; writes the figures to the file of ``--json``."""
    say(text)
    write_json(options, figures)
    say("")
    say("wrote " + ", ".join(map(str, files)))
