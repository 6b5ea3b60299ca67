"""Megatron-LM's datasets: NAME.bin with ids, and NAME.idx that says where documents lie in it.

The format does not say whose ids they are, nor which id ends a document; where one ends every
document and stands nowhere else, it is found.
"""

from __future__ import annotations

from pathlib import Path

from megaspeed.data.cache import Cache
from megaspeed.data.tokens.megatron_index import MegatronIndex
from megaspeed.data.tokens.survey import surveyed
from megaspeed.data.tokens.token_file import TokenFile, TokenIndex


def open_megatron(prefix: Path, cache: Cache) -> TokenFile:
    """The pair of files as one token file, read once on this machine.

    Args:
        prefix: NAME, without .bin or .idx.
        cache: remembers what the pass over the ids found.

    Raises:
        DataError: a file is missing, is of another format or does not fit the other one.
    """
    index = MegatronIndex.read(prefix)
    found = surveyed(cache, [index.ids_path, index.path], index.survey)
    return TokenFile(
        index.ids_path,
        TokenIndex(
            tokens=index.tokens,
            documents=index.documents,
            dtype=index.dtype,
            largest_id=found.largest_id,
            vocab_size=None,
            end_of_text=found.end_of_text,
            tokenizer_fingerprint=None,
            corpus_fingerprint=found.fingerprint,
        ),
        megatron_index=index.path,
    )
