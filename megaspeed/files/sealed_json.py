"""Small JSON files that know whether they are what was written: they hold a hash of themselves.

    {"answer": 42, "index_hash": sha256 of {"answer": 42}}

The seal finds a file that was cut, mixed or edited. It keeps nobody from sealing anew.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from megaspeed.files.durable import write_whole
from megaspeed.files.reading import read_whole

Facts = dict[str, Any]
"""What such a file says: plain JSON values."""

_SEAL = "index_hash"


def write_sealed(path: Path, facts: Facts) -> None:
    """Writes ``facts`` and their hash, whole or not at all."""
    sealed = json.dumps(facts | {_SEAL: _hash_of(facts)}, indent=1).encode("utf-8")

    def fill(stream: BinaryIO) -> None:
        stream.write(sealed)

    write_whole(path, fill)


def read_sealed(path: Path) -> Facts | None:
    """The facts at ``path`` if they are there and as they were written, else None."""
    try:
        return unsealed(read_whole(path))
    except OSError:
        return None


def unsealed(text: bytes) -> Facts | None:
    """The facts in what such a file holds if they are as they were written, else None."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.pop(_SEAL, None) != _hash_of(facts):
        return None
    return facts


def _hash_of(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()
