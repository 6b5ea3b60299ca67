"""The corpus's tokenizer in the cache: a folder that AutoTokenizer loads, named by its content.

CACHE/tokenizers/<key>/tokenizer.json
                       tokenizer_config.json     names the end-of-text token
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import tokenizers

from megaspeed.data.cache import Cache, Facts, cache_key
from megaspeed.data.text.cutting import HOW_CUT
from megaspeed.data.text.documents import Document, corpus_fingerprint
from megaspeed.data.tokenizer.text_tokenizer import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    TextTokenizer,
    check_vocabulary,
    load_tokenizer,
)
from megaspeed.data.tokenizer.training import TRAINING_SAMPLE_BYTES, train_tokenizer

logger = logging.getLogger(__name__)

# Part of every key: raise it when the same input is to give another folder.
_FORMAT = 2


def is_whole(cache: Cache, folder: Path) -> bool:
    """Whether both files are there as they were written."""
    return all(cache.read(folder / name) is not None for name in (TOKENIZER_FILE, CONFIG_FILE))


def keep_tokenizer(cache: Cache, source: str, vocab_size: int) -> tuple[Path, TextTokenizer]:
    """(its folder in the cache, the tokenizer at `source`). Only under the cache's lock.

    Raises:
        DataError: it is no tokenizer, or has an id that the model has not.
    """
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer.vocab_size, source, vocab_size)
    key = cache_key(_FORMAT, tokenizer.fingerprint, tokenizer.config)
    return _kept(cache, key, tokenizer), tokenizer


def provide_trained(
    cache: Cache, documents: Sequence[Document], vocab_size: int
) -> tuple[Path, TextTokenizer]:
    """(folder in the cache, tokenizer), trained only if it was not before. Only under the lock."""
    key = cache_key(
        _FORMAT,
        tokenizers.__version__,
        HOW_CUT,  # it is trained on pieces
        corpus_fingerprint(documents),
        TRAINING_SAMPLE_BYTES,
        vocab_size,
    )
    folder = _folder(cache, key)
    if is_whole(cache, folder):
        return folder, load_tokenizer(str(folder))
    logger.info("training a byte-level BPE of %d entries", vocab_size)
    tokenizer = train_tokenizer(documents, vocab_size)
    return _kept(cache, key, tokenizer), tokenizer


def _folder(cache: Cache, key: str) -> Path:
    return cache.root / "tokenizers" / key


def _kept(cache: Cache, key: str, tokenizer: TextTokenizer) -> Path:
    folder = _folder(cache, key)
    if not is_whole(cache, folder):
        for name, content in tokenizer.files().items():
            cache.write(folder / name, partial(_fill, content))
    return folder


def _fill(content: bytes, stream: BinaryIO) -> Facts:
    stream.write(content)
    return {}
