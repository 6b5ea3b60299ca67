"""The tail of every token file, held out for validation.

    file    document . document . document | document .
                                  training | validation

The cut is at the end of a document where it is known where documents end, so that no document is
on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaspeed.data.errors import DataError
from megaspeed.data.tokens.megatron_index import MegatronIndex
from megaspeed.data.tokens.token_file import TokenFile

_SCANNED_AT_ONCE_TOKENS = 1 << 20


def hold_out(
    files: Sequence[TokenFile], fraction: float
) -> tuple[tuple[TokenFile, ...], tuple[TokenFile, ...]]:
    """(training, validation): the last `fraction` of each file is for validation.

    Neither side of a file is empty; a fraction of 0 holds nothing out.

    Args:
        files: whole ones.
        fraction: in [0, 1).

    Raises:
        DataError: a file has a single token.
    """
    if fraction == 0:
        return tuple(files), ()
    train: list[TokenFile] = []
    validation: list[TokenFile] = []
    for file in files:
        tokens = file.index.tokens
        if tokens < 2:
            raise DataError(
                f"to hold out a part of {file.path} takes at least 2 tokens, and it has {tokens}; "
                "set data.validation_fraction to 0, or name data.validation"
            )
        cut = _cut(file, min(max(round(tokens * (1 - fraction)), 1), tokens - 1))
        assert file.first_token == 0, file
        train.append(file.stretch(0, cut))
        validation.append(file.stretch(cut, tokens - cut))
    return tuple(train), tuple(validation)


def _cut(file: TokenFile, wanted: int) -> int:
    """How many tokens are for training: up to the first document end from `wanted` on.

    Where only the file itself ends there, the last one before; where the file is one document, or
    nothing is known of its documents, `wanted`.
    """
    if file.megatron_index is not None:
        index = MegatronIndex.read(file.megatron_index.with_suffix(""))
        return index.document_end_near(wanted) or wanted
    if file.index.end_of_text is None:
        return wanted
    return _end_from(file, wanted) or _end_before(file, wanted) or wanted


def _end_from(file: TokenFile, wanted: int) -> int | None:
    """The first end of a document in [wanted, tokens)."""
    ids = file.map()
    last = len(ids) - 1  # the end of the file is no place to cut
    for start in range(wanted - 1, last, _SCANNED_AT_ONCE_TOKENS):
        block = ids[start : min(start + _SCANNED_AT_ONCE_TOKENS, last)]
        found = np.flatnonzero(block == file.index.end_of_text)
        if len(found):
            return start + int(found[0]) + 1
    return None


def _end_before(file: TokenFile, wanted: int) -> int | None:
    """The last end of a document in [1, wanted)."""
    ids = file.map()
    for stop in range(wanted - 1, 0, -_SCANNED_AT_ONCE_TOKENS):
        start = max(0, stop - _SCANNED_AT_ONCE_TOKENS)
        found = np.flatnonzero(ids[start:stop] == file.index.end_of_text)
        if len(found):
            return start + int(found[-1]) + 1
    return None
