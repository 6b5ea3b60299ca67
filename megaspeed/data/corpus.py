"""Prepare a corpus from its sources, once on each machine.

files of text    -> documents -> training | validation -> token folders in the cache --+
files of tokens  -> mapped as they are ------------------------------------------------+-> mixture
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megaspeed.config.run import DataConfig
from megaspeed.data.cache import Cache, Preparation, default_cache_dir
from megaspeed.data.errors import DataError, for_each, raise_any
from megaspeed.data.hold_out import hold_out_start, hold_out_tokens
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.selection import Selection, Share, find_problems, first_ids, select_files
from megaspeed.data.text_cache import FilesOfShares, TokenizedText, build_text, recall_text
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import open_tokens
from megaspeed.data.token_stream import StreamShard, TokenStream, open_stream


@dataclass(frozen=True)
class PreparedCorpus:
    """Everything that training needs to know about its data. It is small and can be pickled."""

    train: Mixture  # the data of the training samples
    validation: Mixture | None  # the validation data; None if there is none
    # A folder with tokenizer.json and tokenizer_config.json in the cache; None if all sources are
    # .bin files of ids and no tokenizer is named.
    tokenizer: Path | None
    sequence_length: int  # S, tokens
    seed: int  # ``data.seed``
    reset_at_documents: bool = False  # whether attention and positions restart at every document
    # Number of the documents of ``data.train``; None if a file does not state it.
    documents: int | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the training data, as in "sample i = f(seed, fingerprint, i)"."""
        return self.train.fingerprint

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer that made the ids; None if no file states it."""
        stated = (file.index.tokenizer_fingerprint for file in self._files())
        return next((fingerprint for fingerprint in stated if fingerprint is not None), None)

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document; None if no file states it."""
        stated = (file.index.end_of_text for file in self._files())
        return next((end_of_text for end_of_text in stated if end_of_text is not None), None)

    @property
    def training_sequences(self) -> int:
        """Sequences of the training data, each counted once."""
        return self.train.sequences(self.sequence_length)

    @property
    def validation_sequences(self) -> int:
        """Sequences held out, each counted once."""
        return 0 if self.validation is None else self.validation.sequences(self.sequence_length)

    @property
    def streams(self) -> set[TokenStream]:
        """The streams that are tokenized while the run trains. The first shard of each exists."""
        return {file.stream for file in self.train.files if isinstance(file, StreamShard)}

    def check(self, vocab_size: int) -> None:
        """Raise DataError with every problem that prevents training on the corpus.

        An id is not below ``vocab_size``, or a component does not fill one sequence. If attention
        restarts at every document, it is also a problem if the end-of-text token of a file is
        unknown.
        """
        large_ids: dict[Path, str | None] = {}  # one for each file, even if it has several parts
        for file in self._files():
            large_ids[file.path] = large_ids.get(file.path) or file.large_id(vocab_size)
        problems = [
            *large_ids.values(),
            *self._short_components("data.train", self.train, ""),
            *self._short_components(
                "data.validation", self.validation, "raise data.validation_fraction, "
            ),
            *(self._other_ends() if self.reset_at_documents else ()),
        ]
        raise_any(dict.fromkeys(problems))  # two parts of a file have the same problem

    def _files(self) -> tuple[TokenFile, ...]:
        return self.train.files + (() if self.validation is None else self.validation.files)

    def _short_components(self, setting: str, mixture: Mixture | None, mend: str) -> Iterator[str]:
        components = () if mixture is None else mixture.components
        for component in components:
            if component.sequences(self.sequence_length) == 0:
                source = "" if len(components) == 1 else f", in its source {component.name}"
                yield (
                    f"{setting} must fill at least one sequence of data.sequence_length + 1 = "
                    f"{self.sequence_length + 1} tokens{source}, but has {component.tokens}; "
                    f"add text, {mend}or shorten data.sequence_length"
                )

    def _other_ends(self) -> Iterator[str]:
        for file in self._files():
            own = file.index.end_of_text
            if own is None or own != self.end_of_text:
                found = "states none" if own is None else f"has {own} instead of {self.end_of_text}"
                yield (
                    "data.reset_at_documents needs one known token that ends every document, but "
                    f"{file.path} {found}; make it with `megaspeed tokenize`, or set "
                    "data.reset_at_documents to false"
                )


def prepare_corpus(
    data: DataConfig,
    vocab_size: int,
    *,
    cache_dir: Path | None = None,
    reports_waits: bool = True,
    progress: Preparation = lambda *_: None,
) -> PreparedCorpus:
    """Prepare the corpus. Tokenize text only if this machine has not done so before.

    Any number of processes may call this at the same time. It needs no process group.

    Args:
        vocab_size: ``model.vocab_size``; token ids must be below it.
        cache_dir: folder for prepared data. If None: $MEGASPEED_CACHE, or ~/.cache/megaspeed.
        reports_waits: whether to report on standard error that this process waits for another one
            that prepares data.
        progress: called while text is tokenized, by the process that does it.

    Raises:
        DataError: with every problem found.
    """
    root = (cache_dir or default_cache_dir(os.environ)).absolute()
    cache = Cache(root, reports_waits, progress)
    try:
        selection = select_files(data)
    except DataError as error:
        raise DataError(*(tuple(find_problems(data, vocab_size)) or error.problems)) from error
    raise_any(first_ids(selection.shares, vocab_size))
    text = recall_text(cache, data, vocab_size, selection)
    if text is None:
        # Before the cache is created: wrong input leaves nothing there.
        raise_any(find_problems(data, vocab_size))
        with cache.lock():
            # Another process may have built it meanwhile, or the files may have changed.
            selection = select_files(data)
            text = recall_text(cache, data, vocab_size, selection)
            if text is None:
                text = build_text(cache, data, vocab_size, selection)
    corpus = _corpus_of(cache, data, selection, text)
    corpus.check(vocab_size)
    return corpus


def _corpus_of(
    cache: Cache, data: DataConfig, selection: Selection, text: TokenizedText
) -> PreparedCorpus:
    """Combine the token files of the text with the token sources into components."""

    def open_share(share: Share) -> tuple[TokenFile, ...]:
        if share.stream is not None:
            return open_stream(share.stream, text.tokenizer, cache)
        return tuple(chain(*for_each(share.tokens, lambda path: open_tokens(path, cache))))

    tokens = for_each(selection.train, open_share)
    counts = [file.index.documents for files in tokens for file in files]
    known = [count for count in counts if count is not None]
    if selection.validation is None:
        sides = [
            hold_out_tokens(files, data.validation_fraction, data.seed)
            if share.stream is None
            else hold_out_start(files, data.validation_fraction)
            for share, files in zip(selection.train, tokens, strict=True)
        ]
        tokens, held_out = [train for train, _ in sides], [held for _, held in sides]
    else:
        held_out = for_each(selection.validation, open_share)
    train = _mixture(selection.train, text.train, tokens)
    assert train is not None, "every share has files"
    validated = selection.train if selection.validation is None else selection.validation
    return PreparedCorpus(
        train=train,
        validation=_mixture(validated, text.validation, held_out),
        tokenizer=text.tokenizer,
        sequence_length=data.sequence_length,
        seed=data.seed,
        reset_at_documents=data.reset_at_documents,
        documents=text.documents + sum(known) if known == counts else None,
    )


def _mixture(
    shares: Sequence[Share], texts: FilesOfShares, tokens: FilesOfShares
) -> Mixture | None:
    """One component for each share: first its text, then its token sources; None without files."""
    files = [(*text, *others) for text, others in zip(texts, tokens, strict=True)]
    if not any(files):
        return None
    assert all(files), "a share without files would be omitted silently"
    return Mixture(
        tuple(
            Component(its_files, share.weight, share.name, share.stream is not None)
            for share, its_files in zip(shares, files, strict=True)
        )
    )
