"""A stream that is tokenized in shards while a run trains on the shards that exist.

    stream    row 0 . row 1 . row 2 . row 3 . row 4 . row 5 . row 6 ...
    ids       ------------- shard 0 | ------------- shard 1 | ...     cut at an exact number of ids
    disk      CACHE/streams/KEY/00000.bin, 00000.json ...             complete or absent

So it is known which shard a sample needs before the shard exists. A process that needs a shard
waits until another process has made it. If no process makes shards, it makes the shard itself. A
.json file has the checksum of its shard, and the place in the stream where the next shard begins.

KEY is a hash of all that determines the ids, including versions of libraries. Fingerprints contain
the checksum of the first shard instead of versions.
"""

import hashlib
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaspeed.config.run import Source
from megaspeed.data.cache import Cache, cache_key
from megaspeed.data.errors import DataError
from megaspeed.data.formats import NamedDataset
from megaspeed.data.pieces import CUT_RULE
from megaspeed.data.sources import files_of
from megaspeed.data.token_file import TokenFile, TokenIndex, id_type
from megaspeed.data.tokenizer import encode, load_tokenizer
from megaspeed.files.durable import Locked, lock, write_bytes
from megaspeed.files.json_values import Facts, hash_of, read_sealed, write_sealed
from megaspeed.files.paths import sha256_of

_FORMAT = 1  # increment it if the same stream gives other shards
_PERIOD_SECONDS = 0.2


@dataclass(frozen=True)
class TokenStream:
    """A stream and the folder of its shards. It is small and can be pickled."""

    source: Source  # a dataset with ``tokens``
    tokenizer: Path  # the tokenizer's folder
    folder: Path  # where the shards are
    reports_waits: bool  # whether this process reports on standard error that it waits for a shard

    @property
    def spans(self) -> list[range]:
        """The tokens of each shard, by their number in the stream."""
        tokens, size = self.source.tokens or 0, self.source.shard_tokens
        return [range(first, min(first + size, tokens)) for first in range(0, tokens, size)]

    def path(self, shard: int) -> Path:
        """Return the path of a shard, which need not exist."""
        return self.folder / f"{shard:05}.bin"

    def is_missing(self, shard: int) -> bool:
        """Return whether a shard is not complete."""
        return not (self.path(shard).exists() and self._record(shard))

    def arrive(self, shard: int) -> str:
        """Return the sha256 of a shard. If the shard is missing or damaged, wait or make it."""
        self.report_wait(shard)
        while self.is_missing(shard):
            try:
                self.make(shard + 1)
            except Locked:
                time.sleep(_PERIOD_SECONDS)
        found = sha256_of(self.path(shard))
        if found != self._record(shard)["sha256"]:
            self.path(shard).unlink(missing_ok=True)
            return self.arrive(shard)
        return found

    def report_wait(self, shard: int) -> None:
        """Report that this process waits for a shard, if it is missing."""
        if self.reports_waits and self.is_missing(shard):
            which = f"shard {shard + 1} of {len(self.spans)} of {self.source}"
            sys.stderr.write(f"waiting for tokens: {which} is not complete yet\n")

    def make(self, stop: int | None = None, wait_seconds: float = 0.0) -> None:
        """Make the missing shards before number ``stop``; all if it is omitted.

        Raises:
            Locked: another process makes shards for ``wait_seconds``.
            DataError: the stream has too few tokens or a bad record, or cannot be read.
        """
        with lock(self.folder / "write.lock", wait_seconds=wait_seconds):
            wanted = range(len(self.spans))[:stop]
            first = next(filter(self.is_missing, wanted), None)
            if first is not None:
                self._encode(wanted[first:], self._record(first - 1)["next"] if first else {})

    def _encode(self, shards: range, place: Facts) -> None:
        """Write these shards. Read from ``place``, which is in or before the first of them."""
        (file,), tokenizer = files_of(self.source, []), load_tokenizer(str(self.tokenizer))
        assert isinstance(file.format, NamedDataset)
        spans, first = self.spans, place.get("token", 0)
        token = first
        held: list[NDArray[np.unsignedinteger]] = []  # the ids from number ``first`` on
        for rows, pieces in file.format.batches(file.path, place.get("rows", {})):
            place = {"token": token, "rows": rows}
            held.extend(packed.ids for packed in encode(pieces, tokenizer))
            token = first + sum(map(len, held))
            while token >= (span := spans[shards[0]]).stop:
                ids = np.concatenate(held)
                content = ids[span.start - first : span.stop - first].data
                write_bytes(self.path(shards[0]), content)
                facts = {"sha256": hashlib.sha256(content).hexdigest(), "next": place}
                write_sealed(self.path(shards[0]).with_suffix(".json"), facts)
                held, first, shards = [ids[span.stop - first :]], span.stop, shards[1:]
                if not shards:
                    return
        raise DataError(
            f"data.train: tokens must be at most what the stream has, but {file.name} has "
            f'{token:,} of {self.source.tokens:,}; write "tokens": {token}'
        )

    def _record(self, shard: int) -> Facts:
        return read_sealed(self.path(shard).with_suffix(".json")) or {}


@dataclass(frozen=True)
class StreamShard(TokenFile):
    """A shard of a stream, or a part of one, which need not exist."""

    stream: TokenStream = field(kw_only=True)
    number: int = field(kw_only=True)  # of the shard, from 0

    @property
    def is_missing(self) -> bool:
        return self.stream.is_missing(self.number)

    def map(self) -> NDArray[np.integer]:
        """Return the ids. If the shard is missing, wait for it, or make it."""
        self.stream.arrive(self.number)
        return super().map()


def open_stream(source: Source, tokenizer: Path | None, cache: Cache) -> tuple[StreamShard, ...]:
    """Return the shards of a dataset with ``tokens``, in order. Make the first one if needed.

    Raises DataError if the first shard cannot be made.
    """
    assert tokenizer is not None, "a rule refuses a stream without a tokenizer"
    made_with, (file,) = load_tokenizer(str(tokenizer)), files_of(source, [])
    identity = [_FORMAT, file.name, source.text_field, source.tokens, made_with.identity, CUT_RULE]
    key = cache_key(identity, version("tokenizers"), version("datasets"))
    stream = TokenStream(source, tokenizer, cache.root / "streams" / key, cache.reports_waits)
    identity.append(stream.arrive(0))
    size = made_with.vocab_size
    known = (None, id_type(size), size - 1, made_with.end_of_text, made_with.fingerprint)
    return tuple(
        StreamShard(
            stream.path(number),
            TokenIndex(len(span), *known, corpus_fingerprint=hash_of([*identity, number])),
            stream=stream,
            number=number,
        )
        for number, span in enumerate(stream.spans)
    )
