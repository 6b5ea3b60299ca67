"""The index of Megatron-LM's datasets: where in NAME.bin sequences and documents lie.

    NAME.idx    "MMIDIDX\\0\\0"  version 1 (u64)  dtype code (u8)  sequences n (u64)  bounds d (u64)
                lengths    n x i32    ids of each sequence
                pointers   n x i64    byte in NAME.bin at which each begins
                bounds     d x i64    document k is sequences bounds[k] ... bounds[k + 1] - 1

All numbers are little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py). What an
index says is checked as it is opened where that takes no pass over it, the rest in a survey.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.errors import DataError
from megaspeed.data.tokens.survey import Survey, survey_ids
from megaspeed.data.tokens.token_file import TokenDtype

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, TokenDtype] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_CHECKED_AT_ONCE = 1 << 20


def with_suffix(prefix: Path, suffix: str) -> Path:
    """NAME + suffix, also where NAME has dots of its own."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class MegatronIndex:
    """A .idx whose sizes fit those of its .bin.

    Attributes:
        path: the .idx.
        ids_path: the .bin.
        dtype: of the ids.
        sequences, bounds: how many of each the .idx has.
    """

    path: Path
    ids_path: Path
    dtype: TokenDtype
    sequences: int
    bounds: int

    @classmethod
    def read(cls, prefix: Path) -> MegatronIndex:
        """Reads the header and checks both sizes.

        Raises:
            DataError: a file is missing, is of another format or does not fit the other one.
        """
        path, ids_path = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
        for file, other in ((path, ids_path), (ids_path, path)):
            if not file.is_file():
                raise DataError(
                    f"an indexed dataset is a .bin and a .idx, and beside {other} there is no "
                    f"{file}; copy both"
                )
        with path.open("rb") as stream:
            dtype, sequences, bounds = _parse(path, stream.read(_HEADER.size))
        index = cls(path, ids_path, dtype, sequences, bounds)
        index._check_sizes()
        return index

    @property
    def documents(self) -> int:
        return self.bounds - 1

    @cached_property
    def tokens(self) -> int:
        """Ids in the .bin, by the last sequence's pointer and length."""
        end_byte = int(self.pointers[-1]) + int(self.lengths[-1]) * self._itemsize
        return end_byte // self._itemsize

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Ids of each sequence, mapped."""
        return self._mapped("<i4", self.sequences, 0)

    @property
    def pointers(self) -> NDArray[np.int64]:
        """First byte of each sequence, mapped."""
        return self._mapped("<i8", self.sequences, 4 * self.sequences)

    @property
    def document_bounds(self) -> NDArray[np.int64]:
        """First sequence of each document, and behind them the number of sequences; mapped."""
        return self._mapped("<i8", self.bounds, 12 * self.sequences)

    def document_ends(self, documents: slice) -> NDArray[np.int64]:
        """How many ids lie before the end of each of some documents."""
        following = self.document_bounds[1:][documents]
        ends = np.full(len(following), self.tokens, dtype=np.int64)
        inside = following < self.sequences
        ends[inside] = self.pointers[following[inside]] // self._itemsize
        return ends

    def document_end_near(self, token: int) -> int | None:
        """The end of a document nearest above or at `token`, else below it; never 0 or the file's.

        None where the whole file is one document.
        """
        at = bisect_left(range(self.documents), token, key=self._end_of)
        for document in (at, at - 1):
            if 0 <= document < self.documents and 0 < self._end_of(document) < self.tokens:
                return self._end_of(document)
        return None

    def survey(self) -> Survey:
        """Passes over both files.

        Raises:
            DataError: sequences do not lie end to end, documents are not in order, or an id is
                negative.
        """
        self._check_pointers()
        self._check_bounds()
        ids = np.memmap(self.ids_path, dtype=self.dtype, mode="r", shape=(self.tokens,))
        return survey_ids(self.ids_path, ids, self._ends_of_documents_with_ids())

    def _ends_of_documents_with_ids(self) -> Iterator[NDArray[np.int64]]:
        before = 0
        for start in range(0, self.documents, _CHECKED_AT_ONCE):
            ends = self.document_ends(slice(start, start + _CHECKED_AT_ONCE))
            with_ids = ends[np.diff(ends, prepend=before) > 0]
            before = int(ends[-1])
            if len(with_ids):
                yield with_ids

    def _end_of(self, document: int) -> int:
        return int(self.document_ends(slice(document, document + 1))[0])

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def _mapped(self, dtype: str, count: int, offset: int) -> NDArray[Any]:
        return np.memmap(
            self.path, dtype=dtype, mode="r", offset=_HEADER.size + offset, shape=(count,)
        )

    def _check_sizes(self) -> None:
        size, expected = self.path.stat().st_size, _HEADER.size + 12 * self.sequences
        expected += 8 * self.bounds
        if size == expected + self.sequences:
            raise DataError(
                f"a text dataset has no modes, and {self.path} has one for each of its "
                f"{self.sequences} sequences; multimodal data cannot be trained on"
            )
        if size != expected:
            raise DataError(
                f"{self.path} must have {expected} bytes for its {self.sequences} sequences and "
                f"{self.bounds} document bounds, and has {size}; copy it again"
            )
        if self.sequences == 0 or self.tokens == 0:
            raise DataError(f"{self.path} has no tokens; name a dataset with text")
        size, expected = self.ids_path.stat().st_size, self.tokens * self._itemsize
        if size != expected:
            raise DataError(
                f"{self.ids_path} must have the {expected} bytes that {self.path} tells of, and "
                f"has {size}; copy both again"
            )

    def _check_pointers(self) -> None:
        expected = 0
        for start in range(0, self.sequences, _CHECKED_AT_ONCE):
            stretch = slice(start, start + _CHECKED_AT_ONCE)
            ends = expected + np.cumsum(self.lengths[stretch], dtype=np.int64) * self._itemsize
            begins = np.append(expected, ends[:-1])
            wrong = np.flatnonzero(self.pointers[stretch] != begins)
            if len(wrong):
                first = int(wrong[0])
                raise DataError(
                    f"sequences must lie end to end, and by {self.path} sequence {start + first} "
                    f"begins at byte {int(self.pointers[start + first])} instead of "
                    f"{int(begins[first])}; write the dataset again with Megatron's builder"
                )
            expected = int(ends[-1])

    def _check_bounds(self) -> None:
        bounds = self.document_bounds
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != self.sequences:
            raise DataError(
                f"documents must hold all {self.sequences} sequences, and by {self.path} they "
                f"hold {bounds[:1].tolist()} to {bounds[-1:].tolist()}; write the dataset again"
            )
        for start in range(0, len(bounds), _CHECKED_AT_ONCE):
            falls = np.flatnonzero(np.diff(bounds[start : start + _CHECKED_AT_ONCE + 1]) < 0)
            if len(falls):
                raise DataError(
                    f"documents must be in order, and by {self.path} document "
                    f"{start + int(falls[0])} ends before it begins; write the dataset again"
                )


def _parse(path: Path, header: bytes) -> tuple[TokenDtype, int, int]:
    """(dtype of the ids, sequences, document bounds)."""
    if header[: len(_MAGIC)] != _MAGIC:
        raise DataError(
            f"an indexed dataset's .idx begins with {_MAGIC!r}, and {path} with "
            f"{header[: len(_MAGIC)]!r}; make the dataset with --dataset-impl mmap"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"a .idx has a header of {_HEADER.size} bytes, and {path} has {len(header)} bytes in "
            "all; copy it again"
        )
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"a .idx of version {_VERSION} can be read, and {path} has {version}")
    if code not in _DTYPES:
        name = _FLOATS.get(code, f"unknown (code {code})")
        raise DataError(
            f"token ids are integers, and by {path} the dtype of its .bin is {name}; "
            "name a dataset of token ids"
        )
    return _DTYPES[code], sequences, bounds
