"""Options that name text: files of every format, and datasets."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megaspeed.cli.options import utf8_text
from megaspeed.config.data import Source
from megaspeed.data.errors import DataError
from megaspeed.data.text.sources import SourceFile, list_files
from megaspeed.data.tokens.token_sources import token_paths
from megaspeed.files.paths import path_problem


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``INPUT...``, ``--dataset`` and what is to be said of them."""
    parser.add_argument(
        "input",
        nargs="*",
        type=_input,
        metavar="INPUT",
        help="file, glob, folder written by save_to_disk, or python-stdlib; as in data.train",
    )
    parser.add_argument(
        "--dataset",
        action="append",
        default=[],
        type=_name,
        metavar="NAME",
        help="what datasets.load_dataset is asked for; may be given again",
    )
    parser.add_argument("--configuration", type=_name, metavar="NAME", help="of the datasets")
    parser.add_argument("--revision", type=_name, metavar="NAME", help="of the datasets")
    parser.add_argument(
        "--streaming", action="store_true", help="read datasets over the network, keep no copy"
    )
    parser.add_argument(
        "--text-field",
        type=_name,
        default="text",
        metavar="NAME",
        help="of JSON lines and tables (text)",
    )
    parser.add_argument(
        "--split", type=_name, default="train", metavar="NAME", help="of datasets (train)"
    )


def text_files(options: argparse.Namespace) -> list[SourceFile]:
    """The files that the options name.

    Raises:
        DataError: every problem with them.
    """
    problems = list(_problems(options))
    if problems:
        raise DataError(*problems)
    read_as = {"text_field": options.text_field, "split": options.split}
    # Unchecked: a file may have a name that is no UTF-8, which no configuration can hold.
    paths = [Source.model_construct(path=path, **read_as) for path in options.input]
    datasets = [
        Source(
            dataset=name,
            configuration=options.configuration,
            revision=options.revision,
            streaming=options.streaming,
            **read_as,
        )
        for name in options.dataset
    ]
    return list_files([*paths, *datasets], "INPUT")


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is a name, and this one is empty; write one")
    return text


def _input(text: str) -> str:
    problem = path_problem(_not_empty(text))
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{problem}; name another")
    return text


def _name(text: str) -> str:
    return _not_empty(utf8_text(text))


def _problems(options: argparse.Namespace) -> Iterator[str]:
    of_datasets = ("configuration", "revision", "streaming")
    stated = [f"--{name}" for name in of_datasets if getattr(options, name)]
    if stated and not options.dataset:
        yield (
            f"what is said of datasets needs --dataset, and there is {' and '.join(stated)} "
            f"without it; leave {'them' if len(stated) > 1 else 'it'} out, or name the --dataset"
        )
    # A tokenization that goes on may find what it has written beside its text.
    own = options.output.resolve() if "output" in options else None
    for path in options.input:
        tokens = [place for place in token_paths(Path(path)) if place.resolve() != own]
        if tokens:
            yield (
                f"INPUT is text, and '{path}' names {tokens[0]}, which is of token ids; name the "
                "text that they were made from, and only that"
            )
