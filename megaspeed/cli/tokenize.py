"""``megaspeed tokenize``: text of any size to a folder of token files that training maps.

    megaspeed tokenize 'books/**/*.jsonl.gz' --tokenizer T --output DIR

Killed or stopped, the same command goes on where it was.
"""

import argparse
import errno
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    new_file,
    not_negative,
    positive,
    say,
    write_json,
)
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.cli.tokenizing_progress import TokenizingProgress
from megaspeed.data.tokenizer.text_tokenizer import load_tokenizer
from megaspeed.data.tokenizing.tokenization import DEFAULT_SHARD_TOKENS, How, tokenize
from megaspeed.data.tokenizing.workers import WorkerDied
from megaspeed.files.paths import path_argument

_GOES_ON = "what is done is kept, and the same command goes on with it"
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
        help="that encode side by side (every core that may be used: %(default)s here)",
    )
    parser.add_argument(
        "--shard-size",
        type=positive,
        default=DEFAULT_SHARD_TOKENS,
        metavar="TOKENS",
        help="a file ends with the document that brings it to so many tokens (%(default)s)",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="pass over records that are no text; all are listed in DIR/skipped.jsonl",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="remove what an earlier tokenization left in DIR"
    )
    parser.add_argument(
        "--save-interval",
        type=not_negative,
        default=5.0,
        metavar="SECONDS",
        help="about as much work is lost in a kill, within a long document too (%(default)s)",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> int:
    """Writes the token folder, and tells what it holds."""
    how = How(
        processes=options.processes,
        shard_tokens=options.shard_size,
        skip_bad=options.skip_bad,
        fresh=options.fresh,
        save_interval_seconds=options.save_interval,
    )
    files = text_files(options)
    tokenizer = load_tokenizer(str(options.tokenizer), "--tokenizer")
    try:
        with TokenizingProgress() as progress:
            index = tokenize(files, tokenizer, options.output, how, progress)
    except WorkerDied as error:
        say(f"{error}; {_GOES_ON}. With fewer --processes it needs less memory", error=True)
        return EXIT_FAILED
    except OSError as error:
        say(_cannot_go_on(error, options.output), error=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(f"megaspeed tokenize: stopped; {_GOES_ON}", error=True)
        return EXIT_FAILED
    say(
        f"{options.output}: {index.documents:,} documents, {index.tokens:,} tokens in "
        f"{len(index.shards)} shards; {progress.tokens_per_second():,.0f} tokens/s"
    )
    if progress.skipped:
        say(f"bad records passed over: {progress.skipped:,}, {options.output / 'skipped.jsonl'}")
    figures = {
        "output": str(options.output),
        **asdict(index),
        "skipped": progress.skipped,
        "tokens_per_second": progress.tokens_per_second(),
    }
    write_json(options, figures)
    return EXIT_DONE


def _cannot_go_on(error: OSError, output: Path) -> str:
    if error.errno in _NO_ROOM:
        mend = f"Make room there, or move {output} to a larger disk and name it as --output"
    else:
        mend = "See that it is there and that you may read and write it"
    what = f"{error.filename or output}: {error.strerror or error}"
    return f"megaspeed tokenize: {what}; {_GOES_ON}. {mend}"


def _usable_cores() -> int:
    """Of this machine, those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
