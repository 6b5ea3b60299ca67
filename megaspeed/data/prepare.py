"""Sources to a corpus, once for each machine: the first process builds, the others map.

    files of text    -> token files in the cache ---+--> components -> training | validation
    files of tokens  -> as they are, mapped --------+

Text is tokenized once and found again by what it was made from; what is tokens already is opened
and checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megaspeed.config.data import DataConfig
from megaspeed.data.cache import Cache, default_cache_dir
from megaspeed.data.errors import DataError
from megaspeed.data.prepared import PreparedCorpus
from megaspeed.data.prepared_text import PreparedText, Stretches, build_text, recall_text
from megaspeed.data.selection import Selection, find_problems, first_ids, select_files
from megaspeed.data.shares import Share
from megaspeed.data.stream.mixture import Component, Mixture
from megaspeed.data.tokens.hold_out import Sides, hold_out_tails, hold_out_tokens
from megaspeed.data.tokens.token_file import TokenFile
from megaspeed.data.tokens.token_sources import open_token_source


def prepare_corpus(
    data: DataConfig, vocab_size: int, *, cache_dir: Path | None = None, speaks: bool = True
) -> PreparedCorpus:
    """The corpus as token files, built if this machine has not built it before.

    Any number of processes may call it at once. No process group is needed.

    Args:
        data: the `data` section.
        vocab_size: `model.vocab_size`; token ids are below it.
        cache_dir: where prepared data is kept; None is $MEGASPEED_CACHE, else ~/.cache/megaspeed.
        speaks: whether to report on standard error that another process prepares data for long.

    Raises:
        DataError: with every problem found.
    """
    cache = Cache((cache_dir or default_cache_dir(os.environ)).absolute(), speaks)
    try:
        selection = select_files(data)
    except DataError as error:
        raise DataError(*(find_problems(data, vocab_size) or error.problems)) from error
    wrong = first_ids(selection.shares, vocab_size)
    if wrong:
        raise DataError(*wrong)
    text = recall_text(cache, data, vocab_size, selection)
    if text is None:
        # Before the cache is made: wrong input leaves nothing behind.
        problems = find_problems(data, vocab_size)
        if problems:
            raise DataError(*problems)
        with cache.lock():
            # While this process waited, another may have built it, or the files may have changed.
            selection = select_files(data)
            text = recall_text(cache, data, vocab_size, selection)
            if text is None:
                text = build_text(cache, data, vocab_size, selection)
    corpus = _corpus_of(cache, data, selection, text)
    corpus.check(vocab_size)
    return corpus


def _corpus_of(
    cache: Cache, data: DataConfig, selection: Selection, text: PreparedText
) -> PreparedCorpus:
    """The text's token files and the token sources, as components."""
    training = _open_token_sources(cache, selection.train)
    if selection.validation is None:
        validation_shares = selection.train
        sides = [_hold_out(files, data) for files in training]
        training, validation = [train for train, _ in sides], [held_out for _, held_out in sides]
    else:
        validation_shares = selection.validation
        validation = _open_token_sources(cache, validation_shares)
    train = _mixture(selection.train, text.train, training)
    assert train is not None, "every share has files"
    return PreparedCorpus(
        train=train,
        validation=_mixture(validation_shares, text.validation, validation),
        tokenizer=text.tokenizer,
        sequence_length=data.sequence_length,
        seed=data.seed,
        reset_at_documents=data.reset_at_documents,
    )


def _hold_out(files: Sequence[TokenFile], data: DataConfig) -> Sides:
    if data.hold_out_by == "tokens":
        return hold_out_tokens(files, data.validation_fraction, data.seed)
    return hold_out_tails(files, data.validation_fraction)


def _open_token_sources(cache: Cache, shares: Sequence[Share]) -> list[tuple[TokenFile, ...]]:
    """The files of each share's token sources.

    Raises:
        DataError: every file that cannot be used.
    """
    opened: list[tuple[TokenFile, ...]] = []
    problems: list[str] = []
    for share in shares:
        files: list[TokenFile] = []
        for source in share.token_sources:
            try:
                files.extend(open_token_source(source, cache))
            except DataError as error:
                problems.extend(error.problems)
        opened.append(tuple(files))
    if problems:
        raise DataError(*problems)
    return opened


def _mixture(
    shares: Sequence[Share], texts: Stretches, tokens: Sequence[tuple[TokenFile, ...]]
) -> Mixture | None:
    """A component of each share: its text's files, then its token sources'; None of no files."""
    files = [(*text, *others) for text, others in zip(texts, tokens, strict=True)]
    if not any(files):
        return None
    assert all(files), "a share without files would be left out in silence"
    return Mixture(
        tuple(
            Component(its_files, share.weight, share.name)
            for share, its_files in zip(shares, files, strict=True)
        )
    )
