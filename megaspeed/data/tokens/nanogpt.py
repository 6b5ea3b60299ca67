"""nanoGPT's token files: 16-bit ids and nothing else (nanoGPT, data/openwebtext/prepare.py).

    train.bin    id id id id ...      little-endian, no header, no index

The format says neither which id ends a document nor whose ids they are.
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
