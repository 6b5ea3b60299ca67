"""``megaspeed tokenize``: text of any size to a folder of token files that training maps.

    megaspeed tokenize 'books/**/*.jsonl.gz' --tokenizer T --output DIR

If it was killed or interrupted, the same command continues after the last complete input file.
"""

import argparse
import time
from dataclasses import asdict
from typing import Any

from megaspeed.bar_or_lines import BarOrLines
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_flags,
    add_parser,
    add_values,
    say,
    write_json,
)
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.pieces import BadRecord
from megaspeed.data.tokenize import TokenizationProgress, tokenize
from megaspeed.data.tokenizer import load_tokenizer
from megaspeed.files.paths import path_argument

_RECORDS_SHOWN = 10


class _Display:
    """Shows tokens a second, the remaining time, and the first bad records.

    Progress is counted in bytes, because the number of tokens is not known beforehand.

    Attributes:
        skipped: bad records that were skipped, including those of earlier commands.
    """

    def __init__(self, bar: BarOrLines) -> None:
        self._bar = bar
        self._started_at = time.monotonic()
        self._tokens_before: int | None = None  # those of earlier commands
        self._tokens = self._shown = self.skipped = 0

    def tokens_per_second(self) -> float:
        """Tokens encoded each second, since this process began to encode."""
        seconds = max(1e-9, time.monotonic() - self._started_at)
        return (self._tokens - (self._tokens_before or 0)) / seconds

    def report(self, progress: TokenizationProgress) -> None:
        """Show the progress. The first call shows the progress of earlier commands."""
        self._tokens, self.skipped = progress.tokens, progress.skipped
        if self._tokens_before is None:
            self._tokens_before = self._tokens
            if self._tokens:
                self._bar.tell(f"continuing after {self._tokens:,} tokens")
        text = f"{self._tokens:,} tokens, {self.tokens_per_second():,.0f} tokens/s"
        self._bar.show(progress.read_bytes, text)

    def skip(self, record: BadRecord) -> None:
        """Show the first few bad records."""
        if self._shown < _RECORDS_SHOWN:
            self._bar.tell(f"skipped: {record.path}, {record.where}: {record.problem}")
        self._shown += 1


_CONTINUES = "complete input files are kept, and the same command continues after them"


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    parser = add_parser(commands, "tokenize", run, "write text as a folder of token files")
    add_text_options(parser)
    add_values(
        parser,
        ("--tokenizer", path_argument, "T", ..., "a folder with a tokenizer, or its JSON"),
        ("--output", path_argument, "DIR", ..., "a new folder for the tokens"),
    )
    text = "skip records that are not text; all are listed in DIR/skipped.jsonl"
    add_flags(parser, ("--skip-bad", text))


def run(options: argparse.Namespace) -> int:
    """Write the token folder, and report what it holds."""
    files = text_files(options)
    tokenizer = load_tokenizer(str(options.tokenizer), "--tokenizer")
    try:
        with BarOrLines(sum(file.state()[1] for file in files)) as bar:
            display = _Display(bar)
            skip = display.skip if options.skip_bad else None
            index = tokenize(files, tokenizer, options.output, display.report, skip=skip)
    except OSError as error:
        what = f"{error.filename or options.output}: {error.strerror or error}"
        mend = "Check that it exists, that you may read and write it, and that the disk has room"
        say(f"megaspeed tokenize: {what}; {_CONTINUES}. {mend}", error=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(f"megaspeed tokenize: stopped; {_CONTINUES}", error=True)
        return EXIT_FAILED
    say(
        f"{options.output}: {index.documents:,} documents, {index.tokens:,} tokens in "
        f"{len(index.shards)} shards; {display.tokens_per_second():,.0f} tokens/s"
    )
    if display.skipped:
        say(f"bad records skipped: {display.skipped:,}, {options.output / 'skipped.jsonl'}")
    figures = {
        "output": str(options.output),
        **asdict(index),
        "skipped": display.skipped,
        "tokens_per_second": display.tokens_per_second(),
    }
    write_json(options, figures)
    return EXIT_DONE
