"""Prepares a corpus from its sources. Each machine does this once.

    files of text    -> documents -> training | validation -> token files in the cache --+
    files of tokens  -> mapped as they are ----------------------------------------------+-> mixture

Token files and tokenizers are stored in the cache. Their key is a hash of everything they were
made from. A *recipe* lists the cached files for a configuration, so a second start reads no text.
Its key contains path, size, mtime and ctime of every file. A recipe is stored only if any later
change of a file is certain to change these (`Selection.is_settled`). If the clock of a machine was
set back, a change may be missed. Then delete the cache.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import tokenizers

from megaspeed.config.data import DataConfig
from megaspeed.data.cache import Cache, cache_key, default_cache_dir
from megaspeed.data.documents import (
    Cut,
    Document,
    Groups,
    corpus_fingerprint,
    read_documents,
    read_pieces,
    split_by_tokens,
    split_groups,
)
from megaspeed.data.encode import encode
from megaspeed.data.errors import DataError
from megaspeed.data.hold_out import (
    Sides,
    document_span,
    hold_out_spans,
    hold_out_tails,
    hold_out_tokens,
)
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.pieces import HOW_CUT, SKIP_BEFOREHAND
from megaspeed.data.selection import Selection, Share, find_problems, first_ids, select_files
from megaspeed.data.token_file import TokenFile, TokenIndex, id_type
from megaspeed.data.token_sources import open_token_source
from megaspeed.data.tokenizer import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    TRAINING_SAMPLE_BYTES,
    TextTokenizer,
    check_vocabulary,
    load_tokenizer,
    train_tokenizer,
)
from megaspeed.files.json_values import Facts, read_sealed

logger = logging.getLogger(__name__)

# Parts of the keys. Increment one if the code changes so that the same input gives other token
# files, another tokenizer folder or other recipes.
_TOKENS_FORMAT = 2
_TOKENIZER_FORMAT = 2
_RECIPE_FORMAT = 4

Parts = list[tuple[TokenFile, ...]]
"""The token files of each share, or parts of them; empty if it has none."""


@dataclass(frozen=True)
class PreparedCorpus:
    """Everything that training needs to know about its data. It is small and can be pickled.

    Attributes:
        train: the data of the training samples.
        validation: the validation data; None if there is none.
        tokenizer: a folder with tokenizer.json and tokenizer_config.json in the cache; None if all
            sources are foreign token files and no tokenizer is named.
        sequence_length: S, tokens.
        seed: `data.seed`.
        reset_at_documents: whether attention and positions restart at every document.
    """

    train: Mixture
    validation: Mixture | None
    tokenizer: Path | None
    sequence_length: int
    seed: int
    reset_at_documents: bool = False

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the training data, as in "sample i = f(seed, fingerprint, i)"."""
        return self.train.fingerprint

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer of the ids; None if no file states it."""
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

    def check(self, vocab_size: int) -> None:
        """Raises DataError with everything that prevents training on the corpus.

        This is: an id that the model does not have, a component without a complete sequence, and
        files of different tokenizers. If attention restarts at every document, also a file whose
        end-of-text token is unknown.
        """
        problems: list[str] = []
        reported: set[Path] = set()
        for file in self._files():
            try:
                if file.path not in reported:
                    file.check_vocabulary(vocab_size)
            except DataError as error:
                reported.add(file.path)
                problems.extend(error.problems)
        problems.extend(self._short_components("data.train", self.train, ""))
        if self.validation is not None:
            mend = "raise data.validation_fraction, "
            problems.extend(self._short_components("data.validation", self.validation, mend))
        problems.extend(self._other_tokenizers())
        if self.reset_at_documents:
            problems.extend(self._other_ends())
        if problems:
            # Two parts of a file have the same problem.
            raise DataError(*dict.fromkeys(problems))

    def _files(self) -> tuple[TokenFile, ...]:
        return self.train.files + (() if self.validation is None else self.validation.files)

    def _short_components(self, setting: str, mixture: Mixture, mend: str) -> Iterator[str]:
        for component in mixture.components:
            if component.sequences(self.sequence_length) == 0:
                source = "" if len(mixture.components) == 1 else f", in its source {component.name}"
                yield (
                    f"{setting} must fill at least one sequence of data.sequence_length + 1 = "
                    f"{self.sequence_length + 1} tokens{source}, and has {_extent(component)}; "
                    f"add text, {mend}or shorten data.sequence_length"
                )

    def _other_tokenizers(self) -> Iterator[str]:
        known = [file for file in self._files() if file.index.tokenizer_fingerprint is not None]
        for file in known:
            own = str(file.index.tokenizer_fingerprint)
            expected = str(known[0].index.tokenizer_fingerprint)
            if own != expected:
                yield (
                    "all token files must be of one tokenizer, and "
                    f"{known[0].path} is of {expected[:16]}... while {file.path} is of "
                    f"{own[:16]}...; tokenize one of the two again with the other's tokenizer"
                )

    def _other_ends(self) -> Iterator[str]:
        for file in self._files():
            own = file.index.end_of_text
            if own is None:
                yield (
                    "data.reset_at_documents needs to know the token that ends a document, and "
                    f"{file.path} does not state it; make it with `megaspeed tokenize`, or set "
                    "data.reset_at_documents to false"
                )
            elif own != self.end_of_text:
                yield (
                    "data.reset_at_documents needs one token that ends a document, and it is "
                    f"{self.end_of_text} elsewhere and {own} in {file.path}; tokenize that again, "
                    "or set data.reset_at_documents to false"
                )


def _extent(component: Component) -> str:
    """The size of a component that is too short."""
    documents = [file.index.documents for file in component.files]
    counted = sum(count for count in documents if count is not None)
    known = f" in {counted} documents" if None not in documents else ""
    files = f" in {len(component.files)} files" if len(component.files) > 1 else ""
    return f"{component.tokens} tokens{known}{files}"


def prepare_corpus(
    data: DataConfig, vocab_size: int, *, cache_dir: Path | None = None, reports_waits: bool = True
) -> PreparedCorpus:
    """Prepares the corpus. Tokenizes text only if this machine has not done so before.

    Any number of processes may call this at the same time. It needs no process group.

    Args:
        data: the `data` section.
        vocab_size: `model.vocab_size`; token ids must be below it.
        cache_dir: folder for prepared data. If None: $MEGASPEED_CACHE, or ~/.cache/megaspeed.
        reports_waits: whether to report on standard error that this process waits for another one
            that prepares data.

    Raises:
        DataError: with every problem found.
    """
    cache = Cache((cache_dir or default_cache_dir(os.environ)).absolute(), reports_waits)
    try:
        selection = select_files(data)
    except DataError as error:
        raise DataError(*(find_problems(data, vocab_size) or error.problems)) from error
    wrong = first_ids(selection.shares, vocab_size)
    if wrong:
        raise DataError(*wrong)
    text = _recall(cache, data, vocab_size, selection)
    if text is None:
        # Before the cache is created: wrong input leaves nothing there.
        problems = find_problems(data, vocab_size)
        if problems:
            raise DataError(*problems)
        with cache.lock():
            # Another process may have built it meanwhile, or the files may have changed.
            selection = select_files(data)
            text = _recall(cache, data, vocab_size, selection)
            if text is None:
                text = _build(cache, data, vocab_size, selection)
    corpus = _corpus_of(cache, data, selection, text)
    corpus.check(vocab_size)
    return corpus


@dataclass(frozen=True)
class _PreparedText:
    """The files in the cache that were made from the text of a selection.

    Attributes:
        train: the token file of each training share; None if the share has no text.
        validation: the token file of each validation share, or of the held-out documents.
        held_out: a range [first, stop) of tokens in each training file that is also held out.
        tokenizer: the tokenizer's folder; None if there is no text and no tokenizer is named.
    """

    train: list[TokenFile | None]
    validation: list[TokenFile | None]
    held_out: list[tuple[int, int] | None]
    tokenizer: Path | None

    def recipe(self, cache: Cache) -> Facts:
        """The fields as JSON values, with paths relative to the cache."""
        return {
            "train": [_name(cache, file.path if file else None) for file in self.train],
            "validation": [_name(cache, file.path if file else None) for file in self.validation],
            "held_out": self.held_out,
            "tokenizer": _name(cache, self.tokenizer),
        }


def _name(cache: Cache, path: Path | None) -> str | None:
    return None if path is None else path.relative_to(cache.root).as_posix()


def _recipe_path(cache: Cache, data: DataConfig, vocab_size: int, selection: Selection) -> Path:
    key = cache_key(
        _RECIPE_FORMAT,
        tokenizers.__version__,
        HOW_CUT,
        selection.states,
        [[repr(file.format) for file in share.files] for share in selection.shares],
        len(selection.train),
        (data.validation_fraction, data.hold_out_by) if selection.validation is None else None,
        selection.tokenizer,
        vocab_size,
        data.seed,
    )
    return cache.root / "recipes" / f"{key}.json"


def _recall(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> _PreparedText | None:
    """The files that the recipe lists; None if there is no recipe or a file is not complete."""
    recipe = read_sealed(_recipe_path(cache, data, vocab_size, selection))
    if recipe is None:
        return None
    train, validation = (
        [name and TokenFile.open(cache, cache.root / name) for name in recipe[side]]
        for side in ("train", "validation")
    )
    names = [*recipe["train"], *recipe["validation"]]
    if [name is None for name in names] != [file is None for file in (*train, *validation)]:
        return None
    tokenizer = None if recipe["tokenizer"] is None else cache.root / recipe["tokenizer"]
    if tokenizer is not None and not _is_complete(cache, tokenizer):
        return None
    held_out = [span and (span[0], span[1]) for span in recipe["held_out"]]
    return _PreparedText(train, validation, held_out, tokenizer)


def _build(cache: Cache, data: DataConfig, vocab_size: int, selection: Selection) -> _PreparedText:
    """Builds files that the cache does not have, and stores the recipe. Needs the cache's lock.

    Raises:
        DataError: bad records, text that cannot be split, a tokenizer with ids that the model does
            not have.
    """
    logger.info("preparing the corpus in %s", cache.root)
    training, validating, cuts = _read_split(data, selection)
    folder, tokenizer = _provide_tokenizer(cache, vocab_size, selection, training)
    train = [_provide_tokens(cache, documents, tokenizer) for documents in training]
    validation = [_provide_tokens(cache, documents, tokenizer) for documents in validating]
    held_out = [_span(file, cut) for file, cut in zip(train, cuts, strict=True)]
    text = _PreparedText(train, validation, held_out, folder)
    if selection.is_settled():
        path = _recipe_path(cache, data, vocab_size, selection)
        cache.write_index(path, text.recipe(cache))
    return text


def _span(file: TokenFile | None, cut: Cut | None) -> tuple[int, int] | None:
    """The range of tokens at the end of the cut document that are held out for validation.

    It has at least one token, but not all of them. None if no document of this share is cut.
    """
    if file is None or cut is None:
        return None
    first, stop = document_span(file, cut.document)
    return stop - min(max(round(cut.fraction * (stop - first)), 1), stop - first - 1), stop


def _read_split(
    data: DataConfig, selection: Selection
) -> tuple[Groups, Groups, Sequence[Cut | None]]:
    """(training documents, validation documents, the document to be cut) of each share."""
    groups = _read_shares(selection.train)
    cuts: Sequence[Cut | None] = [None for _ in groups]
    if selection.validation is not None:
        return groups, _read_shares(selection.validation), cuts
    if data.hold_out_by == "tokens":
        training, held_out, cuts = split_by_tokens(groups, data.validation_fraction, data.seed)
    else:
        training, held_out = split_groups(groups, data.validation_fraction, data.seed)
    problems = [
        f"data.train: every source must keep text to train on, and all {len(held)} documents of "
        f"'{share.name}' are held out: other sources have some of them, too, and a document that "
        "one source holds out is trained on in none; lower data.validation_fraction "
        f"({data.validation_fraction:g}), give data.validation sources of its own, or remove what "
        "the sources have in common"
        for share, left, held in zip(selection.train, training, held_out, strict=True)
        if held and not left
    ]
    if problems:
        raise DataError(*problems)
    return training, held_out, cuts


def _read_shares(shares: Sequence[Share]) -> Groups:
    groups: Groups = []
    problems: list[str] = []
    for share in shares:
        try:
            groups.append(read_documents(share.files, SKIP_BEFOREHAND) if share.files else [])
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(*problems)
    return groups


def _provide_tokenizer(
    cache: Cache, vocab_size: int, selection: Selection, training: Groups
) -> tuple[Path, TextTokenizer] | tuple[None, None]:
    """(the tokenizer's folder in the cache, the tokenizer). Trains it if it is not in the cache."""
    if selection.tokenizer is not None:
        tokenizer = load_tokenizer(selection.tokenizer)
        check_vocabulary(tokenizer.vocab_size, selection.tokenizer, vocab_size)
        key = cache_key(_TOKENIZER_FORMAT, tokenizer.fingerprint, tokenizer.config)
        return _keep_tokenizer(cache, key, tokenizer), tokenizer
    documents = [document for group in training for document in group]
    if not documents:
        return None, None
    key = cache_key(
        _TOKENIZER_FORMAT,
        tokenizers.__version__,
        HOW_CUT,  # it is trained on pieces
        corpus_fingerprint(documents),
        TRAINING_SAMPLE_BYTES,
        vocab_size,
    )
    folder = cache.root / "tokenizers" / key
    if _is_complete(cache, folder):
        return folder, load_tokenizer(str(folder))
    logger.info("training a byte-level BPE of %d entries", vocab_size)
    tokenizer = train_tokenizer(documents, vocab_size)
    return _keep_tokenizer(cache, key, tokenizer), tokenizer


def _is_complete(cache: Cache, folder: Path) -> bool:
    """Whether both files of a tokenizer are as they were written."""
    return all(cache.read(folder / name) is not None for name in (TOKENIZER_FILE, CONFIG_FILE))


def _keep_tokenizer(cache: Cache, key: str, tokenizer: TextTokenizer) -> Path:
    folder = cache.root / "tokenizers" / key
    if not _is_complete(cache, folder):
        for name, content in tokenizer.files().items():
            cache.write(folder / name, partial(_write_content, content))
    return folder


def _write_content(content: bytes, stream: BinaryIO) -> Facts:
    stream.write(content)
    return {}


def _provide_tokens(
    cache: Cache, documents: list[Document], tokenizer: TextTokenizer | None
) -> TokenFile | None:
    """The token file of some documents. Writes it if it is not in the cache."""
    if not documents:
        return None
    assert tokenizer is not None, "text has a tokenizer"
    key = cache_key(
        _TOKENS_FORMAT,
        tokenizers.__version__,
        HOW_CUT,
        corpus_fingerprint(documents),
        tokenizer.fingerprint,
        tokenizer.end_of_text,
    )
    path = cache.root / "tokens" / f"{key}.bin"
    file = TokenFile.open(cache, path)
    if file is None:
        logger.info("tokenizing %d documents", len(documents))
        cache.write(path, partial(_write_tokens, documents, tokenizer))
        file = TokenFile.open(cache, path)
    assert file is not None, path
    return file


def _write_tokens(documents: list[Document], tokenizer: TextTokenizer, stream: BinaryIO) -> Facts:
    tokens, largest_id = 0, tokenizer.end_of_text
    for packed in encode(read_pieces(documents), tokenizer):
        stream.write(packed.ids.tobytes())
        tokens += len(packed.ids)
        largest_id = max(largest_id, int(packed.ids.max(initial=0)))
    index = TokenIndex(
        tokens=tokens,
        documents=len(documents),
        dtype=id_type(tokenizer.vocab_size),
        largest_id=largest_id,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer_fingerprint=tokenizer.fingerprint,
        corpus_fingerprint=corpus_fingerprint(documents),
    )
    return asdict(index)


def _corpus_of(
    cache: Cache, data: DataConfig, selection: Selection, text: _PreparedText
) -> PreparedCorpus:
    """Combines the token files of the text with the token sources into components."""
    training, held_out = _parts(text.train), _parts(text.validation)
    for share, span in enumerate(text.held_out):
        if span is not None:
            (file,) = training[share]
            training[share], part = hold_out_spans(file, [span])
            held_out[share] += part
    tokens = _open_token_sources(cache, selection.train)
    if selection.validation is None:
        sides = [_hold_out(files, data) for files in tokens]
        tokens, held_out_tokens = [train for train, _ in sides], [held for _, held in sides]
    else:
        held_out_tokens = _open_token_sources(cache, selection.validation)
    train = _mixture(selection.train, training, tokens)
    assert train is not None, "every share has files"
    validated = selection.train if selection.validation is None else selection.validation
    return PreparedCorpus(
        train=train,
        validation=_mixture(validated, held_out, held_out_tokens),
        tokenizer=text.tokenizer,
        sequence_length=data.sequence_length,
        seed=data.seed,
        reset_at_documents=data.reset_at_documents,
    )


def _parts(files: Sequence[TokenFile | None]) -> Parts:
    return [() if file is None else (file,) for file in files]


def _hold_out(files: Sequence[TokenFile], data: DataConfig) -> Sides:
    if data.hold_out_by == "tokens":
        return hold_out_tokens(files, data.validation_fraction, data.seed)
    return hold_out_tails(files, data.validation_fraction)


def _open_token_sources(cache: Cache, shares: Sequence[Share]) -> Parts:
    """Opens the token sources. Raises DataError with every file that cannot be used."""
    opened: Parts = []
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


def _mixture(shares: Sequence[Share], texts: Parts, tokens: Parts) -> Mixture | None:
    """One component for each share: first its text, then its token sources; None without files."""
    files = [(*text, *others) for text, others in zip(texts, tokens, strict=True)]
    if not any(files):
        return None
    assert all(files), "a share without files would be omitted silently"
    return Mixture(
        tuple(
            Component(its_files, share.weight, share.name)
            for share, its_files in zip(shares, files, strict=True)
        )
    )
