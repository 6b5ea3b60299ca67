"""``megaspeed train-tokenizer``: a byte-level BPE for your text.

    megaspeed train-tokenizer 'books/**/*.txt' --vocab-size 32000 --output DIR

DIR is read by ``megaspeed tokenize --tokenizer``, by ``data.tokenizer``, and by transformers'
``AutoTokenizer``.
"""

import argparse
from pathlib import Path
from typing import Any

from megaspeed.cli.options import EXIT_DONE, add_parser, add_values, positive, say, write_json
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.documents import read_documents
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import check_trainable, train_tokenizer
from megaspeed.files.durable import new_folder, refuse_existing
from megaspeed.files.paths import folder_problem, path_argument


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    parser = add_parser(commands, "train-tokenizer", run, "train a byte-level BPE on text")
    add_text_options(parser)
    add_values(
        parser,
        ("--vocab-size", positive, "N", ..., "entries, at most"),
        ("--output", path_argument, "DIR", ..., "a new folder for the tokenizer"),
    )


def run(options: argparse.Namespace) -> int:
    """Train on the text. The folder is complete or absent."""
    output: Path = options.output
    problem = folder_problem("--output", output)
    if problem is not None:
        raise DataError(problem)
    check_trainable(options.vocab_size, "--vocab-size")
    try:
        refuse_existing(output)  # before all the text is read
        documents = read_documents(text_files(options))
        with new_folder(output) as folder:
            say(f"training on {len(documents):,} documents", error=True)
            tokenizer = train_tokenizer(documents, options.vocab_size)
            tokenizer.save(folder)
    except FileExistsError as error:
        raise DataError(str(error)) from error
    say(f"{output}: {tokenizer.vocab_size:,} entries, end of text {tokenizer.end_of_text}")
    figures = {
        "output": str(output),
        "documents": len(documents),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    write_json(options, figures)
    return EXIT_DONE
