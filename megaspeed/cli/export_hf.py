"""``megaspeed export-hf``: a checkpoint as a model that stock transformers loads.

    megaspeed export-hf CHECKPOINT OUT [--dtype bfloat16] [--max-shard-size 2GB] [--no-verify]

CHECKPOINT is a checkpoint of any layout, or a folder of them or of a run, whose newest whole one is
taken. OUT appears whole, after both implementations gave the same logits, or not at all. On the
CPU, in memory of one file of weights; the comparison takes a whole model.
"""

import argparse
import math
import re
from dataclasses import asdict
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    new_file,
    say,
    write_json,
)
from megaspeed.files.paths import path_argument

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_to(commands: Any) -> None:
    """Adds the command."""
    text = "write a checkpoint as a Hugging Face model"
    parser = commands.add_parser("export-hf", help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument(
        "checkpoint",
        type=path_argument,
        metavar="CHECKPOINT",
        help="a checkpoint, or a run's folder",
    )
    parser.add_argument("out", type=path_argument, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--max-shard-size",
        type=byte_count,
        default="2GB",
        metavar="SIZE",
        help="of one file of weights, such as 500MB (2GB)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the weights in the files (float32, which is exact)",
    )
    parser.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="PATH",
        help="a tokenizer.json, or a folder with one (the checkpoint's own)",
    )
    add_no_verify(parser)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")


def add_no_verify(parser: argparse.ArgumentParser) -> None:
    """``--no-verify``: options.verify, true where it is left out."""
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare logits and greedy tokens with transformers",
    )


def byte_count(text: str) -> int:
    """A size on the command line.

    >>> byte_count("2GB"), byte_count("512 MiB"), byte_count("100")
    (2000000000, 536870912, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write one such as 500MB or 2GB")
    return int(size)


def run(options: argparse.Namespace) -> int:
    """Exports; says what was written."""
    # Imported here: torch and transformers take seconds, which `check` need not wait for.
    from megaspeed.checkpoint.errors import CheckpointError
    from megaspeed.checkpoint.inspection import checkpoint_named
    from megaspeed.hugging_face.errors import Disagreement, HuggingFaceError
    from megaspeed.hugging_face.exporting import export_model

    try:
        checkpoint = checkpoint_named(options.checkpoint, lambda line: say(line, error=True))
        agreement = export_model(
            checkpoint,
            options.out,
            tokenizer=options.tokenizer,
            precision=options.dtype,
            max_shard_bytes=options.max_shard_size,
            verify=options.verify,
            tell=say,
        )
    except Disagreement as error:
        say(str(error), error=True)
        return EXIT_FAILED
    except (CheckpointError, HuggingFaceError, FileExistsError) as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    figures = {
        "checkpoint": str(checkpoint),
        "out": str(options.out),
        "agreement": agreement and asdict(agreement),
    }
    write_json(options, figures)
    return EXIT_DONE
