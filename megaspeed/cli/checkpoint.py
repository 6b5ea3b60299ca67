"""``megaspeed checkpoint``: shows what a checkpoint contains, and checks that it is complete.

    megaspeed checkpoint show   DIR    the newest checkpoint: its run, its layout, its size
    megaspeed checkpoint verify DIR    every byte of all checkpoints; exit code 1 if one is broken

DIR is a checkpoint, a folder of checkpoints, or the folder of a run.
"""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from megaspeed.cli.hugging_face import exit_code
from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, add_parser, busy, say, write_json
from megaspeed.files.json_values import picked
from megaspeed.files.paths import path_argument
from megaspeed.units import counted, traffic_unit

if TYPE_CHECKING:
    from megaspeed.checkpoint.inspection import Inspection
    from megaspeed.checkpoint.run_state import RunState


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
    from megaspeed.checkpoint.folders import locate
    from megaspeed.checkpoint.inspection import NO_FILE, inspect
    from megaspeed.model.parameters import parameters_in_words, parameters_of

    for checkpoint in locate(options.path):
        shown = inspect(checkpoint, NO_FILE)
        if shown.problems or shown.state is None:
            say(_describe(shown), error=True)
            continue
        state = shown.state
        model = state.model_section()
        say(f"{checkpoint}: {_size(shown)}\n{parameters_in_words(model)}, {state.origin}")
        if state.layout is not None:
            say(_progress(state))
        parameters = sum(p.elements for p in parameters_of(model).values())
        figures = {"parameters": parameters, "run_state": state.model_dump(mode="json")}
        write_json(options, {**_figures(shown), **figures})
        return EXIT_DONE
    say(f"{options.path} has no complete checkpoint", error=True)
    return EXIT_FAILED


def _verify(options: argparse.Namespace) -> int:
    """Check all checkpoints, newest first, and report each as soon as it is read."""
    from megaspeed.checkpoint.folders import locate
    from megaspeed.checkpoint.inspection import inspect

    found = []
    for path in locate(options.path):
        with busy(f"reading {path}"):
            inspection = inspect(path)
        if not inspection.checkpoint.is_dir():
            continue  # a running job has deleted it meanwhile
        found.append(inspection)
        say(_describe(inspection))
    complete = bool(found) and not any(inspection.problems for inspection in found)
    if not found:
        say(f"{options.path} has no checkpoint", error=True)
    figures = {
        "whole": complete,
        "checkpoints": [
            {**_figures(each), "whole": not each.problems, "problems": list(each.problems)}
            for each in found
        ],
    }
    write_json(options, figures)
    return EXIT_DONE if complete else EXIT_FAILED


def _figures(inspection: "Inspection") -> dict[str, Any]:
    return {**picked(inspection, "checkpoint", "size_bytes"), "files": len(inspection.files)}


def _describe(inspection: "Inspection") -> str:
    name = inspection.checkpoint.resolve().name
    if inspection.problems:
        return f"{name}  BROKEN" + "".join(f"\n  {problem}" for problem in inspection.problems)
    return f"{name}  complete ({_size(inspection)})"


def _size(inspection: "Inspection") -> str:
    size_bytes = inspection.size_bytes
    size = traffic_unit((size_bytes,)).named(size_bytes)
    return f"{size}, {counted(len(inspection.files), 'file')}"


def _progress(state: "RunState") -> str:
    progress = state.progress
    loss = "not finite" if progress.loss is None else f"{progress.loss:.4f}"
    skipped = progress.step - progress.steps_taken
    return (
        f"step {progress.step:,}{f', {skipped:,} of them skipped' if skipped else ''}: "
        f"{counted(progress.samples, 'sample')}, {counted(progress.tokens, 'token')}, loss {loss}"
    )
