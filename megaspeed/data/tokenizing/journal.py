"""How far tokenizing has come: a small sealed file that is replaced every few seconds.

    ids and ledgers flushed to the disk  ->  journal written  ->  more ids  ->  ...

What the journal says is therefore always on the disk. What lies beyond it is cut off when work
goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaspeed.data.tokenizing.batches import BEGINNING, Position
from megaspeed.data.tokenizing.shards import Shards


@dataclass(frozen=True)
class Journal:
    """What is done.

    Attributes:
        position: in the input; every document before it is done, and none behind it.
        shards: what is written.
        largest_id: that occurs.
        skipped: bad records that were passed over.
        skipped_bytes: of the ledger of these.
        documents_bytes: of the ledger of documents.
        read_bytes: of the input, for progress.
    """

    position: Position
    shards: Shards
    largest_id: int
    skipped: int
    skipped_bytes: int
    documents_bytes: int
    read_bytes: int


NOTHING_DONE = Journal(
    position=BEGINNING,
    shards=Shards(),
    largest_id=0,
    skipped=0,
    skipped_bytes=0,
    documents_bytes=0,
    read_bytes=0,
)
