"""Small JSON files with a hash of their own content, so that damage is detected.

    {"answer": 42, "index_hash": sha256 of {"answer": 42}}

The hash detects a file that was truncated, mixed or edited. It does not protect against a user who
computes the hash again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from megaspeed.files.durable import write_whole
from megaspeed.files.reading import read_whole

Facts = dict[str, Any]
"""The content of such a file: plain JSON values."""

_SEAL = "index_hash"


def write_sealed(path: Path, facts: Facts) -> None:
    """Writes ``facts`` and their hash. The file is complete or absent."""
    sealed = json.dumps(facts | {_SEAL: _hash_of(facts)}, indent=1).encode("utf-8")

    def fill(stream: BinaryIO) -> None:
        stream.write(sealed)

    write_whole(path, fill)


def read_sealed(path: Path) -> Facts | None:
    """The facts in the file at ``path``; None if it does not exist or its hash does not match."""
    try:
        return unsealed(read_whole(path))
    except OSError:
        return None


def unsealed(text: bytes) -> Facts | None:
    """The facts in the content of such a file; None if the hash does not match."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.pop(_SEAL, None) != _hash_of(facts):
        return None
    return facts


def _hash_of(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("utf-8")).hexdigest()
