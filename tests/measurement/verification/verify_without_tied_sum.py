"""Run ``megaspeed verify`` with a mistake: a tied embedding's gradients are not added up.

The embedding is on two pipeline stages. The ranks import this file, as they import every program's
main file. So they have the mistake, too. The plain process has no engine, so it cannot have the
mistake.
"""

import sys

from megaspeed.cli import main
from megaspeed.zero.engine import ZeroEngine


def keep_to_oneself(engine: ZeroEngine) -> None:
    """Keep a pipeline stage's part of the embedding's gradient without adding the other part."""


ZeroEngine.reduce_tied_gradients = keep_to_oneself  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
