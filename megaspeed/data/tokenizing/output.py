"""Everything that grows while text is tokenized, kept in step by one journal.

append   ids, lines of documents, lines of bad records       again and again
save     all of them flushed to the disk, then the journal   every few seconds
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.text.pieces import BadRecord
from megaspeed.data.tokenizing.batches import Reached
from megaspeed.data.tokenizing.journal import Journal
from megaspeed.data.tokenizing.ledger import Ledger
from megaspeed.data.tokenizing.sealed_record import write_record
from megaspeed.data.tokenizing.shards import Shards, ShardWriter
from megaspeed.data.tokens.packing import IdType, Packed
from megaspeed.files.durable import flush_folder

JOURNAL = "progress.json"
DOCUMENTS = "documents.jsonl"
SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class Standing:
    """How far the work has come.

    Attributes:
        tokens, documents: written.
        skipped: bad records that were passed over.
        read_bytes: of the input.
    """

    tokens: int
    documents: int
    skipped: int
    read_bytes: int


class Output:
    """The files of ids and of lines in a folder."""

    def __init__(self, folder: Path, dtype: IdType, shard_tokens: int, journal: Journal) -> None:
        """Cuts the files back to what the journal says.

        Raises:
            DataError: a file holds less than that.
        """
        self._folder = folder
        self._shards = ShardWriter(folder, dtype, shard_tokens, journal.shards)
        self._documents = Ledger(folder / DOCUMENTS, journal.documents_bytes)
        self._skipped = Ledger(folder / SKIPPED, journal.skipped_bytes)
        self._largest_id, self._skipped_records = journal.largest_id, journal.skipped
        self._read_bytes = journal.read_bytes
        self._journal = journal

    @property
    def standing(self) -> Standing:
        """What was appended, on the disk or not."""
        written = self._shards.written
        return Standing(written.tokens, written.documents, self._skipped_records, self._read_bytes)

    @property
    def largest_id(self) -> int:
        """The largest id that was appended."""
        return self._largest_id

    def append(self, packed: Packed, reached: Reached) -> None:
        """The ids of the next batch, and the lines that come with them."""
        assert len(packed.document_ends) == len(reached.documents)
        self._shards.write(packed)
        for document in reached.documents:
            self._documents.append(document)
        for record in reached.skipped:
            self._skipped.append(_line(record))
        self._largest_id = max(self._largest_id, int(packed.ids.max(initial=0)))
        self._skipped_records += len(reached.skipped)
        self._read_bytes = reached.read_bytes
        if reached.position is not None:
            self._journal = Journal(
                position=reached.position,
                shards=self._shards.written,
                largest_id=self._largest_id,
                skipped=self._skipped_records,
                skipped_bytes=self._skipped.size_bytes,
                documents_bytes=self._documents.size_bytes,
                read_bytes=self._read_bytes,
            )

    def save(self) -> None:
        """Work that is cut off from here on goes on behind the last document before here."""
        for file in (self._shards, self._documents, self._skipped):
            file.flush()
        flush_folder(self._folder)
        write_record(self._folder / JOURNAL, self._journal)

    def finish(self) -> tuple[Shards, str]:
        """(the shards, all of them closed; sha256 over the lines of documents)."""
        return self._shards.finish(), self._documents.hexdigest()

    def close(self) -> None:
        """Closes the files."""
        for file in (self._shards, self._documents, self._skipped):
            file.close()


def _line(record: BadRecord) -> bytes:
    facts = {"file": str(record.path), "where": record.where, "problem": record.problem}
    return json.dumps(facts).encode("utf-8") + b"\n"
