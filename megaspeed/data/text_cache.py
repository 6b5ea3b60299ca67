"""Tokenize the text of a corpus once on each machine: files of text -> token folders in the cache.

    CACHE/text/KEY/tokenizer       the tokenizer
                  /0-train         a token folder: the documents of share 0 that are trained on
                  /0-validation    a token folder: the documents of share 0 that are held out
                  /entry.json      which of them there are, and the held-out end of a long document

The code of ``megaspeed tokenize`` writes the folders, and they are read as every token folder. KEY
is a hash of everything that determines them. It contains path, size, mtime and ctime of every file,
so a second start reads no text. An entry is complete or absent. If one was damaged, it is built
again. If the clock of a machine was set back, a change may be missed. Then delete the cache.
"""

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import tokenizers

from megaspeed.config.run import DataConfig
from megaspeed.data.cache import ANY_KEY, Cache, cache_key, cannot_write
from megaspeed.data.documents import (
    Document,
    changed_while_read,
    chosen_files,
    corpus_fingerprint,
    described_files,
    read_documents,
)
from megaspeed.data.errors import DataError, for_each, raise_any
from megaspeed.data.hold_out import Cut, Groups, document_span, hold_out_spans, split_documents
from megaspeed.data.pieces import CUT_RULE
from megaspeed.data.selection import Selection, Share
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import open_token_folder, token_files
from megaspeed.data.tokenize import tokenize
from megaspeed.data.tokenizer import (
    TextTokenizer,
    check_vocabulary,
    load_tokenizer,
    train_tokenizer,
)
from megaspeed.files.durable import TEMPORARY, new_folder
from megaspeed.files.json_values import Facts, read_sealed, write_sealed

logger = logging.getLogger(__name__)

# Part of the key. Increment it if the code changes so that the same input gives another entry.
_FORMAT = 2
_ENTRY = "entry.json"
_TOKENIZER = "tokenizer"

FilesOfShares = list[tuple[TokenFile, ...]]
"""The token files of each share, or parts of them; empty if it has none."""


@dataclass(frozen=True)
class TokenizedText:
    """The token files that were made from the text of a selection."""

    train: FilesOfShares  # those of each training share
    # Those of each validation share; if a fraction is held out, of each training share.
    validation: FilesOfShares
    # The tokenizer's folder; None if there is no text and no tokenizer is named.
    tokenizer: Path | None
    documents: int  # number of the documents of ``data.train``, held-out ones included


def recall_text(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> TokenizedText | None:
    """Return what the cache has of this text; None if it has nothing or a file is damaged."""
    entry = _entry(cache, data, vocab_size, selection)
    facts = read_sealed(entry / _ENTRY)
    try:
        return None if facts is None else _open(cache, entry, facts)
    except DataError as error:
        logger.info("building %s again: %s", entry, error)
        return None


def build_text(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> TokenizedText:
    """Tokenize the text into the cache, of which the caller holds the lock.

    Raises DataError for bad records, text that cannot be split or that changes, a tokenizer with
    ids that the model does not have, or a cache that cannot be written.
    """
    logger.info("preparing the corpus in %s", cache.root)
    cache.progress("reading the text", 0, 0)
    training, validating, cuts = _read_split(data, selection)
    entry = _entry(cache, data, vocab_size, selection)
    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)  # it may be damaged
        else:
            entry.unlink(missing_ok=True)
        for leftover in entry.parent.glob(ANY_KEY + TEMPORARY):  # of a killed process
            shutil.rmtree(leftover)
        with new_folder(entry) as folder:
            if selection.tokenizer is None:
                cache.progress("training the tokenizer", 0, 0)
            tokenizer = _provide_tokenizer(vocab_size, selection, training)
            if tokenizer is not None:
                tokenizer.save(folder / _TOKENIZER)
            sides = [*training, *(() if selection.validation else validating)]
            facts: Facts = {
                "tokenizer": None if tokenizer is None else tokenizer.identity,
                "train": [
                    _tokenize(part, tokenizer, folder / f"{share}-train", cache, cut)
                    for share, (part, cut) in enumerate(zip(training, cuts, strict=True))
                ],
                "validation": [
                    _tokenize(part, tokenizer, folder / f"{share}-validation", cache)
                    for share, part in enumerate(validating)
                ],
                "documents": sum(map(len, sides)),
            }
            write_sealed(folder / _ENTRY, facts)
    except FileNotFoundError as error:
        raise changed_while_read(str(error.filename)) from error
    except OSError as error:
        raise cannot_write(Path(error.filename or entry), error) from error
    return _open(cache, entry, facts)


def _entry(cache: Cache, data: DataConfig, vocab_size: int, selection: Selection) -> Path:
    key = cache_key(
        _FORMAT,
        tokenizers.__version__,
        CUT_RULE,
        selection.states,
        [[repr(file.format) for file in share.files] for share in selection.shares],
        len(selection.train),
        (data.validation_fraction, data.seed) if selection.validation is None else None,
        selection.tokenizer,
        vocab_size,
    )
    return cache.root / "text" / key


def _open(cache: Cache, entry: Path, facts: Facts) -> TokenizedText:
    """Open the token folders of an entry. Raises DataError if a file was damaged."""
    folder = None if facts["tokenizer"] is None else entry / _TOKENIZER
    if folder is not None and load_tokenizer(str(folder)).identity != facts["tokenizer"]:
        raise DataError(f"the tokenizer in {folder} was changed")
    train: FilesOfShares = []
    validation: FilesOfShares = []
    for side, parts in (("train", train), ("validation", validation)):
        for share, span in enumerate(facts[side]):
            place = entry / f"{share}-{side}"
            parts.append(() if span is None else open_token_folder(place, cache))
    for share, span in enumerate(facts["train"]):
        if span:
            (file,) = train[share]
            train[share], held_out = hold_out_spans(file, [tuple(span)])
            validation[share] += held_out
    return TokenizedText(train, validation, folder, facts["documents"])


def _read_split(
    data: DataConfig, selection: Selection
) -> tuple[Groups, Groups, Sequence[Cut | None]]:
    """Return training documents, validation documents, and the document to be cut, by share."""
    groups = for_each(selection.train, _read_share)
    if selection.validation is not None:
        return groups, for_each(selection.validation, _read_share), [None for _ in groups]
    training, held_out, cuts = split_documents(groups, data.validation_fraction, data.seed)
    raise_any(
        f"data.train: every source must keep text to train on, but all {len(held)} documents of "
        f"'{share.name}' are held out: some of them are also in other sources, and a document that "
        "is held out from one source is held out from all; lower data.validation_fraction "
        f"({data.validation_fraction:g}), give data.validation sources of its own, or remove the "
        "documents that the sources share"
        for share, left, held in zip(selection.train, training, held_out, strict=True)
        if held and not left
    )
    return training, held_out, cuts


def _read_share(share: Share) -> list[Document]:
    return read_documents(share.files) if share.files else []


def _provide_tokenizer(
    vocab_size: int, selection: Selection, training: Groups
) -> TextTokenizer | None:
    """Load the tokenizer that is named, or train one on the text, if there is any."""
    if selection.tokenizer is not None:
        tokenizer = load_tokenizer(selection.tokenizer)
        check_vocabulary(tokenizer.vocab_size, selection.tokenizer, vocab_size)
        return tokenizer
    documents = list(chain(*training))
    if not documents:
        return None
    logger.info("training a byte-level BPE of %d entries", vocab_size)
    return train_tokenizer(documents, vocab_size)


def _tokenize(
    documents: Sequence[Document],
    tokenizer: TextTokenizer | None,
    folder: Path,
    cache: Cache,
    cut: Cut | None = None,
) -> tuple[int, int] | tuple[()] | None:
    """Write the token folder of some documents, in one shard.

    Returns:
        The range of tokens that are held out of the document to be cut, at its end; () if none is.
        None if there are no documents, and so no folder.
    """
    if not documents:
        return None
    assert tokenizer is not None, "text has a tokenizer"
    logger.info("tokenizing %d documents", len(documents))
    files = chosen_files(documents)
    show = partial(cache.progress, "tokenizing the text")
    total = sum(file.state()[1] for file in files)
    index = tokenize(
        files, tokenizer, folder, lambda now: show(now.read_bytes, total), shard_tokens=sys.maxsize
    )
    if index.corpus_fingerprint != corpus_fingerprint(documents):
        raise changed_while_read(described_files(documents))
    if cut is None:
        return ()
    (file,) = token_files(folder, index)
    first, stop = document_span(file, cut.document)
    # At least one token, but not all of them.
    return stop - min(max(round(cut.fraction * (stop - first)), 1), stop - first - 1), stop
