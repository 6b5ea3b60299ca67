"""``python -m megaspeed.cli``: the ``megaspeed`` command, for launchers that start modules."""

import sys

from megaspeed.cli import main

if __name__ == "__main__":
    sys.exit(main())
