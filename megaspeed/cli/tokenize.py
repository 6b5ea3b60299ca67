"""``megaspeed tokenize``: text of any size to a folder of token files that training maps.

    megaspeed tokenize 'books/**/*.jsonl.gz' --tokenizer T --output DIR

If it was killed or interrupted, the same command continues after the last complete input file.
"""

import argparse
import errno
import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, new_file, positive, say, write_json
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.encode import WorkerDied
from megaspeed.data.pieces import BadRecord
from megaspeed.data.tokenize import DEFAULT_SHARD_TOKENS, Standing, tokenize
from megaspeed.data.tokenizer import load_tokenizer
from megaspeed.files.paths import path_argument

_RECORDS_SHOWN = 10


class TokenizingProgress:
    """Shows tokens a second, the remaining time, and the first bad records.

    Progress is counted in bytes, because the number of tokens is not known beforehand.
    """

    def __init__(self) -> None:
        self._exits = ExitStack()
        self._bar = BarOrLines(0)
        self._start = self._now = Standing(0, 0, 0, 0)
        self._begun_at = time.monotonic()
        self._records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def skipped(self) -> int:
        """Bad records that were skipped, including those of earlier calls."""
        return self._now.skipped

    def tokens_per_second(self) -> float:
        """Since this process began."""
        seconds = max(1e-9, time.monotonic() - self._begun_at)
        return (self._now.tokens - self._start.tokens) / seconds

    def begins(self, standing: Standing, total_bytes: int) -> None:
        """Shows what earlier calls have done."""
        self._start = self._now = standing
        self._begun_at = time.monotonic()
        bar = BarOrLines(total_bytes, done_before=standing.read_bytes)
        self._bar = self._exits.enter_context(bar)
        if standing.tokens:
            bar.tell(f"continuing after {standing.tokens:,} tokens")

    def passes_over(self, record: BadRecord) -> None:
        """Shows the first few."""
        if self._records < _RECORDS_SHOWN:
            self._bar.tell(f"skipped: {record.path}, {record.where}: {record.problem}")
        elif self._records == _RECORDS_SHOWN:
            self._bar.tell("more bad records are skipped; all are listed in skipped.jsonl")
        self._records += 1

    def reaches(self, standing: Standing) -> None:
        """Shows the progress."""
        self._now = standing
        text = f"{standing.tokens:,} tokens, {self.tokens_per_second():,.0f} tokens/s"
        self._bar.show(standing.read_bytes, text)


_CONTINUES = "complete input files are kept, and the same command continues after them"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "write text as a folder of token files"
    parser = commands.add_parser("tokenize", help=text, description=text)
    parser.set_defaults(run=run)
    add_text_options(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=path_argument,
        metavar="T",
        help="a folder with a tokenizer, or its JSON",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=path_argument,
        metavar="DIR",
        help="a new folder for the tokens",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=_usable_cores(),
        metavar="N",
        help="how many processes encode (the usable cores: %(default)s here)",
    )
    parser.add_argument(
        "--shard-size",
        type=positive,
        default=DEFAULT_SHARD_TOKENS,
        metavar="TOKENS",
        help="a file ends with the document that brings it to this number of tokens (%(default)s)",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip records that are not text; all are listed in DIR/skipped.jsonl",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="remove what an earlier tokenization left in DIR"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> int:
    """Writes the token folder, and reports what it holds."""
    files = text_files(options)
    tokenizer = load_tokenizer(str(options.tokenizer), "--tokenizer")
    try:
        with TokenizingProgress() as progress:
            index = tokenize(
                files,
                tokenizer,
                options.output,
                progress,
                processes=options.processes,
                shard_tokens=options.shard_size,
                skip_bad=options.skip_bad,
                fresh=options.fresh,
            )
    except WorkerDied as error:
        say(f"{error}; {_CONTINUES}. With fewer --processes it needs less memory", error=True)
        return EXIT_FAILED
    except OSError as error:
        say(_cannot_continue(error, options.output), error=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(f"megaspeed tokenize: stopped; {_CONTINUES}", error=True)
        return EXIT_FAILED
    say(
        f"{options.output}: {index.documents:,} documents, {index.tokens:,} tokens in "
        f"{len(index.shards)} shards; {progress.tokens_per_second():,.0f} tokens/s"
    )
    if progress.skipped:
        say(f"bad records skipped: {progress.skipped:,}, {options.output / 'skipped.jsonl'}")
    figures = {
        "output": str(options.output),
        **asdict(index),
        "skipped": progress.skipped,
        "tokens_per_second": progress.tokens_per_second(),
    }
    write_json(options, figures)
    return EXIT_DONE


def _cannot_continue(error: OSError, output: Path) -> str:
    if error.errno in _NO_ROOM:
        mend = f"Make room there, or move {output} to a larger disk and name it as --output"
    else:
        mend = "Check that it exists and that you may read and write it"
    what = f"{error.filename or output}: {error.strerror or error}"
    return f"megaspeed tokenize: {what}; {_CONTINUES}. {mend}"


def _usable_cores() -> int:
    """The cores of this machine that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
