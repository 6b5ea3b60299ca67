"""``megaspeed evaluate``: how well a checkpoint's model predicts text.

A document opens as the model saw documents open in its training (``inference/opening.py``), which
`--opening` may say otherwise. Its first token is predicted too, so something must open it: where
the tokenizer's template puts nothing before a text an end-of-text does, and `nothing` is no choice.
"""

import argparse
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.evaluation_progress import EvaluationProgress
from megaspeed.cli.model_options import add_model_options, add_opening, load_model
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    positive,
    say,
    write_json,
)
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.errors import DataError

if TYPE_CHECKING:
    from megaspeed.inference.text_model import TextModel


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "measure how well a checkpoint's model predicts text"
    parser = commands.add_parser("evaluate", help=text, description=text)
    parser.set_defaults(run=run)
    add_model_options(parser)
    add_opening(parser)
    add_text_options(parser)
    parser.add_argument(
        "--sequence-length",
        type=positive,
        metavar="N",
        help="tokens that the model sees at once (all its positions)",
    )
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens from one window to the next (the sequence length: they do not overlap)",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=4, metavar="B", help="windows computed at once (4)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints loss, perplexity and bits per byte of all files together."""
    # Imported here: torch takes seconds, which `check` need not wait for.
    from megaspeed.checkpoint.errors import CheckpointError
    from megaspeed.inference.errors import InferenceError

    try:
        _evaluate(options)
    except CheckpointError as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    except InferenceError as error:
        say(str(error), error=True)
        return EXIT_FAILED
    return EXIT_DONE


def _evaluate(options: argparse.Namespace) -> None:
    from megaspeed.inference.perplexity import evaluate

    files = text_files(options)
    model = load_model(options, always_open=True)
    length = _length(options, model)
    stride = _stride(options, length)
    progress = EvaluationProgress(files)
    with BarOrLines(progress.total_bytes) as bar:
        score = evaluate(
            model,
            progress.pieces(),
            length=length,
            stride=stride,
            batch_size=options.batch_size,
            watch=lambda so_far: progress.show(so_far, bar),
        )
    figures = {
        "checkpoint": str(model.checkpoint),
        "dtype": options.dtype,
        "opening": model.opening,
        "sequence_length": length,
        "stride": stride,
        "files": len(files),
        "documents": score.documents,
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }
    for name, figure in figures.items():
        say(f"{name.replace('_', ' '):16}{_text(figure)}")
    write_json(options, figures)


def _length(options: argparse.Namespace, model: "TextModel") -> int:
    positions = model.config.max_position_embeddings
    length: int = options.sequence_length or positions
    if length > positions:
        raise DataError(
            f"--sequence-length is at most the model's max_position_embeddings, and {length} is "
            f"more than {positions}; lower it, or leave it out"
        )
    return length


def _stride(options: argparse.Namespace, length: int) -> int:
    stride: int = options.stride or length
    if stride > length:
        raise DataError(
            f"--stride is at most the sequence length, or tokens would be left out, and {stride} "
            f"is more than {length}; lower it, or leave it out"
        )
    return stride


def _text(figure: object) -> str:
    if isinstance(figure, float):
        return f"{figure:.4f}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)
