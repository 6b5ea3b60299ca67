"""``megaspeed report RUN...``: one HTML page of one or several runs, laid over each other.

The page is one file that needs no network. A run may still be training, or may have failed. The
page shows what its folder contains now.
"""

import argparse
from pathlib import Path
from typing import Any

from megaspeed.cli.options import EXIT_DONE, EXIT_WRONG_INPUT, new_file, say
from megaspeed.files.durable import write_file
from megaspeed.files.paths import path_argument


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "write one HTML page of one or several runs"
    parser = commands.add_parser("report", help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument(
        "runs", type=path_argument, nargs="+", metavar="RUN", help="the folder of a run"
    )
    parser.add_argument(
        "--output",
        type=new_file,
        default=Path("report.html"),
        metavar="FILE",
        help="where the page goes (report.html)",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the page."""
    # Imported here: `check` need not wait for them.
    from megaspeed.analysis.watching.page import page
    from megaspeed.analysis.watching.record import RunFolderError, read_run

    try:
        records = [read_run(folder) for folder in options.runs]
    except RunFolderError as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    # A lone surrogate, which JSON can write, has no UTF-8.
    text = page(records).encode("utf-8", errors="replace")
    write_file(options.output, lambda stream: stream.write(text))
    say(f"{options.output} ({len(text) / 1000:,.0f} kB)")
    return EXIT_DONE
