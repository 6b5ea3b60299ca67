"""``megaspeed checkpoint``: shows what a checkpoint contains, and checks that it is complete.

    megaspeed checkpoint show   DIR    the newest checkpoint: its run, its layout, its tensors
    megaspeed checkpoint verify DIR    every byte of all checkpoints; exit code 1 if one is broken

DIR is a checkpoint, a folder of checkpoints, or the folder of a run.
"""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from megaspeed.cli.model_options import exit_code
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_parser,
    say,
    wide_console,
    write_json,
)
from megaspeed.files.paths import path_argument

if TYPE_CHECKING:
    from megaspeed.checkpoint.inspection import Inspection


def add_to(commands: Any) -> None:
    """Add the command and its two actions."""
    text = "inspect checkpoints"
    parser = commands.add_parser("checkpoint", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="action", dest="action")
    for name, action, text in (
        ("show", _show, "show the content of the newest checkpoint"),
        ("verify", _verify, "check every byte of every checkpoint"),
    ):
        parser = add_parser(actions, name, partial(exit_code, action), text)
        text = "a checkpoint, a folder of checkpoints, or the folder of a run"
        parser.add_argument("path", type=path_argument, metavar="DIR", help=text)


def _show(options: argparse.Namespace) -> int:
    """Show the newest checkpoint that seems complete, without reading its large files."""
    # Imported here: torch takes seconds, which ``check`` need not wait for.
    from megaspeed.checkpoint.description import report, show_as_json
    from megaspeed.checkpoint.folders import locate
    from megaspeed.checkpoint.inspection import glance

    checkpoints = locate(options.path)
    shown = None
    for inspection in map(glance, checkpoints):
        if not inspection.problems:
            shown = inspection
            break
        say(_describe(inspection), error=True)
    if shown is None:
        say(f"{options.path} has no complete checkpoint", error=True)
        return EXIT_FAILED
    console = wide_console()
    for part in report(shown):
        console.print(part, soft_wrap=isinstance(part, str))
    others = [path for path in checkpoints if path != shown.checkpoint]
    if others:
        say("others here: " + ", ".join(path.name for path in others))
    write_json(options, {**show_as_json(shown), "others": [str(path) for path in others]})
    return EXIT_DONE


def _verify(options: argparse.Namespace) -> int:
    """Check all checkpoints, newest first, and report each as soon as it is read."""
    from megaspeed.checkpoint.description import verify_as_json
    from megaspeed.checkpoint.folders import folder_of_checkpoints, is_checkpoint, locate
    from megaspeed.checkpoint.inspection import inspect

    checkpoints = locate(options.path)
    leftovers = []
    if not is_checkpoint(options.path):
        leftovers = folder_of_checkpoints(options.path).leftovers()
    found = []
    for inspection in map(inspect, checkpoints):
        if not inspection.checkpoint.is_dir():
            continue  # a running job has deleted it meanwhile
        found.append(inspection)
        say(_describe(inspection))
        for stray in inspection.strays:
            say(f"  note: {stray} does not belong to the checkpoint, but does no harm")
    for leftover in leftovers:
        say(f"{leftover.name}  not a checkpoint: its save or removal was killed, or is in progress")
    complete = bool(found) and not any(inspection.problems for inspection in found)
    if not found:
        say(f"{options.path} has no checkpoint", error=True)
    figures = {
        "whole": complete,
        "checkpoints": [verify_as_json(inspection) for inspection in found],
        "leftovers": [str(leftover) for leftover in leftovers],
    }
    write_json(options, figures)
    return EXIT_DONE if complete else EXIT_FAILED


def _describe(inspection: "Inspection") -> str:
    from megaspeed.checkpoint.description import size_text

    name = inspection.checkpoint.resolve().name
    if inspection.problems:
        return f"{name}  BROKEN" + "".join(f"\n  {problem}" for problem in inspection.problems)
    return f"{name}  complete ({size_text(inspection)})"
