"""``megaspeed evaluate``: how well a model predicts text.

The first token of a document is predicted, too, from the ids before the document. If there are
none, an end-of-text is put there.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
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
    """Adds the command and its options."""
    text = "measure how well a model predicts text"
    parser = add_parser(commands, "evaluate", partial(exit_code, _evaluate), text)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument(
        "--sequence-length",
        type=positive,
        metavar="N",
        help="tokens that the model sees at once (default: all its positions)",
    )
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens from one window to the next (default: the sequence length, no overlap)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=4,
        metavar="B",
        help="windows computed together (default: 4)",
    )


def _evaluate(options: argparse.Namespace) -> None:
    """Prints loss, perplexity and bits per byte of all files together."""
    from megaspeed.hugging_face.perplexity import evaluate

    files = text_files(options)
    model = load_model(options, always_open=True)
    length = options.sequence_length or model.positions
    _require_at_most(
        "--sequence-length", length, model.positions, "the model's max_position_embeddings"
    )
    stride = options.stride or length
    _require_at_most("--stride", stride, length, "the sequence length, or tokens would be skipped")
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


def _require_at_most(option: str, number: int, limit: int, law: str) -> None:
    if number > limit:
        raise DataError(
            f"{option} must be at most {law}, but {number} is more than {limit}; lower or omit it"
        )


def _text(figure: object) -> str:
    if isinstance(figure, float):
        return f"{figure:.4f}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)


class EvaluationProgress:
    """The text of files, and the progress in bytes, because the number of tokens is not known."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._bytes_before = [0, *accumulate(file.state()[1] for file in files)]
        self._read_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Size of all files; 0 if it is not known, because only datasets are read."""
        return self._bytes_before[-1]

    def pieces(self) -> Iterator[Piece]:
        """The text of all files, in order."""
        for file, before in zip(self._files, self._bytes_before, strict=False):
            for piece in file.pieces():
                self._read_bytes = before + piece.read_bytes
                yield piece

    def show(self, score: "Score", bar: BarOrLines) -> None:
        """Shows the score so far. Text that is read, but not predicted yet, does not count."""
        done = self._read_bytes * score.tokens // max(1, score.read_tokens)
        bar.show(done, f"{score.tokens:,} tokens, loss {score.loss:.4f}")
