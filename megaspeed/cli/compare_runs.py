"""``megaspeed compare-runs A B``: the first step and quantity in which two runs differ.

Compares both metrics.jsonl files from the step at which the later run begins to the end of the
shorter one: learning rate, tokens, loss, gradient norm, skipped steps, validation. Exit code 0: no
difference; 1: they differ, or one run lacks a step or a validation there; 2: a folder is not a run
folder, or the runs have no step in common.
"""

import argparse
from pathlib import Path
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    new_file,
    not_negative,
    say,
    write_json,
)
from megaspeed.files.paths import path_argument

_TOLERANCE = 1e-5
"""About what layouts of one run differ by in fp32; see `megaspeed verify`."""


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "find the first step and quantity where two runs part"
    parser = commands.add_parser("compare-runs", help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument(
        "runs", type=path_argument, nargs=2, metavar="RUN", help="the folder of a run"
    )
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        default=_TOLERANCE,
        metavar="T",
        help=f"largest relative difference that counts as equal ({_TOLERANCE}); 0: to the bit",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> int:
    """Compares the two runs."""
    from megaspeed.analysis.watching.differences import compare_runs
    from megaspeed.analysis.watching.record import RunFolderError, read_run

    one_folder, two_folder = options.runs
    try:
        one, two = read_run(one_folder), read_run(two_folder)
    except RunFolderError as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    found = compare_runs(one, two, options.tolerance)
    if found.common_steps == 0:
        say(
            f"{one_folder} and {two_folder} have no step in common: they recorded "
            f"{len(one.steps):,} and {len(two.steps):,} steps",
            error=True,
        )
        return EXIT_WRONG_INPUT
    for line in _report(found, (one_folder, two_folder), options.tolerance):
        say(line)
    for record in (one, two):
        for note in record.notes:
            say(f"note: {record.folder}: {note}")
    begins = min(one.steps), min(two.steps)
    if begins[0] != begins[1]:
        say(f"note: the runs begin at steps {begins[0]:,} and {begins[1]:,}")
    if one.last_step != two.last_step:
        say(f"note: the runs end at steps {one.last_step:,} and {two.last_step:,}")
    write_json(
        options,
        {"runs": list(map(str, options.runs)), "tolerance": options.tolerance, **found.as_json()},
    )
    return EXIT_DONE if found.equal else EXIT_FAILED


def _report(found: Any, folders: tuple[Path, Path], tolerance: float) -> list[str]:
    differences = []
    for parting in found.partings:
        one, two = ("not finite" if value is None else value for value in parting.values)
        by = "" if parting.relative is None else f", relative difference {parting.relative:.1e}"
        differences.append((parting.step, f"{parting.quantity} {one} and {two}{by}"))
    for missing in found.missing:
        first, *others = missing.steps
        more = f", and {len(others):,} later" if others else ""
        is_missing = f"{folders[missing.run]} lacks this {missing.quantity}{more}"
        differences.append((first, is_missing))
    differences.sort(key=lambda difference: difference[0])
    lines = [f"step {step:,}: {text}" for step, text in differences]
    if lines:
        lines[0] = f"they part at {lines[0]}"
    else:
        lines.append(
            f"{found.common_steps:,} steps are equal within a relative difference of {tolerance:g}"
        )
    if found.largest:
        largest = ", ".join(f"{name} {value:.1e}" for name, value in found.largest.items())
        lines.append(f"largest relative differences: {largest}")
    if found.config:
        lines.append(f"configuration ({folders[0]} -> {folders[1]}):")
        lines += [f"  {key}: {one} -> {two}" for key, one, two in found.config]
    return lines
