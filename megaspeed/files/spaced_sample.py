"""A bounded hash of a file of any size: of stretches from its first byte to its last.

file      ##----##----##----##        # hashed, - not read
"""

import hashlib
from pathlib import Path


def spaced_sample(path: Path, stretches: int, stretch_bytes: int) -> str:
    """sha256 over evenly spaced stretches, the first and the last bytes among them.

    In a short file they overlap. The file's size does not enter.

    Args:
        path: the file.
        stretches: how many, at least 2.
        stretch_bytes: of each.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    last = max(0, path.stat().st_size - stretch_bytes)
    with path.open("rb") as stream:
        for stretch in range(stretches):
            stream.seek(last * stretch // (stretches - 1))
            digest.update(stream.read(stretch_bytes))
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Of the whole file, in hexadecimal, in constant memory.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
