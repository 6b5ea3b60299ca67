"""JSON values: of figures, by dotted key, in files with an object on each line, or with a hash.

    {"answer": 42, "index_hash": sha256 of {"answer": 42}}

The hash detects a file that was truncated, mixed or edited. It does not protect against a user who
computes the hash again.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megaspeed.files.durable import write_bytes
from megaspeed.files.paths import read_file

Facts = dict[str, Any]
"""The content of a file with a hash: plain JSON values."""

_SEAL = "index_hash"


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not an object, with its dotted key.

    >>> dict(leaves({"parallel": {"tensor": 2}, "steps": [1, 2]}))
    {'parallel.tensor': 2, 'steps': [1, 2]}
    """
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from leaves(value, key)
        else:
            yield key, value


def json_value(value: Any) -> Any:
    """Return the value as JSON: a dataclass as an object, a range as its ends, infinity as null."""
    if is_dataclass(value):
        return picked(value, *(field.name for field in fields(value)))
    if isinstance(value, Mapping):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, list | tuple):
        return list(map(json_value, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def picked(source: object, *names: str) -> dict[str, Any]:
    """Return these fields and properties of an object as JSON values."""
    return {name: json_value(getattr(source, name)) for name in names}


def write_sealed(path: Path, facts: Facts) -> None:
    """Write ``facts`` and their hash. The file is complete or absent."""
    sealed = json.dumps(facts | {_SEAL: hash_of(facts)}, indent=1).encode("utf-8")
    write_bytes(path, sealed)


def read_sealed(path: Path) -> Facts | None:
    """The facts in the file at ``path``; None if it does not exist or its hash does not match."""
    try:
        return unsealed(read_file(path))
    except OSError:
        return None


def unsealed(text: bytes) -> Facts | None:
    """The facts in the content of such a file; None if the hash does not match."""
    facts = object_in(text)
    if facts is None or facts.pop(_SEAL, None) != hash_of(facts):
        return None
    return facts


def hash_of(value: object) -> str:
    """sha256 of a JSON value, in hexadecimal. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def read_records(file: Path) -> Iterator[dict[str, Any] | None]:
    """The object of each line of a metrics file; None for a line that is not an object.

    A run that was killed may have left an incomplete line.
    """
    with file.open("rb") as stream:
        yield from map(object_in, stream)


def object_in(text: bytes) -> dict[str, Any] | None:
    """The JSON object that the text is; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
