"""Where a path leads: from whose home, and as far as it is there yet."""

import os
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    # os.path.exists: Path.exists raises below a folder that this user may not enter.
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place))


def expand_home(source: str | Path) -> Path:
    """The path with a leading ~ replaced; where there is no such user, the path as it is."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)
