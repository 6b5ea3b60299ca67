"""What commands that use a model share: options, the model that they name, and exit codes."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, add_values, say
from megaspeed.files.paths import path_argument

if TYPE_CHECKING:
    from megaspeed.hugging_face.text_model import TextModel


def add_model_options(parser: argparse.ArgumentParser, *openings: str) -> None:
    """Add the options that name the model and what it computes with.

    Args:
        parser: parser of the command.
        openings: values of ``--opening`` that only this command has.
    """
    text = "a checkpoint, the folder of a run (its newest checkpoint), or a Hugging Face model"
    add_values(parser, ("--checkpoint", path_argument, "DIR", ..., text))
    add_tokenizer(parser)
    text = "where to compute (default: cuda if any)"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=text)
    add_precision(parser, "precision of the weights and of the computation (float32)")
    parser.add_argument(
        "--opening",
        choices=("auto", "end-of-text", "tokenizer", *openings),
        default="auto",
        help="tokens before a document: an end-of-text, what the tokenizer's template puts before "
        "a text, or (auto, the default) what preceded it in training: an end-of-text if the model "
        "was trained here, otherwise the template's",
    )


def add_precision(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--dtype``."""
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=types, default="float32", help=text)


def add_tokenizer(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add ``--tokenizer``."""
    text = "a tokenizer.json, or a folder with one (default: the model's own)"
    add_values(parser, ("--tokenizer", path_argument, "PATH", None, text))


def load_model(options: argparse.Namespace, *, always_open: bool) -> "TextModel":
    """Load the model that the options name, and report on stderr how a document begins.

    Args:
        options: options of the command.
        always_open: whether an end-of-text begins a document if nothing else does.
    """
    from megaspeed.hugging_face.text_model import load_text_model

    return load_text_model(
        options.checkpoint,
        tokenizer=options.tokenizer,
        opening=options.opening,
        always_open=always_open,
        device=options.device,
        precision=options.dtype,
        report=lambda text: say(text, error=True),
    )


def exit_code(
    command: Callable[[argparse.Namespace], int | None], options: argparse.Namespace
) -> int:
    """Run a command that reads a model; print its error, if any.

    Returns what the command returns; 0 if that is None.
    """
    # Imported here, because torch takes seconds to load, and ``check`` does not need it.
    from megaspeed.checkpoint.errors import CheckpointError
    from megaspeed.hugging_face.weight_files import ComputationError, HuggingFaceError

    try:
        return command(options) or EXIT_DONE
    except ComputationError as error:
        say(str(error), error=True)
        return EXIT_FAILED
    except (CheckpointError, HuggingFaceError, FileExistsError) as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
