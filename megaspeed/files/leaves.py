"""The values of nested JSON objects, each with its dotted key."""

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not an object, with its key.

    >>> dict(leaves({"parallel": {"tensor": 2}, "steps": [1, 2]}))
    {'parallel.tensor': 2, 'steps': [1, 2]}
    """
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from leaves(value, key)
        else:
            yield key, value
