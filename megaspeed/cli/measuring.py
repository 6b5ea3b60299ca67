"""What the commands that train on ranks of this machine share: options, folder, turns, results."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, add_values, positive, say, write_json
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.files.paths import folder_problem, path_argument

if TYPE_CHECKING:
    from megaspeed.measurement.local_ranks import DeviceType
    from megaspeed.measurement.report import Report
    from megaspeed.measurement.turns import AnyRow


def add_measuring_options(
    parser: argparse.ArgumentParser,
    command: str,
    *,
    turns: int | None,
    steps: int,
    option: str = "--output",
) -> None:
    """Add the options for turns, steps, the folder of the results, and the time limit of a turn.

    If ``turns`` is None, each row takes one turn. The other numbers are defaults.
    """
    parser.set_defaults(turns=1)
    if turns is not None:
        add_values(parser, ("--turns", positive, "N", turns, f"turns of each row ({turns})"))
    add_values(
        parser,
        ("--steps", positive, "N", steps, f"timed steps of each turn ({steps})"),
        ("--timeout", positive, "SECONDS", 1800, "time limit of each turn (1800)"),
    )
    text = f"folder for the results (runs/<name>-{command})"
    parser.add_argument(option, dest="output", type=path_argument, metavar="DIR", help=text)


def device_type_here() -> "DeviceType":
    """Return where ranks of this machine train: on its GPUs if it has any."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def results_folder(
    options: argparse.Namespace,
    run: Run,
    *,
    option: str = "--output",
    size_option: str = "--world-size",
) -> Path:
    """Return the folder for the results of a command. It need not exist.

    Raises:
        ConfigError: the folder cannot be written, or this machine cannot run the ranks of ``run``.
    """
    from megaspeed.measurement.local_ranks import too_many_ranks

    command: str = options.command
    folder: Path = options.output or Path("runs") / f"{run.name}-{command}"
    problem = folder_problem(option, folder)
    problems = [] if problem is None else [problem]
    problems += too_many_ranks(run.grid.world_size, device_type_here(), size_option)
    if problems:
        raise ConfigError(problems, where=f"{command} of {options.config}")
    return folder


def measure(
    options: argparse.Namespace,
    folder: Path,
    rows: "Sequence[AnyRow]",
    part_of_turn: "Callable[[AnyRow, int], tuple[Any, ...]]",
    report_of: "Callable[..., Report]",
) -> int:
    """Let the rows take their turns, then show and write the report. Return the exit code.

    ``report_of`` gets the fields of ``Result``.
    """
    from megaspeed.measurement.turns import share_of_others, take_turns

    folder.mkdir(parents=True, exist_ok=True)
    share = share_of_others()
    with BarOrLines(options.turns * len(rows)) as bar:
        done, stopped = take_turns(
            rows,
            options.turns,
            part_of_turn,
            device_type=device_type_here(),
            folder=folder,
            timeout_seconds=options.timeout,
            on_turn=bar.show,
        )
    report = report_of(
        rows=done,
        turns=options.turns,
        steps=options.steps,
        stopped=stopped,
        share_of_others=max(share, share_of_others()),
    )
    files = report.write(folder, options.command)
    say(report.on_screen)
    write_json(options, report.figures)
    say(f"\nwrote {', '.join(map(str, files))}")
    if stopped:
        say("stopped before the last turn; all ranks have ended", error=True)
    return EXIT_DONE if report.succeeded else EXIT_FAILED
