"""Everything that grows while text is tokenized, kept in step by one journal.

append   ids, lines of documents; bad records as they come   again and again
save     all of them flushed to the disk, then the journal   every few seconds
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.text.pieces import OnBad
from megaspeed.data.tokenizing.batches import Reached
from megaspeed.data.tokenizing.growing_file import GrowingFile
from megaspeed.data.tokenizing.journal import Journal
from megaspeed.data.tokenizing.passed_over import PassedOverLines
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
    """The files of ids and of lines in a folder.

    Attributes:
        passed_over: takes the bad records.
    """

    def __init__(
        self, folder: Path, dtype: IdType, shard_tokens: int, journal: Journal, tell: OnBad
    ) -> None:
        """Cuts the files back to what the journal says. `tell` is told of every bad record.

        Raises:
            DataError: a file holds less than that.
        """
        self._folder = folder
        self._journal = journal
        self._shards = ShardWriter(folder, dtype, shard_tokens, journal.shards)
        self._documents = GrowingFile(folder / DOCUMENTS, journal.documents_bytes)
        self.passed_over = PassedOverLines(folder / SKIPPED, journal.passed_over, tell)
        self._files = (self._shards, self._documents, self.passed_over)

    @property
    def standing(self) -> Standing:
        """What was appended, on the disk or not."""
        now = self._journal
        return Standing(
            now.shards.tokens, now.shards.documents, now.passed_over.records, now.read_bytes
        )

    @property
    def largest_id(self) -> int:
        """The largest id that was appended."""
        return self._journal.largest_id

    def append(self, packed: Packed, reached: Reached) -> None:
        """The ids of the next batch, and the lines that come with them."""
        assert len(packed.document_ends) == len(reached.documents)
        self._shards.write(packed)
        for document in reached.documents:
            self._documents.append(document)
        self._journal = Journal(
            position=reached.position,
            shards=self._shards.written,
            largest_id=max(self.largest_id, int(packed.ids.max(initial=0))),
            passed_over=reached.passed_over,
            documents_bytes=self._documents.size_bytes,
            read_bytes=reached.read_bytes,
        )

    def save(self) -> None:
        """Work that is cut off from here on goes on behind the last batch before here."""
        for file in self._files:
            file.flush()
        flush_folder(self._folder)
        write_record(self._folder / JOURNAL, self._journal)

    def finish(self) -> tuple[Shards, str]:
        """(the shards, all of them closed; sha256 over the lines of documents)."""
        self.passed_over.flush()
        return self._shards.finish(), self._documents.hexdigest()

    def close(self) -> None:
        """Closes the files, each of them even where another one cannot be written."""
        with ExitStack() as files:
            for file in self._files:
                files.callback(file.close)
