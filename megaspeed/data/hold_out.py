"""The part of token files that is held out for validation.

By tokens: blocks of each file, chosen by the hash of their first ids.

    file    block . block . block . block . block . block
                    validation              validation

By documents, as in version 0.1: the end of each file.

    file    document . document . document | document .
                                  training | validation

With both rules, parts begin and end between documents, if a document ends near enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megaspeed.data.errors import DataError
from megaspeed.data.foreign_tokens import MegatronIndex
from megaspeed.data.token_file import TokenFile

_SCANNED_AT_ONCE_TOKENS = 1 << 20
_BLOCKS = 16
_SMALLEST_BLOCK_TOKENS = 1 << 16
_HASHED_TOKENS = 1 << 10
# The largest distance by which a cut moves to the end of a document, as a fraction of a block and
# of all held-out tokens.
_BLOCK_SLACK, _TOTAL_SLACK = 1 / 4, 1 / 50

Sides = tuple[tuple[TokenFile, ...], tuple[TokenFile, ...]]
"""(training, validation)"""


def hold_out_tokens(files: Sequence[TokenFile], fraction: float, seed: int) -> Sides:
    """Holds out `fraction` of the tokens of each file, with an error of at most 2 %.

    A file is divided into blocks so that about 16 blocks are held out. If they would be shorter
    than 65,536 tokens, one block is held out. Blocks are selected in the order of sha256(seed,
    first ids). Only a part of the last one is used. Neither side of a file is empty, unless the
    fraction is 0.

    Args:
        files: complete token files.
        fraction: in [0, 1).
        seed: `data.seed`.

    Raises:
        DataError: a file has a single token.
    """
    if fraction == 0:
        return tuple(files), ()
    sides = [hold_out_spans(file, _held_out_blocks(file, fraction, seed)) for file in files]
    train = tuple(part for training, _ in sides for part in training)
    return train, tuple(part for _, validation in sides for part in validation)


def hold_out_spans(file: TokenFile, spans: Sequence[tuple[int, int]]) -> Sides:
    """The file without the spans [first, stop), and the spans. Adjacent spans are joined."""
    train: list[TokenFile] = []
    validation: list[TokenFile] = []
    for spans_of_side, side in ((_rest(spans, file.index.tokens), train), (spans, validation)):
        joined: list[tuple[int, int]] = []
        for first, stop in sorted(spans_of_side):
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((first, stop))
        side.extend(file.stretch(first, stop - first) for first, stop in joined)
    return tuple(train), tuple(validation)


def document_span(file: TokenFile, number: int) -> tuple[int, int]:
    """The range [first, stop) of the ids of a document, including its end-of-text token."""
    ids, ends_before, first = file.map(), 0, 0
    for start in range(0, len(ids), _SCANNED_AT_ONCE_TOKENS):
        block = ids[start : start + _SCANNED_AT_ONCE_TOKENS]
        ends = start + 1 + np.flatnonzero(block == file.index.end_of_text)
        if ends_before + len(ends) > number:
            at = number - ends_before
            return int(ends[at - 1]) if at else first, int(ends[at])
        ends_before, first = ends_before + len(ends), int(ends[-1]) if len(ends) else first
    raise AssertionError(f"{file.path} has {ends_before} documents, and number {number} is wanted")


def _held_out_blocks(file: TokenFile, fraction: float, seed: int) -> list[tuple[int, int]]:
    tokens = file.index.tokens
    wanted = _check_divisible(file, round(tokens * fraction))
    length = max(wanted / _BLOCKS, min(wanted, _SMALLEST_BLOCK_TOKENS))
    count = max(2, round(tokens / length))
    slack = int(_BLOCK_SLACK * tokens / count)
    bounds = [_end_near(file, i * tokens // count, slack) for i in range(1, count)]
    ids = file.map()
    blocks = sorted(
        zip([0, *bounds], [*bounds, tokens], strict=True),
        key=lambda block: (
            hashlib.sha256(
                f"{seed}:".encode() + ids[block[0] : block[0] + _HASHED_TOKENS].tobytes()
            ).digest(),
            block,
        ),
    )
    held_out: list[tuple[int, int]] = []
    left, most = wanted, tokens - 1
    for first, stop in blocks:
        if stop - first >= left:
            cut = _end_near(file, first + left, int(_TOTAL_SLACK * wanted))
            return [*held_out, (first, min(cut, stop, first + most))]
        held_out.append((first, stop))
        left, most = left - (stop - first), most - (stop - first)
    raise AssertionError("blocks make up the file, and less than all of it is held out")


def _end_near(file: TokenFile, token: int, slack: int) -> int:
    """The first end of a document in [token, token + slack]; if there is none, `token`."""
    if file.megatron_index is not None:
        end = MegatronIndex.read(file.megatron_index.with_suffix("")).document_end_near(token)
        return end if end is not None and token <= end <= token + slack else token
    if file.index.end_of_text is None:
        return token
    near = file.map()[token - 1 : token + slack]
    found = np.flatnonzero(near == file.index.end_of_text)
    return token + int(found[0]) if len(found) else token


def _rest(spans: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The spans of the file between the given spans."""
    bounds = [0, *(bound for span in sorted(spans) for bound in span), tokens]
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return [(first, stop) for first, stop in pairs if first < stop]


def _check_divisible(file: TokenFile, wanted: int) -> int:
    """`wanted`, but at least 1 and less than all tokens.

    Raises:
        DataError: the file has a single token.
    """
    tokens = file.index.tokens
    if tokens < 2:
        raise DataError(
            f"holding out a part of {file.path} needs at least 2 tokens, and it has {tokens}; "
            "set data.validation_fraction to 0, or name data.validation"
        )
    return min(max(wanted, 1), tokens - 1)


def hold_out_tails(files: Sequence[TokenFile], fraction: float) -> Sides:
    """Holds out the last `fraction` of each file for validation, beginning after a document.

    Neither side of a file is empty, unless the fraction is 0.

    Raises:
        DataError: a file has a single token.
    """
    if fraction == 0:
        return tuple(files), ()
    train: list[TokenFile] = []
    validation: list[TokenFile] = []
    for file in files:
        tokens = file.index.tokens
        cut = _cut(file, _check_divisible(file, round(tokens * (1 - fraction))))
        assert file.first_token == 0, file
        train.append(file.stretch(0, cut))
        validation.append(file.stretch(cut, tokens - cut))
    return tuple(train), tuple(validation)


def _cut(file: TokenFile, wanted: int) -> int:
    """Number of training tokens: up to the first end of a document at or after `wanted`.

    If this is the end of the file, up to the last end of a document before `wanted`. If the file is
    one document, or its documents are unknown, `wanted`.
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
    last = len(ids) - 1  # not the end of the file
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
