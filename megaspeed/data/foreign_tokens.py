"""Token files of other programs: nanoGPT's and Megatron-LM's.

nanoGPT (data/openwebtext/prepare.py): 16-bit ids and nothing else, little-endian.

    train.bin   id id id id ...

Megatron-LM (megatron/core/datasets/indexed_dataset.py): NAME.bin has the ids, and NAME.idx has the
positions of the documents. All numbers are little-endian.

    NAME.idx    "MMIDIDX\\0\\0"  version 1 (u64)  dtype code (u8)  sequences n (u64)  bounds d (u64)
                lengths    n x i32    ids of each sequence
                pointers   n x i64    byte in NAME.bin at which each begins
                bounds     d x i64    document k is sequences bounds[k] ... bounds[k + 1] - 1

Neither format states the tokenizer, the largest id or the id that ends a document. One pass over
the ids finds the last two, once on each machine.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.cache import Cache, remembered
from megaspeed.data.errors import DataError
from megaspeed.data.token_file import TokenDtype, TokenFile, TokenIndex

_NANOGPT_DTYPE: Final = "<u2"
# llm.c's files have the same suffix and begin with 256 32-bit numbers, of which this is the first.
_LLM_C_MAGIC = (20240520, 20240801)
_LOOKED_AT_IDS = 1 << 16
_FEWEST_IDS = 64  # fewer may look like 32-bit ids by chance

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, TokenDtype] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_CHECKED_AT_ONCE = 1 << 20

# Part of every key of a survey. Increment it if the code changes so that surveys differ.
_SURVEY_FORMAT = 1
_READ_AT_ONCE_TOKENS = 1 << 22


@dataclass(frozen=True)
class Survey:
    """The results of one pass over all ids.

    Attributes:
        fingerprint: sha256 over the dtype and every byte.
        largest_id: the largest id.
        end_of_text: the id that ends each document and occurs nowhere else, if there are at least
            two documents; None if there is no such id, or if the ends of documents are unknown.
    """

    fingerprint: str
    largest_id: int
    end_of_text: int | None


def why_not_16_bit(path: Path, vocab_size: int) -> str | None:
    """A problem if the first ids of a nanoGPT file seem to have 32 bits; None if they do not.

    In a file of 32-bit ids, every second 16-bit number is the upper half of an id. It is 0 if the
    vocabulary is at most 65,536, and a small number if it is larger. 16-bit ids do not look like
    this.
    """
    ids = np.fromfile(path, dtype=_NANOGPT_DTYPE, count=_LOOKED_AT_IDS)
    lower, upper = ids[0::2], ids[1::2]
    largest_upper = (vocab_size - 1) >> 16
    if len(ids) < _FEWEST_IDS or upper.max() > largest_upper or lower.max() <= largest_upper:
        return None
    return (
        f"a .bin without an index holds 16-bit ids, and every second one of {path} is at most "
        f"{largest_upper}, as in a file of 32-bit ids for model.vocab_size {vocab_size}; write it "
        "as uint16 if all ids are below 65,536, or tokenize the text with `megaspeed tokenize`"
    )


def open_nanogpt(path: Path, cache: Cache) -> TokenFile:
    """Opens a file of 16-bit ids.

    Raises:
        DataError: it is empty, has half an id at its end, or has the header of another format.
    """
    size = path.stat().st_size
    itemsize = np.dtype(_NANOGPT_DTYPE).itemsize
    if size == 0 or size % itemsize:
        raise DataError(
            f"a .bin without an index holds a number of complete 16-bit ids, and {path} has {size} "
            "bytes; it was truncated or has another format: copy it again, or tokenize again"
        )
    with path.open("rb") as stream:
        magic = int.from_bytes(stream.read(4), "little")
    if magic in _LLM_C_MAGIC:
        raise DataError(
            f"a .bin without an index holds ids and no header, and {path} begins with llm.c's "
            f"({magic}); write its ids without the first 1024 bytes into a .bin"
        )
    ids = np.memmap(path, dtype=_NANOGPT_DTYPE, mode="r", shape=(size // itemsize,))
    found = _surveyed(cache, [path], lambda: _survey_ids(path, ids))
    return TokenFile(path, _index(found, len(ids), None, _NANOGPT_DTYPE))


def open_megatron(prefix: Path, cache: Cache) -> TokenFile:
    """Opens a pair of .bin and .idx as one token file.

    Args:
        prefix: NAME, without .bin or .idx.
        cache: stores what the pass over the ids found.

    Raises:
        DataError: a file is missing, has another format or does not match the other one.
    """
    index = MegatronIndex.read(prefix)
    found = _surveyed(cache, [index.ids_path, index.path], index.survey)
    facts = _index(found, index.tokens, index.documents, index.dtype)
    return TokenFile(index.ids_path, facts, megatron_index=index.path)


def _surveyed(cache: Cache, files: Sequence[Path], survey: Callable[[], Survey]) -> Survey:
    purpose = "for its largest id and its checksum"
    facts = remembered(cache, "surveys", _SURVEY_FORMAT, files, lambda: asdict(survey()), purpose)
    return Survey(**facts)


def _index(found: Survey, tokens: int, documents: int | None, dtype: TokenDtype) -> TokenIndex:
    return TokenIndex(
        tokens=tokens,
        documents=documents,
        dtype=dtype,
        largest_id=found.largest_id,
        vocab_size=None,
        end_of_text=found.end_of_text,
        tokenizer_fingerprint=None,
        corpus_fingerprint=found.fingerprint,
    )


def with_suffix(prefix: Path, suffix: str) -> Path:
    """NAME + suffix, also if NAME has dots."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class MegatronIndex:
    """A .idx file. Its size and the size of its .bin have been checked.

    Attributes:
        path: the .idx.
        ids_path: the .bin.
        dtype: of the ids.
        sequences, bounds: the number of sequences and of document bounds.
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
            DataError: a file is missing, has another format or does not match the other one.
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
        """Number of ids in the .bin, from the pointer and the length of the last sequence."""
        return int(self.pointers[-1]) // self._itemsize + int(self.lengths[-1])

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
        """First sequence of each document, then the number of sequences; mapped."""
        return self._mapped("<i8", self.bounds, 12 * self.sequences)

    def document_ends(self, documents: slice) -> NDArray[np.int64]:
        """For each of these documents, the number of ids up to its end."""
        following = self.document_bounds[1:][documents]
        ends = np.full(len(following), self.tokens, dtype=np.int64)
        inside = following < self.sequences
        ends[inside] = self.pointers[following[inside]] // self._itemsize
        return ends

    def document_end_near(self, token: int) -> int | None:
        """The first end of a document at or after `token`; if there is none, the last before it.

        The result is never 0 or the end of the file. It is None if the file is one document.
        """
        at = bisect_left(range(self.documents), token, key=self._end_of)
        for document in (at, at - 1):
            if 0 <= document < self.documents and 0 < self._end_of(document) < self.tokens:
                return self._end_of(document)
        return None

    def survey(self) -> Survey:
        """Reads both files completely.

        Raises:
            DataError: sequences are not consecutive, documents are not in order, or an id is
                negative.
        """
        self._check_pointers()
        self._check_bounds()
        ids = np.memmap(self.ids_path, dtype=self.dtype, mode="r", shape=(self.tokens,))
        return _survey_ids(self.ids_path, ids, self._ends_of_documents_with_ids())

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
        size = self.path.stat().st_size
        expected = _HEADER.size + 12 * self.sequences + 8 * self.bounds
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
                f"{self.ids_path} must have the {expected} bytes that {self.path} states, and "
                f"has {size}; copy both again"
            )

    def _check_pointers(self) -> None:
        expected = 0
        for start in range(0, self.sequences, _CHECKED_AT_ONCE):
            part = slice(start, start + _CHECKED_AT_ONCE)
            ends = expected + np.cumsum(self.lengths[part], dtype=np.int64) * self._itemsize
            begins = np.append(expected, ends[:-1])
            wrong = np.flatnonzero(self.pointers[part] != begins)
            if len(wrong):
                first = int(wrong[0])
                raise DataError(
                    f"sequences must be consecutive, but in {self.path} sequence {start + first} "
                    f"begins at byte {int(self.pointers[start + first])} instead of "
                    f"{int(begins[first])}; write the dataset again with Megatron's builder"
                )
            expected = int(ends[-1])

    def _check_bounds(self) -> None:
        bounds = self.document_bounds
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != self.sequences:
            raise DataError(
                f"documents must hold all {self.sequences} sequences, but in {self.path} they "
                f"hold {bounds[:1].tolist()} to {bounds[-1:].tolist()}; write the dataset again"
            )
        for start in range(0, len(bounds), _CHECKED_AT_ONCE):
            falls = np.flatnonzero(np.diff(bounds[start : start + _CHECKED_AT_ONCE + 1]) < 0)
            if len(falls):
                raise DataError(
                    f"documents must be in order, but in {self.path} document "
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


def _survey_ids(
    path: Path, ids: NDArray[np.integer], document_ends: Iterable[NDArray[np.int64]] = ()
) -> Survey:
    """Reads every id, in constant memory.

    Args:
        path: the file, for messages.
        ids: mapped, shape (tokens,).
        document_ends: in blocks, the number of ids up to the end of each document that has ids;
            empty if the ends are unknown.

    Raises:
        DataError: an id is negative (file, token, byte).
    """
    documents, last_id = _common_last_id(ids, document_ends)
    digest = hashlib.sha256(ids.dtype.str.encode())
    largest_id, occurrences = 0, 0
    for start in range(0, len(ids), _READ_AT_ONCE_TOKENS):
        block = np.asarray(ids[start : start + _READ_AT_ONCE_TOKENS])
        if int(block.min()) < 0:
            position = int(np.flatnonzero(block < 0)[0])
            raise DataError(
                f"a token id is at least 0, and {path} has {int(block[position])} at token "
                f"{start + position} (byte {(start + position) * block.itemsize}); it has another "
                "format or is damaged: tokenize again"
            )
        digest.update(block.tobytes())
        largest_id = max(largest_id, int(block.max()))
        occurrences += int(np.count_nonzero(block == last_id)) if last_id is not None else 0
    # The last id of a single document may be any id.
    end_of_text = last_id if occurrences == documents > 1 else None
    return Survey(digest.hexdigest(), largest_id, end_of_text)


def _common_last_id(
    ids: NDArray[np.integer], document_ends: Iterable[NDArray[np.int64]]
) -> tuple[int, int | None]:
    """(number of documents, the id with which all of them end, or None)."""
    documents, last_id = 0, None
    for ends in document_ends:
        last_ids = ids[ends - 1]
        last_id = int(last_ids[0]) if documents == 0 else last_id
        documents += len(ends)
        if not np.all(last_ids == last_id):
            return documents, None
    return documents, last_id
