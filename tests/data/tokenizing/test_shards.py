"""A shard ends with the document that fills it, and is cut back to what a journal knows of it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from megaspeed.data.encode import Packed
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizing.shards import Shards, ShardWriter


def packed(*documents: int, tail: int = 0) -> Packed:
    """Documents of so many tokens, and the beginning of another one."""
    ends = np.cumsum(documents, dtype=np.int64)
    return Packed(np.arange(sum(documents) + tail, dtype="<u2"), ends)


def lengths(folder: Path) -> list[int]:
    return [path.stat().st_size // 2 for path in sorted(folder.glob("tokens-*.bin"))]


def test_a_shard_ends_with_the_document_that_fills_it(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "<u2", 10, Shards())
    writer.write(packed(4, 5, 1, 10, 12, 3))
    shards = writer.finish()
    assert lengths(tmp_path) == [10, 10, 12, 3]
    assert [shard.tokens for shard in shards.closed] == [10, 10, 12, 3]
    assert [shard.documents for shard in shards.closed] == [3, 1, 1, 1]
    assert (shards.tokens, shards.documents) == (35, 6)
    for shard in shards.closed:
        content = (tmp_path / shard.file).read_bytes()
        assert shard.checksum == hashlib.sha256(content).hexdigest()


def test_how_the_ids_come_makes_no_difference(tmp_path: Path) -> None:
    (tmp_path / "at once").mkdir()
    at_once = ShardWriter(tmp_path / "at once", "<u2", 10, Shards())
    at_once.write(packed(25, 3, 3, 3, 3))
    bit_by_bit = ShardWriter(tmp_path, "<u2", 10, Shards())
    whole = packed(25, 3, 3, 3, 3)
    for start in range(0, 37, 5):
        stop = start + 5
        ends = whole.document_ends
        inside = ends[(ends > start) & (ends <= stop)] - start
        bit_by_bit.write(Packed(whole.ids[start:stop], inside))
    assert bit_by_bit.finish() == at_once.finish()
    assert lengths(tmp_path) == [25, 12]


def test_a_document_longer_than_a_shard_is_not_cut(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "<u2", 10, Shards())
    for _ in range(5):
        writer.write(packed(tail=7))
    writer.write(packed(1))
    assert [shard.tokens for shard in writer.finish().closed] == [36]


def test_work_that_was_cut_off_goes_on_from_what_was_written_down(tmp_path: Path) -> None:
    """Between the journal and the kill a shard was filled and two more begun."""
    whole = tmp_path / "whole"
    whole.mkdir()
    uninterrupted = ShardWriter(whole, "<u2", 10, Shards())
    uninterrupted.write(packed(11, 4))
    killed = ShardWriter(tmp_path, "<u2", 10, Shards())
    killed.write(packed(11, 4))
    written = killed.written
    killed.write(packed(9, 30, 2))
    killed.flush()
    assert lengths(tmp_path) == [11, 13, 30, 2]

    again = ShardWriter(tmp_path, "<u2", 10, written)
    assert lengths(tmp_path) == [11, 4]
    for writer in (again, uninterrupted):
        writer.write(packed(2, 5))
    assert again.finish() == uninterrupted.finish()
    assert lengths(tmp_path) == [11, 11]


def test_a_shard_shorter_than_the_journal_says_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "<u2", 10, Shards())
    writer.write(packed(12, 5))
    writer.flush()
    (tmp_path / "tokens-00000.bin").write_bytes(b"123")
    with pytest.raises(
        DataError, match=r"tokens-00000\.bin has 3 bytes where .* says 24; .*--fresh"
    ):
        ShardWriter(tmp_path, "<u2", 10, writer.written)


def test_where_nothing_is_written_there_is_no_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "<u4", 10, Shards())
    writer.write(packed())
    assert writer.finish() == Shards()
    assert lengths(tmp_path) == []
