"""How far an evaluation has come, in bytes: how many tokens there are is not known before."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.data.pieces import Piece
from megaspeed.data.sources import SourceFile

if TYPE_CHECKING:
    from megaspeed.inference.perplexity import Score


class EvaluationProgress:
    """The text of files, and how much of it is behind the score so far."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._bytes_before = [0, *accumulate(file.state()[1] for file in files)]
        self._read_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Of all files; 0 where only datasets are read that do not say."""
        return self._bytes_before[-1]

    def pieces(self) -> Iterator[Piece]:
        """The text of all files, in order."""
        for file, before in zip(self._files, self._bytes_before, strict=False):
            for piece in file.pieces():
                self._read_bytes = before + piece.read_bytes
                yield piece

    def show(self, score: "Score", bar: BarOrLines) -> None:
        """Shows the score so far, and how much of the text is predicted: some is only read."""
        done = self._read_bytes * score.tokens // max(1, score.read_tokens)
        bar.show(done, f"{score.tokens:,} tokens, loss {score.loss:.4f}")
