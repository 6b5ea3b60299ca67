"""Sources to token files, once for each machine: the first process builds, the others map.

    sources -> files -> documents -> training | validation
                                        |            |
                        tokenizer  <----+            |
                            +--> token file          +--> token file

Token files and trained tokenizers are kept under a key of what they were made from, so they are
right whenever they are found. A *recipe* remembers which of them a configuration came to, so that
a warm start reads no text at all. Its key holds the path, size, modification time and
status-change time of every file. A recipe is kept only where any later change of a file must show
in these (`Selection.is_settled`); on a machine whose clock is turned back it may not, and deleting
the cache is the mend.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import tokenizers

from megaspeed.config.data import DataConfig
from megaspeed.data.cache import Cache, Facts, cache_key, default_cache_dir
from megaspeed.data.corpus import Document, corpus_fingerprint, read_documents
from megaspeed.data.errors import DataError
from megaspeed.data.prepared import PreparedCorpus
from megaspeed.data.selection import Selection, find_problems, select_files
from megaspeed.data.split import split_documents
from megaspeed.data.tokenizer import (
    TRAIN,
    TRAINING_SAMPLE_BYTES,
    TextTokenizer,
    check_vocabulary,
    load_tokenizer,
    train_tokenizer,
)
from megaspeed.data.tokens import TokenFile, write_tokens

logger = logging.getLogger(__name__)

# Part of every key: raise it when the same input is to give other files.
_FORMAT = 1


def prepare_corpus(
    data: DataConfig, vocab_size: int, *, cache_dir: Path | None = None
) -> PreparedCorpus:
    """The corpus as token files, built if this machine has not built it before.

    Any number of processes may call it at once. No process group is needed.

    Args:
        data: the `data` section.
        vocab_size: `model.vocab_size`; token ids are below it.
        cache_dir: where prepared data is kept; None is $MEGASPEED_CACHE, else ~/.cache/megaspeed.

    Raises:
        DataError: with every problem found.
    """
    cache = Cache((cache_dir or default_cache_dir(os.environ)).absolute())
    try:
        selection = select_files(data)
    except DataError as error:
        raise DataError(*find_problems(data, vocab_size)) from error
    corpus = _recall(cache, data, vocab_size, selection)
    if corpus is None:
        with cache.lock():
            # While this process waited, another may have built it, or the files may have changed.
            selection = select_files(data)
            corpus = _recall(cache, data, vocab_size, selection)
            if corpus is None:
                corpus = _build(cache, data, vocab_size, selection)
    corpus.check(vocab_size)
    return corpus


def _recipe_path(cache: Cache, data: DataConfig, vocab_size: int, selection: Selection) -> Path:
    key = cache_key(
        _FORMAT,
        tokenizers.__version__,
        selection.states,
        len(selection.train),
        data.validation_fraction if selection.validation is None else None,
        data.tokenizer,
        vocab_size,
        data.seed,
    )
    return cache.root / "recipes" / f"{key}.json"


def _recall(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> PreparedCorpus | None:
    """The corpus by its recipe, if there is one and all that it names is whole."""
    recipe = cache.read_index(_recipe_path(cache, data, vocab_size, selection))
    if recipe is None:
        return None
    train = TokenFile.open(cache, cache.root / recipe["train"])
    validation = None
    if recipe["validation"] is not None:
        validation = TokenFile.open(cache, cache.root / recipe["validation"])
        if validation is None:
            return None
    tokenizer = cache.root / recipe["tokenizer"]
    if train is None or cache.read(tokenizer) is None:
        return None
    return PreparedCorpus(train, validation, tokenizer, data.sequence_length, data.seed)


def _build(cache: Cache, data: DataConfig, vocab_size: int, selection: Selection) -> PreparedCorpus:
    """Builds what the cache lacks, and keeps the recipe. Only under the cache's lock."""
    logger.info("preparing the corpus in %s", cache.root)
    training, held_out = _read_split(data, selection)
    tokenizer_path, tokenizer = _provide_tokenizer(cache, data, vocab_size, training)
    train = _provide_tokens(cache, training, tokenizer)
    validation = _provide_tokens(cache, held_out, tokenizer) if held_out else None
    if selection.is_settled():
        recipe: Facts = {
            "train": train.path.relative_to(cache.root).as_posix(),
            "validation": validation and validation.path.relative_to(cache.root).as_posix(),
            "tokenizer": tokenizer_path.relative_to(cache.root).as_posix(),
        }
        cache.write_index(_recipe_path(cache, data, vocab_size, selection), recipe)
    return PreparedCorpus(train, validation, tokenizer_path, data.sequence_length, data.seed)


def _read_split(data: DataConfig, selection: Selection) -> tuple[list[Document], list[Document]]:
    """(training documents, validation documents), the latter empty where none are held out."""
    if selection.validation is None:
        documents = read_documents(selection.train)
        return split_documents(documents, data.validation_fraction, data.seed)
    return read_documents(selection.train), read_documents(selection.validation)


def _provide_tokenizer(
    cache: Cache, data: DataConfig, vocab_size: int, training: Sequence[Document]
) -> tuple[Path, TextTokenizer]:
    """(tokenizer.json in the cache, the tokenizer), trained only if it was not before."""
    if data.tokenizer != TRAIN:
        tokenizer = load_tokenizer(data.tokenizer)
        check_vocabulary(tokenizer.vocab_size, data.tokenizer, vocab_size)
        key = cache_key(_FORMAT, tokenizer.fingerprint, tokenizer.end_of_text)
        path = cache.root / "tokenizers" / f"{key}.json"
    else:
        key = cache_key(
            _FORMAT,
            tokenizers.__version__,
            corpus_fingerprint(training),
            TRAINING_SAMPLE_BYTES,
            vocab_size,
        )
        path = cache.root / "tokenizers" / f"{key}.json"
        if cache.read(path) is not None:
            return path, load_tokenizer(str(path))
        logger.info("training a byte-level BPE of %d entries", vocab_size)
        tokenizer = train_tokenizer(training, vocab_size)

    def fill(stream: BinaryIO) -> Facts:
        stream.write(tokenizer.to_json())
        return {"end_of_text": tokenizer.end_of_text, "vocab_size": tokenizer.vocab_size}

    if cache.read(path) is None:
        cache.write(path, fill)
    return path, tokenizer


def _provide_tokens(cache: Cache, documents: list[Document], tokenizer: TextTokenizer) -> TokenFile:
    """The documents' token file, written only if it was not before."""
    key = cache_key(
        _FORMAT, corpus_fingerprint(documents), tokenizer.fingerprint, tokenizer.end_of_text
    )
    path = cache.root / "tokens" / f"{key}.bin"
    existing = TokenFile.open(cache, path)
    if existing is not None:
        return existing
    logger.info("tokenizing %d documents", len(documents))
    return write_tokens(cache, path, documents, tokenizer)
