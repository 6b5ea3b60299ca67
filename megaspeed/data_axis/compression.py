"""What of a compressed bucket is sent together.

int8        columns of a matrix that has a row for each sender
powersgd    a matrix of a parameter, or the complete rows of it that a replica holds
"""

from collections.abc import Iterator
from typing import NamedTuple

from megaspeed.config.resolve import Run
from megaspeed.data_axis.buckets import Bucket, OwnedRange, bucket_elements, within_a_bucket


class Int8Part(NamedTuple):
    """Columns that are compressed and sent at a time."""

    start: int  # first of them
    columns: int
    parameters: range | None = None  # of the bucket, if each of them is a matrix of its own


def int8_parts(run: Run, bucket: Bucket) -> Iterator[Int8Part]:
    """Yield the parts of a bucket of a run that compresses to int8.

    Together they have about ``reduce_bucket_size`` elements. If a rank owns a part of each
    parameter, as at ZeRO-3, each parameter is a matrix. A replica compresses its partition.
    """
    assert run.compression is not None and run.compression.type == "int8"
    rows, block, most = run.grid.senders, run.compression.block, bucket_elements(run)
    if bucket.layout == "rows" and run.grid.replicate == 1:
        for one in within_a_bucket(run, bucket.sizes, most, bucket.shards):
            columns = sum(bucket.sizes[one.start : one.stop]) // rows
            yield Int8Part(bucket.starts[one.start] // rows, columns, one)
        return
    every, together = -(-bucket.elements // run.grid.dp_cp), max(1, most // rows // block) * block
    for start in range(0, every, together):
        yield Int8Part(start, min(together, every - start))


def powersgd_matrix(own: OwnedRange, rank: int) -> tuple[int, int, int]:
    """Return (elements before it, rows, columns) of the complete rows in a range of a matrix.

    There are 0 rows if the two factors would have as many elements: rank x (rows + columns).
    """
    columns = own.parameter.shape[1]
    before = -own.start % columns  # elements of a row that begins on another rank
    rows = max(0, own.length - before) // columns
    return (before, rows, columns) if rank * (rows + columns) < rows * columns else (0, 0, columns)
