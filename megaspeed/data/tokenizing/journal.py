"""How far tokenizing has come: a small sealed file that is replaced every few seconds.

    ids and lines flushed to the disk  ->  journal written  ->  more ids  ->  ...

What the journal says is therefore always on the disk. What lies beyond it is cut off when work
goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaspeed.data.tokenizing.batches import BEGINNING, Position
from megaspeed.data.tokenizing.passed_over import PassedOver
from megaspeed.data.tokenizing.shards import Shards


@dataclass(frozen=True)
class Journal:
    """What is done.

    Attributes:
        position: in the input; every piece of text before it is done, and none behind it.
        shards: what is written.
        largest_id: that occurs.
        passed_over: bad records.
        documents_bytes: of the lines of documents.
        read_bytes: of the input, for progress.
    """

    position: Position
    shards: Shards
    largest_id: int
    passed_over: PassedOver
    documents_bytes: int
    read_bytes: int


NOTHING_DONE = Journal(
    position=BEGINNING,
    shards=Shards(),
    largest_id=0,
    passed_over=PassedOver(),
    documents_bytes=0,
    read_bytes=0,
)
