"""A sealed file is read only if it is unchanged."""

from pathlib import Path

import pytest

from megaspeed.files.json_values import Facts, read_sealed, write_sealed

FACTS: Facts = {"answer": 42, "names": ["a", "ä"], "inner": {"z": None, "b": 0.5}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sealed(tmp_path / "facts.json", FACTS)
    return tmp_path / "facts.json"


def test_facts_are_read_as_they_were_written(path: Path) -> None:
    assert read_sealed(path) == FACTS


def test_every_flipped_bit_of_a_fact_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (0x01, 0x08):
            damaged = bytearray(whole)
            damaged[position] ^= bit
            path.write_bytes(damaged)
            # JSON may have any white space between values. Nothing else may differ.
            assert read_sealed(path) in (None, FACTS)
    path.write_bytes(whole.replace(b"42", b"43"))
    assert read_sealed(path) is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"7", b"\xff", b"[" * 100_000], ids=lambda text: repr(text[:4])
)
def test_what_is_no_sealed_file_is_not_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert read_sealed(path) is None


def test_every_shorter_file_is_not_read(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_sealed(path) is None


def test_a_file_that_is_not_there_or_is_a_folder_is_not_read(tmp_path: Path) -> None:
    assert read_sealed(tmp_path / "nothing") is None
    assert read_sealed(tmp_path) is None
