"""``megaspeed train-tokenizer``: a byte-level BPE for your text.

    megaspeed train-tokenizer 'books/**/*.txt' --vocab-size 32000 --output DIR

DIR is read by ``megaspeed tokenize --tokenizer``, by ``data.tokenizer``, and by transformers'
``AutoTokenizer``.
"""

import argparse
from pathlib import Path
from typing import Any

from megaspeed.cli.common_options import EXIT_DONE, positive
from megaspeed.cli.output import say
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.errors import DataError
from megaspeed.data.text.documents import read_documents
from megaspeed.data.tokenizer.training import check_trainable, train_tokenizer
from megaspeed.files.new_folder import new_folder


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "train a byte-level BPE on text"
    parser = commands.add_parser("train-tokenizer", help=text, description=text)
    parser.set_defaults(run=run)
    add_text_options(parser)
    parser.add_argument(
        "--vocab-size", required=True, type=positive, metavar="N", help="entries, at most"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="a new folder for the tokenizer"
    )


def run(options: argparse.Namespace) -> int:
    """Trains on the text, and saves the tokenizer whole or not at all."""
    output: Path = options.output
    if output.exists():
        raise DataError(
            f"a tokenizer is saved in a new folder, and {output} is there already; name another "
            "--output"
        )
    check_trainable(options.vocab_size, "--vocab-size")
    documents = read_documents(text_files(options))
    say(f"training on {len(documents):,} documents", error=True)
    tokenizer = train_tokenizer(documents, options.vocab_size)
    with new_folder(output) as folder:
        tokenizer.save(folder)
    say(f"{output}: {tokenizer.vocab_size:,} entries, end of text {tokenizer.end_of_text}")
    return EXIT_DONE
