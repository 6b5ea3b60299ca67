"""Commands that read run folders: ``megaspeed report`` and ``megaspeed compare-runs``.

A run may still be training, or may have failed: both commands read what its folder contains now.
"""

import argparse
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
from megaspeed.files.durable import write_bytes
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
    write_bytes(options.output, text)
    say(f"{options.output} ({len(text) / 1000:,.0f} kB)")
    return EXIT_DONE


def run_compare_runs(options: argparse.Namespace) -> int:
    """Print the first step and quantity in which two runs differ.

    Compares the steps in both metrics.jsonl files: learning rate, tokens, loss, gradient norm,
    skipped steps, validation. The exit code is 0 if they are equal, 1 if they differ, and 2 if a
    folder is not a run folder or the runs have no step in common.
    """
    from megaspeed.reports.run_record import compare_runs, read_run

    folders = list(map(str, options.runs))
    runs = [read_run(folder) for folder in options.runs]
    found = compare_runs(runs[0], runs[1], options.tolerance)
    recorded = " and ".join(f"{len(run.steps):,}" for run in runs)
    if found["common_steps"] == 0:
        both = " and ".join(folders)
        raise DataError(f"{both} have no step in common: they recorded {recorded} steps")
    say(f"{found['common_steps']:,} steps in common; the runs recorded {recorded}")
    for parting in found["partings"]:
        one, two = ("not finite" if value is None else value for value in parting["values"])
        relative = parting["relative"]
        by = "" if relative is None else f", relative difference {relative:.1e}"
        say(f"step {parting['step']:,}: {parting['quantity']} first differs: {one} and {two}{by}")
    if found["equal"]:
        say(f"equal within a relative difference of {options.tolerance:g}")
    for key, before, after in found["config"]:
        say(f"configuration: {key}: {before} -> {after}")
    for run in runs:
        for note in run.notes:
            say(f"note: {run.folder}: {note}")
    write_json(options, {"runs": folders, "tolerance": options.tolerance, **found})
    return EXIT_DONE if found["equal"] else EXIT_FAILED
