"""A sample sees the ends of a file and what is between, and hashes what it says it hashes."""

import hashlib
from pathlib import Path

import pytest

from megaspeed.files.spaced_sample import sha256_of, spaced_sample


@pytest.mark.parametrize(("size", "starts"), [(100, (0, 45, 90)), (12, (0, 1, 2)), (5, (0, 0, 0))])
def test_a_sample_is_evenly_spaced(tmp_path: Path, size: int, starts: tuple[int, ...]) -> None:
    content = bytes(range(size))
    (tmp_path / "a").write_bytes(content)
    expected = b"".join(content[start : start + 10] for start in starts)
    assert spaced_sample(tmp_path / "a", 3, 10) == hashlib.sha256(expected).hexdigest()
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()
