"""``megaspeed export-hf`` and ``megaspeed import-hf``: models to and from Hugging Face's format.

    megaspeed export-hf CHECKPOINT OUT [--dtype bfloat16] [--no-verify]
    megaspeed import-hf DIR OUT [--tokenizer PATH | --no-tokenizer] [--no-verify]
    deepspeed scripts/pretrain.py --config FILE --set model.from_hf=DIR --resume OUT

CHECKPOINT is a checkpoint of any layout. For a folder of checkpoints or of a run, the newest
complete checkpoint is used. DIR is a folder as save_pretrained writes it. OUT gets its name after
both implementations have computed the same logits. Both commands run on the CPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    add_flags,
    add_parser,
    add_values,
    busy,
    say,
    write_json,
)
from megaspeed.files.paths import path_argument


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
    text = "import the model without a tokenizer"
    which.add_argument("--no-tokenizer", action="store_true", help=text)
    text = "export a checkpoint as a Hugging Face model"
    export = add_parser(commands, "export-hf", partial(exit_code, _export), text)
    add_values(
        export,
        ("checkpoint", path_argument, "CHECKPOINT", ..., "a checkpoint, or the folder of a run"),
        ("out", path_argument, "OUT", ..., "the folder to create"),
    )
    add_precision(export, "precision of the weights in the files (float32, which is exact)")
    add_tokenizer(export)
    for each in (parser, export):
        add_flags(each, ("--no-verify", "do not compare logits with transformers"))


def add_precision(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--dtype``."""
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=types, default="float32", help=text)


def add_tokenizer(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add ``--tokenizer``."""
    text = "a tokenizer.json, or a folder with one (default: the model's own)"
    add_values(parser, ("--tokenizer", path_argument, "PATH", None, text))


def exit_code(
    command: Callable[[argparse.Namespace], int | None], options: argparse.Namespace
) -> int:
    """Run a command that reads a model; print its error, if any.

    Returns what the command returns; 0 if that is None.
    """
    # Imported here, because torch takes seconds to load, and ``check`` does not need it.
    from megaspeed.checkpoint.errors import CheckpointError
    from megaspeed.hugging_face.weights import ComputationError, HuggingFaceError

    try:
        return command(options) or EXIT_DONE
    except ComputationError as error:
        say(str(error), error=True)
        return EXIT_FAILED
    except (CheckpointError, HuggingFaceError, FileExistsError) as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT


def _import(options: argparse.Namespace) -> None:
    # Imported here, because torch and transformers take seconds to load.
    from megaspeed.hugging_face.importing import import_model

    lines: list[str] = []
    with busy(f"importing {options.folder}") as bar:
        agreement = import_model(
            options.folder,
            options.out,
            tokenizer=options.tokenizer,
            with_tokenizer=not options.no_tokenizer,
            verify=not options.no_verify,
            report=lines.append,
            show=bar.show,
        )
    say("\n".join(lines))
    write_json(options, {"out": str(options.out), "agreement": agreement and asdict(agreement)})


def _export(options: argparse.Namespace) -> None:
    from megaspeed.checkpoint.inspection import checkpoint_named
    from megaspeed.hugging_face.exporting import export_model

    checkpoint = checkpoint_named(options.checkpoint, lambda line: say(line, error=True))
    lines: list[str] = []
    with busy(f"exporting {checkpoint}") as bar:
        agreement = export_model(
            checkpoint,
            options.out,
            tokenizer=options.tokenizer,
            precision=options.dtype,
            verify=not options.no_verify,
            report=lines.append,
            show=bar.show,
        )
    say("\n".join(lines))
    figures = {
        "checkpoint": str(checkpoint),
        "out": str(options.out),
        "agreement": agreement and asdict(agreement),
    }
    write_json(options, figures)
