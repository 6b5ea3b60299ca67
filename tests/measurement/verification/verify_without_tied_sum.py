"""`megaspeed verify` of a build with one mistake: the two pipeline stages that share the embedding
do not add up their gradients.

The ranks import this file too, as every program's main file, so the mistake is theirs; the plain
process has no engine that could make it.
"""

import sys

from megaspeed.cli import main
from megaspeed.zero.engine import ZeroEngine


def keep_to_oneself(engine: ZeroEngine) -> None:
    """Keeps a pipeline stage's part of the embedding's gradient without adding the other."""


ZeroEngine.reduce_tied_gradients = keep_to_oneself  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
