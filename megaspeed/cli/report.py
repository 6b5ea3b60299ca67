"""Commands that read run folders: ``megaspeed report`` and ``megaspeed compare-runs``.

A run may still be training, or may have failed: both commands read what its folder contains now.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_parser,
    add_values,
    new_file,
    not_negative,
    say,
    write_json,
)
from megaspeed.data.errors import DataError
from megaspeed.files.durable import write_file
from megaspeed.files.paths import path_argument

_TOLERANCE = 1e-5
"""About the difference between layouts of one run in fp32; see ``megaspeed verify``."""


def add_to(commands: Any) -> None:
    """Add both commands and their options."""
    text = "write one HTML page of one or several runs"
    report = commands.add_parser("report", help=text, description=text)
    report.set_defaults(run=run_report)
    text = "find the first step and quantity in which two runs differ"
    compare = add_parser(commands, "compare-runs", run_compare_runs, text)
    for parser, number in ((report, "+"), (compare, 2)):
        help_text = "the folder of a run"
        parser.add_argument("runs", type=path_argument, nargs=number, metavar="RUN", help=help_text)
    file, page = Path("report.html"), "the page's file (report.html)"
    add_values(report, ("--output", new_file, "FILE", file, page))
    text = f"largest relative difference that counts as equal ({_TOLERANCE}); 0: bitwise"
    add_values(compare, ("--tolerance", not_negative, "T", _TOLERANCE, text))


def run_report(options: argparse.Namespace) -> int:
    """Write the page: one file that needs no network."""
    from megaspeed.reports.run_page import page
    from megaspeed.reports.run_record import read_run

    # A lone surrogate, which JSON can write, has no UTF-8.
    text = page([read_run(run) for run in options.runs]).encode("utf-8", errors="replace")
    write_file(options.output, lambda stream: stream.write(text))
    say(f"{options.output} ({len(text) / 1000:,.0f} kB)")
    return EXIT_DONE


def run_compare_runs(options: argparse.Namespace) -> int:
    """Print the first step and quantity in which two runs differ.

    Compares both metrics.jsonl files from the first step of the later run to the last step of the
    shorter run: learning rate, tokens, loss, gradient norm, skipped steps, validation. The exit
    code is 0 if they are equal, 1 if they differ or one run lacks a step or a validation, and 2 if
    a folder is not a run folder or the runs have no step in common.
    """
    from megaspeed.reports.run_record import compare_runs, read_run

    one, two = read_run(options.runs[0]), read_run(options.runs[1])
    found = compare_runs(one, two, options.tolerance)
    if found["common_steps"] == 0:
        raise DataError(
            f"{one.folder} and {two.folder} have no step in common: they recorded "
            f"{len(one.steps):,} and {len(two.steps):,} steps"
        )
    for line in _differences(found, options.runs, options.tolerance):
        say(line)
    for run in (one, two):
        for note in run.notes:
            say(f"note: {run.folder}: {note}")
    for verb, a, b in (
        ("begin", one.steps[0], two.steps[0]),
        ("end", one.steps[-1], two.steps[-1]),
    ):
        if a != b:
            say(f"note: the runs {verb} at steps {a:,} and {b:,}")
    runs = list(map(str, options.runs))
    write_json(options, {"runs": runs, "tolerance": options.tolerance, **found})
    return EXIT_DONE if found["equal"] else EXIT_FAILED


def _differences(found: dict[str, Any], runs: list[Path], tolerance: float) -> Iterator[str]:
    lines = []
    for parting in found["partings"]:
        one, two = ("not finite" if value is None else value for value in parting["values"])
        relative = parting["relative"]
        by = "" if relative is None else f", relative difference {relative:.1e}"
        lines.append((parting["step"], f"{parting['quantity']} {one} and {two}{by}"))
    for missing in found["missing"]:
        first, *others = missing["steps"]
        more = f", and {len(others):,} later" if others else ""
        lines.append((first, f"{runs[missing['run']]} lacks this {missing['quantity']}{more}"))
    lines.sort(key=lambda line: line[0])
    for index, (step, text) in enumerate(lines):
        yield f"{'' if index else 'first difference at '}step {step:,}: {text}"
    if not lines:
        steps = f"{found['common_steps']:,} steps"
        yield f"{steps} are equal within a relative difference of {tolerance:g}"
    if found["largest"]:
        largest = ", ".join(f"{name} {value:.1e}" for name, value in found["largest"].items())
        yield f"largest relative differences: {largest}"
    if found["config"]:
        yield f"configuration ({runs[0]} -> {runs[1]}):"
        yield from (f"  {key}: {before} -> {after}" for key, before, after in found["config"])
