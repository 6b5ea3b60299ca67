"""What a foreign token file does not say of itself, found by one pass over its ids.

The pass is made once a machine (`remembered.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.tokens.remembered import remembered

# Part of every key: raise it when the same files are to give other surveys.
_FORMAT = 1
_READ_AT_ONCE_TOKENS = 1 << 22


@dataclass(frozen=True)
class Survey:
    """What a pass over all ids finds.

    Attributes:
        fingerprint: sha256 over the dtype and every byte.
        largest_id: the largest id.
        end_of_text: the id that ends every document, of two or more, and stands nowhere else; None
            where there is no such id, or it is not known where documents end.
    """

    fingerprint: str
    largest_id: int
    end_of_text: int | None


def surveyed(cache: Cache, files: Sequence[Path], survey: Callable[[], Survey]) -> Survey:
    """`survey()`, or what it gave when these files were as they are now.

    Args:
        cache: where it is remembered.
        files: everything that the survey depends on.
        survey: reads them.
    """
    purpose = "for its largest id and its checksum"
    facts = remembered(cache, "surveys", _FORMAT, files, lambda: asdict(survey()), purpose)
    return Survey(**facts)


def survey_ids(
    path: Path, ids: NDArray[np.integer], document_ends: Iterable[NDArray[np.int64]] = ()
) -> Survey:
    """Passes over every id, in constant memory.

    Args:
        path: the file, for messages.
        ids: mapped, shape (tokens,).
        document_ends: for each document that has an id, how many ids lie before its end, in
            stretches; empty where that is not known.

    Raises:
        DataError: an id is negative (file, token, byte).
    """
    documents, last_id = _common_last_id(ids, document_ends)
    digest = hashlib.sha256(ids.dtype.str.encode())
    largest_id, occurrences = 0, 0
    for start in range(0, len(ids), _READ_AT_ONCE_TOKENS):
        block = np.asarray(ids[start : start + _READ_AT_ONCE_TOKENS])
        _refuse_negative(path, block, start)
        digest.update(block.tobytes())
        largest_id = max(largest_id, int(block.max()))
        occurrences += int(np.count_nonzero(block == last_id)) if last_id is not None else 0
    # The last id of a single document is any id.
    end_of_text = last_id if occurrences == documents > 1 else None
    return Survey(digest.hexdigest(), largest_id, end_of_text)


def _common_last_id(
    ids: NDArray[np.integer], document_ends: Iterable[NDArray[np.int64]]
) -> tuple[int, int | None]:
    """(documents, the id that all of them end with or None)."""
    documents, last_id = 0, None
    for ends in document_ends:
        last_ids = ids[ends - 1]
        last_id = int(last_ids[0]) if documents == 0 else last_id
        documents += len(ends)
        if not np.all(last_ids == last_id):
            return documents, None
    return documents, last_id


def _refuse_negative(path: Path, block: NDArray[np.integer], start: int) -> None:
    if int(block.min()) >= 0:
        return
    position = int(np.flatnonzero(block < 0)[0])
    token = start + position
    raise DataError(
        f"a token id is at least 0, and {path} has {int(block[position])} at token {token} "
        f"(byte {token * block.itemsize}); it is of another format or damaged: tokenize again"
    )
