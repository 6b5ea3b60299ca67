"""Where a path leads, as far as it is there yet."""

import os
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    # os.path.exists: Path.exists raises below a folder that this user may not enter.
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place))
