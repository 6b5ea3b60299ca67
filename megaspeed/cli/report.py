"""Commands that read run folders: ``megaspeed report`` and ``megaspeed compare-runs``.

A run may still be training, or may have failed: both commands read what its folder contains now.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_parser,
    new_file,
    not_negative,
    say,
    write_json,
)
from megaspeed.data.errors import DataError
from megaspeed.files.durable import write_file
from megaspeed.files.paths import path_argument

if TYPE_CHECKING:
    from megaspeed.reports.run_record import RunComparison

_TOLERANCE = 1e-5
"""About the difference between layouts of one run in fp32; see `megaspeed verify`."""


def add_to(commands: Any) -> None:
    """Adds both commands and their options."""
    text = "write one HTML page of one or several runs"
    parser = commands.add_parser("report", help=text, description=text)
    parser.set_defaults(run=run_report)
    parser.add_argument(
        "runs", type=path_argument, nargs="+", metavar="RUN", help="the folder of a run"
    )
    parser.add_argument(
        "--output",
        type=new_file,
        default=Path("report.html"),
        metavar="FILE",
        help="the page's file (report.html)",
    )
    text = "find the first step and quantity in which two runs differ"
    parser = add_parser(commands, "compare-runs", run_compare_runs, text)
    parser.add_argument(
        "runs", type=path_argument, nargs=2, metavar="RUN", help="the folder of a run"
    )
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        default=_TOLERANCE,
        metavar="T",
        help=f"largest relative difference that counts as equal ({_TOLERANCE}); 0: bitwise",
    )


def run_report(options: argparse.Namespace) -> int:
    """Writes the page: one file that needs no network."""
    from megaspeed.reports.run_page import page
    from megaspeed.reports.run_record import read_run

    records = [read_run(folder) for folder in options.runs]
    # A lone surrogate, which JSON can write, has no UTF-8.
    text = page(records).encode("utf-8", errors="replace")
    write_file(options.output, lambda stream: stream.write(text))
    say(f"{options.output} ({len(text) / 1000:,.0f} kB)")
    return EXIT_DONE


def run_compare_runs(options: argparse.Namespace) -> int:
    """Prints the first step and quantity in which two runs differ.

    Compares both metrics.jsonl files from the first step of the later run to the last step of the
    shorter run: learning rate, tokens, loss, gradient norm, skipped steps, validation. The exit
    code is 0 if they are equal, 1 if they differ or one run lacks a step or a validation, and 2 if
    a folder is not a run folder or the runs have no step in common.
    """
    from megaspeed.reports.run_record import compare_runs, read_run

    one, two = records = [read_run(folder) for folder in options.runs]
    found = compare_runs(one, two, options.tolerance)
    if found.common_steps == 0:
        raise DataError(
            f"{one.folder} and {two.folder} have no step in common: they recorded "
            f"{len(one.steps):,} and {len(two.steps):,} steps"
        )
    for line in _differences(found, (one.folder, two.folder), options.tolerance):
        say(line)
    for record in records:
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


def _differences(
    found: "RunComparison", folders: tuple[Path, Path], tolerance: float
) -> Iterator[str]:
    differences = []
    for parting in found.partings:
        one, two = ("not finite" if value is None else value for value in parting.values)
        by = "" if parting.relative is None else f", relative difference {parting.relative:.1e}"
        differences.append((parting.step, f"{parting.quantity} {one} and {two}{by}"))
    for missing in found.missing:
        first, *others = missing.steps
        more = f", and {len(others):,} later" if others else ""
        differences.append((first, f"{folders[missing.run]} lacks this {missing.quantity}{more}"))
    differences.sort(key=lambda difference: difference[0])
    for index, (step, text) in enumerate(differences):
        yield f"{'' if index else 'first difference at '}step {step:,}: {text}"
    if not differences:
        steps = f"{found.common_steps:,} steps"
        yield f"{steps} are equal within a relative difference of {tolerance:g}"
    if found.largest:
        largest = ", ".join(f"{name} {value:.1e}" for name, value in found.largest.items())
        yield f"largest relative differences: {largest}"
    if found.config:
        yield f"configuration ({folders[0]} -> {folders[1]}):"
        for key, before, after in found.config:
            yield f"  {key}: {before} -> {after}"
