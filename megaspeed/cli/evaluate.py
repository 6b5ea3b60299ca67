"""``megaspeed evaluate``: how well a model predicts text.

The first token of a document is predicted, too, from the ids before the document. If there are
none, an end-of-text is put there.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.model_options import add_model_options, exit_code, load_model
from megaspeed.cli.options import add_parser, positive, say, write_json
from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import Piece
from megaspeed.data.sources import SourceFile

if TYPE_CHECKING:
    from megaspeed.hugging_face.perplexity import Score


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    text = "measure how well a model predicts text"
    parser = add_parser(commands, "evaluate", partial(exit_code, _evaluate), text)
    add_model_options(parser)
    add_text_options(parser)
    for name, metavar, default, text in (
        ("--sequence-length", "N", None, "tokens that the model sees at once (default: its limit)"),
        ("--stride", "N", None, "tokens from window to window (default: the sequence length)"),
        ("--batch-size", "B", 4, "windows computed together (default: 4)"),
    ):
        parser.add_argument(name, type=positive, default=default, metavar=metavar, help=text)


def _evaluate(options: argparse.Namespace) -> None:
    """Print loss, perplexity and bits per byte of all files together."""
    from megaspeed.hugging_face.perplexity import evaluate

    files = text_files(options)
    model = load_model(options, always_open=True)
    length = options.sequence_length or model.positions
    stride = options.stride or length
    for option, number, limit, law in (
        ("--sequence-length", length, model.positions, "the model's max_position_embeddings"),
        ("--stride", stride, length, "the sequence length, or tokens would be skipped"),
    ):
        if number > limit:
            raise DataError(
                f"{option} must be at most {law}, but {number} is more than {limit}; lower or omit "
                "it"
            )
    sizes = [file.state()[1] for file in files]
    with BarOrLines(sum(sizes)) as bar:
        score = evaluate(
            model,
            text_of(files, sizes),
            length=length,
            stride=stride,
            batch_size=options.batch_size,
            watch=lambda so_far: show(so_far, bar),
        )
    figures = {
        "checkpoint": str(model.source),
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


def text_of(files: Sequence[SourceFile], sizes: Sequence[int]) -> Iterator[Piece]:
    """The text of all files, in order. Its progress is in bytes of all files together."""
    before = 0
    for file, size in zip(files, sizes, strict=True):
        for piece in file.pieces():
            yield replace(piece, read_bytes=before + piece.read_bytes)
        before += size


def show(score: "Score", bar: BarOrLines) -> None:
    """Show the score so far. Text that is read, but not predicted yet, does not count."""
    bar.show(score.done_bytes, f"{score.tokens:,} tokens, loss {score.loss:.4f}")


def _text(figure: object) -> str:
    if isinstance(figure, float):
        return f"{figure:.4f}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)
