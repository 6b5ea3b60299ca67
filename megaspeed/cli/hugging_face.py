"""``megaspeed export-hf`` and ``megaspeed import-hf``: models to and from Hugging Face's format.

    megaspeed export-hf CHECKPOINT OUT [--dtype bfloat16] [--max-shard-size 2GB] [--no-verify]
    megaspeed import-hf DIR OUT [--tokenizer PATH | --no-tokenizer] [--no-verify]
    deepspeed scripts/pretrain.py --config FILE --set model.from_hf=DIR --resume OUT

CHECKPOINT is a checkpoint of any layout. For a folder of checkpoints or of a run, the newest
complete checkpoint is used. DIR is a folder as save_pretrained writes it. OUT gets its name after
both implementations have computed the same logits. Both commands run on the CPU.
"""

import argparse
import math
import re
from dataclasses import asdict
from functools import partial
from typing import Any

from megaspeed.cli.model_options import add_precision, add_tokenizer, exit_code
from megaspeed.cli.options import add_flags, add_parser, add_values, say, write_json
from megaspeed.files.paths import path_argument

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_to(commands: Any) -> None:
    """Add both commands."""
    text = "convert a Hugging Face model to a checkpoint"
    parser = add_parser(commands, "import-hf", partial(exit_code, _import), text)
    add_values(
        parser,
        ("folder", path_argument, "DIR", ..., "the model's folder"),
        ("out", path_argument, "OUT", ..., "the checkpoint to create"),
    )
    which = parser.add_mutually_exclusive_group()
    add_tokenizer(which)
    which.add_argument(
        "--no-tokenizer", action="store_true", help="import the model without a tokenizer"
    )
    text = "export a checkpoint as a Hugging Face model"
    export = add_parser(commands, "export-hf", partial(exit_code, _export), text)
    size = "largest size of one file of weights, for example 500MB (default: 2GB)"
    add_values(
        export,
        ("checkpoint", path_argument, "CHECKPOINT", ..., "a checkpoint, or the folder of a run"),
        ("out", path_argument, "OUT", ..., "the folder to create"),
        ("--max-shard-size", byte_count, "SIZE", "2GB", size),
    )
    add_precision(export, "precision of the weights in the files (float32, which is exact)")
    add_tokenizer(export)
    for each in (parser, export):
        add_flags(each, ("--no-verify", "do not compare logits and tokens with transformers"))


def byte_count(text: str) -> int:
    """Return a size on the command line.

    >>> byte_count("2GB"), byte_count("512 MiB"), byte_count("100")
    (2000000000, 536870912, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write one such as 500MB or 2GB")
    return int(size)


def _import(options: argparse.Namespace) -> None:
    # Imported here, because torch and transformers take seconds to load.
    from megaspeed.hugging_face.importing import import_model

    agreement = import_model(
        options.folder,
        options.out,
        tokenizer=options.tokenizer,
        with_tokenizer=not options.no_tokenizer,
        verify=not options.no_verify,
        report=say,
    )
    write_json(options, {"out": str(options.out), "agreement": agreement and asdict(agreement)})


def _export(options: argparse.Namespace) -> None:
    from megaspeed.checkpoint.inspection import checkpoint_named
    from megaspeed.hugging_face.exporting import export_model

    checkpoint = checkpoint_named(options.checkpoint, lambda line: say(line, error=True))
    agreement = export_model(
        checkpoint,
        options.out,
        tokenizer=options.tokenizer,
        precision=options.dtype,
        max_shard_bytes=options.max_shard_size,
        verify=not options.no_verify,
        report=say,
    )
    figures = {
        "checkpoint": str(checkpoint),
        "out": str(options.out),
        "agreement": agreement and asdict(agreement),
    }
    write_json(options, figures)
