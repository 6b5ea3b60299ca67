"""Options that name text: files of every format, and datasets."""

import argparse
from itertools import chain

from megaspeed.cli.options import add_flags, add_values, utf8_text
from megaspeed.config.run import Source
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile, files_by_source, find
from megaspeed.files.paths import path_problem

_OF_DATASETS = ("configuration", "revision", "streaming")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add ``INPUT...``, ``--dataset`` and the options for them."""
    text = "file, glob, folder written by save_to_disk, or python-stdlib, as in data.train"
    parser.add_argument("input", nargs="*", type=_input, metavar="INPUT", help=text)
    text = "passed to datasets.load_dataset; may be repeated"
    parser.add_argument(
        "--dataset", action="append", default=[], type=_name, metavar="NAME", help=text
    )
    add_values(
        parser,
        ("--configuration", _name, "NAME", None, "of the datasets"),
        ("--revision", _name, "NAME", None, "of the datasets"),
        ("--text-field", _name, "NAME", "text", "of JSON lines and tables (text)"),
        ("--split", _name, "NAME", "train", "of datasets (train)"),
    )
    add_flags(parser, ("--streaming", "read datasets over the network, keep no copy"))


def text_files(options: argparse.Namespace) -> list[SourceFile]:
    """Return the files that the options name.

    Raises:
        DataError: every problem with them.
    """
    read_as = {"text_field": options.text_field, "split": options.split}
    # Not validated: a configuration must be UTF-8, but the name of a file need not be.
    paths = [Source.model_construct(path=path, **read_as) for path in options.input]
    dataset_options = {name: getattr(options, name) for name in _OF_DATASETS}
    datasets = [Source(dataset=name, **dataset_options, **read_as) for name in options.dataset]
    if any(dataset_options.values()) and not datasets:
        names = ", ".join(f"--{name}" for name in _OF_DATASETS)
        raise DataError(f"{names} need --dataset; name it, or remove the options")
    return list(chain(*files_by_source(find([*paths, *datasets]), "INPUT")))


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; state one")
    return text


def _input(text: str) -> str:
    problem = path_problem(_not_empty(text))
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{problem}; name another")
    return text


def _name(text: str) -> str:
    return _not_empty(utf8_text(text))
