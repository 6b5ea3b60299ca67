"""nanoGPT's token files: 16-bit ids and nothing else (nanoGPT, data/openwebtext/prepare.py).

    train.bin    id id id id ...      little-endian, no header, no index

The format says neither which id ends a document nor whose ids they are, nor how wide they are. Ids
of 32 bits, read as 16-bit ones, have their upper halves at every second place:

    id & 0xffff . id >> 16 . id & 0xffff . id >> 16 ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.tokens.survey import survey_ids, surveyed
from megaspeed.data.tokens.token_file import TokenFile, TokenIndex

_DTYPE: Final = "<u2"
# llm.c's files have the same suffix and begin with 256 32-bit numbers, of which this is the first.
_LLM_C_MAGIC = (20240520, 20240801)
_LOOKED_AT_IDS = 1 << 16
_FEWEST_IDS = 64  # of fewer, chance may have made what looks like upper halves


def why_not_16_bit(path: Path, vocab_size: int) -> str | None:
    """That the first ids of the file are of 32 bits; None where nothing speaks for that.

    They are where every id read so is below the vocabulary: up to 65,536 that takes a 0 at every
    second place, above that one of a few small numbers. No text has ids like these.
    """
    ids = np.fromfile(path, dtype=_DTYPE, count=_LOOKED_AT_IDS)
    lower, upper = ids[0::2], ids[1::2]
    largest_upper = (vocab_size - 1) >> 16
    if len(ids) < _FEWEST_IDS or upper.max() > largest_upper or lower.max() <= largest_upper:
        return None
    return (
        f"a .bin without an index holds 16-bit ids, and every second one of {path} is at most "
        f"{largest_upper}, as in a file of 32-bit ids for model.vocab_size {vocab_size}; write it "
        "as uint16 where all ids are below 65,536, or tokenize the text with `megaspeed tokenize`"
    )


def open_nanogpt(path: Path, cache: Cache) -> TokenFile:
    """The file, read once on this machine for its largest id and its checksum.

    Raises:
        DataError: it is empty, has half an id at its end, or has the header of another format.
    """
    size = path.stat().st_size
    itemsize = np.dtype(_DTYPE).itemsize
    if size == 0 or size % itemsize:
        raise DataError(
            f"a .bin without an index holds 16-bit ids, a whole number of them, and {path} has "
            f"{size} bytes; it was cut or is of another format: copy it again, or tokenize again"
        )
    with path.open("rb") as stream:
        magic = int.from_bytes(stream.read(4), "little")
    if magic in _LLM_C_MAGIC:
        raise DataError(
            f"a .bin without an index holds ids and no header, and {path} begins with llm.c's "
            f"({magic}); write its ids without the first 1024 bytes into a .bin"
        )
    tokens = size // itemsize
    ids = np.memmap(path, dtype=_DTYPE, mode="r", shape=(tokens,))
    survey = surveyed(cache, [path], lambda: survey_ids(path, ids))
    index = TokenIndex(
        tokens=tokens,
        documents=None,
        dtype=_DTYPE,
        largest_id=survey.largest_id,
        vocab_size=None,
        end_of_text=None,
        tokenizer_fingerprint=None,
        corpus_fingerprint=survey.fingerprint,
    )
    return TokenFile(path, index)
