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

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.cache import Cache, remembered
from megaspeed.data.errors import DataError
from megaspeed.data.token_file import TokenDtype, TokenFile, TokenIndex, in_blocks
from megaspeed.files.json_values import Facts

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


def why_not_16_bit(path: Path, vocab_size: int) -> str | None:
    """Return a problem if the first ids of a nanoGPT file seem to have 32 bits; otherwise None.

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
        f"a .bin without an index holds 16-bit ids, but every second one of {path} is at most "
        f"{largest_upper}, as in a file of 32-bit ids for model.vocab_size {vocab_size}; write it "
        "as uint16 if all ids are below 65,536, or tokenize the text with `megaspeed tokenize`"
    )


def open_nanogpt(path: Path, cache: Cache) -> TokenFile:
    """Open a file of 16-bit ids.

    Raises:
        DataError: it is empty, has half an id at its end, or has the header of another format.
    """
    size = path.stat().st_size
    itemsize = np.dtype(_NANOGPT_DTYPE).itemsize
    if size == 0 or size % itemsize:
        raise DataError(
            f"a .bin without an index holds a number of complete 16-bit ids, but {path} has {size} "
            "bytes; it was truncated or has another format: copy it again, or tokenize again"
        )
    with path.open("rb") as stream:
        magic = int.from_bytes(stream.read(4), "little")
    if magic in _LLM_C_MAGIC:
        raise DataError(
            f"a .bin without an index holds ids and no header, but {path} begins with llm.c's "
            f"({magic}); write its ids without the first 1024 bytes into a .bin"
        )
    ids = np.memmap(path, dtype=_NANOGPT_DTYPE, mode="r", shape=(size // itemsize,))
    found = _remembered(cache, [path], lambda: _read_ids(path, ids))
    return TokenFile(path, _index(found, len(ids), None, _NANOGPT_DTYPE))


def open_megatron(prefix: Path, cache: Cache) -> TokenFile:
    """Open a pair of .bin and .idx as one token file.

    Args:
        prefix: NAME, without .bin or .idx.
        cache: stores what the pass over the ids found.

    Raises:
        DataError: a file is missing, has another format or does not match the other one.
    """
    index = MegatronIndex.read(prefix)
    found = _remembered(cache, [index.ids_path, index.path], index.read_completely)
    facts = _index(found, index.tokens, index.documents, index.dtype)
    return TokenFile(index.ids_path, facts, megatron_index=index.path)


def _remembered(cache: Cache, files: Sequence[Path], read: Callable[[], Facts]) -> Facts:
    purpose = "for its largest id and its checksum"
    return remembered(cache, "surveys", files, read, purpose)


def _index(found: Facts, tokens: int, documents: int | None, dtype: TokenDtype) -> TokenIndex:
    return TokenIndex(
        tokens=tokens,
        documents=documents,
        dtype=dtype,
        largest_id=found["largest_id"],
        vocab_size=None,
        end_of_text=found["end_of_text"],
        tokenizer_fingerprint=None,
        corpus_fingerprint=found["fingerprint"],
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
        lengths: ids of each sequence, mapped.
        pointers: first byte of each sequence, mapped.
        bounds: first sequence of each document, then the number of sequences; mapped.
    """

    path: Path
    ids_path: Path
    dtype: TokenDtype
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def read(cls, prefix: Path) -> Self:
        """Read the header and check both sizes.

        Raises:
            DataError: a file is missing, has another format or does not match the other one.
        """
        path, ids_path = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
        for file, other in ((path, ids_path), (ids_path, path)):
            if not file.is_file():
                raise DataError(
                    f"an indexed dataset is a .bin and a .idx, but beside {other} there is no "
                    f"{file}; copy both"
                )
        with path.open("rb") as stream:
            dtype, sequences, bounds = _parse(path, stream.read(_HEADER.size))
        _check_index_size(path, sequences, bounds)
        empty = DataError(f"{path} has no tokens; name a dataset with text")
        if not sequences:
            raise empty
        mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=_HEADER.size)
        index = cls(
            path,
            ids_path,
            dtype,
            lengths=mapped[: 4 * sequences].view("<i4"),
            pointers=mapped[4 * sequences : 12 * sequences].view("<i8"),
            bounds=mapped[12 * sequences : 12 * sequences + 8 * bounds].view("<i8"),
        )
        size, expected = ids_path.stat().st_size, index.tokens * index._itemsize
        if not expected:
            raise empty
        if size != expected:
            raise DataError(
                f"{ids_path} must have the {expected} bytes that {path} states, but has {size}; "
                "copy both again"
            )
        return index

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def tokens(self) -> int:
        """Number of ids in the .bin, from the pointer and the length of the last sequence."""
        return int(self.pointers[-1]) // self._itemsize + int(self.lengths[-1])

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def document_ends(self, documents: slice) -> NDArray[np.int64]:
        """For each of these documents, the number of ids up to its end."""
        following = self.bounds[1:][documents]
        ends = np.full(len(following), self.tokens, dtype=np.int64)
        inside = following < len(self.lengths)
        ends[inside] = self.pointers[following[inside]] // self._itemsize
        return ends

    def document_end_from(self, token: int) -> int:
        """Return the first end of a document at or after ``token``, which is in the file."""

        def end_of(document: int) -> int:
            return int(self.document_ends(slice(document, document + 1))[0])

        return end_of(bisect_left(range(self.documents), token, key=end_of))

    def read_completely(self) -> Facts:
        """Read both files completely, and return what was found; see ``_read_ids``.

        Raises:
            DataError: sequences are not consecutive, documents are not in order, or an id is
                negative.
        """
        lengths = self.lengths.astype(np.int64) * self._itemsize
        starts = np.cumsum(lengths) - lengths
        moved = np.flatnonzero(self.pointers != starts)
        if len(moved):
            raise DataError(
                f"sequences must be consecutive, but in {self.path} sequence {moved[0]} begins at "
                f"byte {self.pointers[moved[0]]} instead of {starts[moved[0]]}; write the dataset "
                "again with Megatron's builder"
            )
        if self.documents < 1 or self.bounds[0] != 0 or self.bounds[-1] != len(lengths):
            raise DataError(
                f"documents must hold all {len(lengths)} sequences, but in {self.path} they hold "
                f"{self.bounds[:1].tolist()} to {self.bounds[-1:].tolist()}; write the dataset "
                "again"
            )
        falls = np.flatnonzero(np.diff(self.bounds) < 0)
        if len(falls):
            raise DataError(
                f"documents must be in order, but in {self.path} document {falls[0]} ends before "
                "it begins; write the dataset again"
            )
        ends = self.document_ends(slice(None))
        ids = np.memmap(self.ids_path, dtype=self.dtype, mode="r", shape=(self.tokens,))
        return _read_ids(self.ids_path, ids, ends[np.diff(ends, prepend=0) > 0])


def _check_index_size(path: Path, sequences: int, bounds: int) -> None:
    size = path.stat().st_size
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if size == expected + sequences > expected:
        raise DataError(
            f"a text dataset has no modes, but {path} has one for each of its {sequences} "
            "sequences; multimodal data cannot be trained on"
        )
    if size != expected:
        raise DataError(
            f"{path} must have {expected} bytes for its {sequences} sequences and {bounds} "
            f"document bounds, but has {size}; copy it again"
        )


def _parse(path: Path, header: bytes) -> tuple[TokenDtype, int, int]:
    """Return (dtype of the ids, sequences, document bounds)."""
    if header[: len(_MAGIC)] != _MAGIC:
        raise DataError(
            f"an indexed dataset's .idx begins with {_MAGIC!r}, but {path} with "
            f"{header[: len(_MAGIC)]!r}; make the dataset with --dataset-impl mmap"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"a .idx has a header of {_HEADER.size} bytes, but {path} has {len(header)} bytes in "
            "all; copy it again"
        )
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"a .idx of version {_VERSION} can be read, but {path} has {version}")
    if code not in _DTYPES:
        name = _FLOATS.get(code, f"unknown (code {code})")
        raise DataError(
            f"token ids are integers, but {path} states {name} as the dtype of its .bin; "
            "name a dataset of token ids"
        )
    return _DTYPES[code], sequences, bounds


def _read_ids(
    path: Path, ids: NDArray[np.integer], document_ends: NDArray[np.int64] | None = None
) -> Facts:
    """Read every id once.

    Args:
        path: the file, for messages.
        ids: mapped, shape (tokens,).
        document_ends: the number of ids up to the end of each document that has ids; None if the
            ends are unknown.

    Returns:
        fingerprint: sha256 over the dtype and every byte.
        largest_id: the largest id.
        end_of_text: the id that ends each document and occurs nowhere else, if there are at least
            two documents; None if there is no such id, or if the ends of documents are unknown.

    Raises:
        DataError: an id is negative (file, token, byte).
    """
    last_ids = ids[:0] if document_ends is None else ids[document_ends - 1]
    # The last id of a single document may be any id.
    is_common = len(last_ids) > 1 and bool(np.all(last_ids == last_ids[0]))
    last_id = int(last_ids[0]) if is_common else None
    digest = hashlib.sha256(ids.dtype.str.encode())
    largest_id, occurrences = 0, 0
    for start, block in in_blocks(ids):
        if int(block.min()) < 0:
            position = int(np.flatnonzero(block < 0)[0])
            raise DataError(
                f"a token id is at least 0, but {path} has {int(block[position])} at token "
                f"{start + position} (byte {(start + position) * block.itemsize}); it has another "
                "format or is damaged: tokenize again"
            )
        digest.update(block.tobytes())
        largest_id = max(largest_id, int(block.max()))
        occurrences += int(np.count_nonzero(block == last_id)) if last_id is not None else 0
    return {
        "fingerprint": digest.hexdigest(),
        "largest_id": largest_id,
        "end_of_text": last_id if occurrences == len(last_ids) else None,
    }
