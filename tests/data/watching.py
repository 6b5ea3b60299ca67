"""Receivers of a tokenization's progress: one records it, one stops the work."""

from pathlib import Path

from megaspeed.data.tokenize import TokenizationProgress


class Record:
    """Record the number of tokens at each report."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, progress: TokenizationProgress) -> None:
        self.tokens.append(progress.tokens)


class Stop(Record):
    """Stop the work after a number of batches, as Ctrl-C does."""

    def __init__(self, after_batches: int) -> None:
        super().__init__()
        self._batches = after_batches

    def __call__(self, progress: TokenizationProgress) -> None:
        super().__call__(progress)
        if len(self.tokens) == 1 + self._batches:  # the first report comes before the first batch
            raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder, except the lock."""
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"
    }
