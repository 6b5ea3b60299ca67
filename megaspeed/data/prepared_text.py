"""Text to token files, and how a warm start finds them without reading any.

    files of text -> documents -> training | validation
                                     |            |
                     tokenizer  <----+            |
                         +--> token file          +--> token file      of each share

Token files and tokenizers are kept under a key of what they were made from, so they are right
whenever they are found. A *recipe* remembers which of them a configuration came to. Its key holds
the path, size, modification time and status-change time of every file. A recipe is kept only where
any later change of a file must show in these (`Selection.is_settled`); on a machine whose clock is
turned back it may not, and deleting the cache is the mend.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import tokenizers

from megaspeed.config.data import DataConfig
from megaspeed.data.cache import Cache, Facts, cache_key
from megaspeed.data.errors import DataError
from megaspeed.data.selection import Selection
from megaspeed.data.shares import Share
from megaspeed.data.text.cutting import HOW_CUT
from megaspeed.data.text.documents import Document, corpus_fingerprint, read_documents
from megaspeed.data.text.pieces import SKIP_BEFOREHAND
from megaspeed.data.text.split import Cut, Groups, split_by_tokens, split_groups
from megaspeed.data.tokenizer.cached import is_whole, keep_tokenizer, provide_trained
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer
from megaspeed.data.tokens.hold_out import document_span, hold_out_spans
from megaspeed.data.tokens.token_file import TokenFile
from megaspeed.data.tokens.writing import write_tokens

logger = logging.getLogger(__name__)

# Part of a token file's key: raise it when the same documents are to give other ids.
_TOKENS_FORMAT = 2
# Part of a recipe's key: raise it when recipes say something else.
_RECIPE_FORMAT = 4

TokenFiles = list[TokenFile | None]
"""The token file of each share's text; None where it has no text."""

Stretches = list[tuple[TokenFile, ...]]
"""The stretches of token files that each share's text gives; none where it has no text."""

Span = tuple[int, int]
"""[first, stop) in a training file."""


@dataclass(frozen=True)
class PreparedText:
    """What the text of a selection came to, in the cache.

    Attributes:
        train: of the training shares.
        validation: of the validation shares or, where a fraction is held out, of the training
            shares.
        tokenizer: its folder; None where there is no text and no tokenizer is named.
    """

    train: Stretches
    validation: Stretches
    tokenizer: Path | None

    @classmethod
    def of(
        cls,
        train: TokenFiles,
        validation: TokenFiles,
        held_out: Sequence[Span | None],
        tokenizer: Path | None,
    ) -> Self:
        """Of the files, with a part of some training files held out."""
        training, validating = _whole(train), _whole(validation)
        for share, span in enumerate(held_out):
            if span is not None:
                (file,) = training[share]
                training[share], part = hold_out_spans(file, [span])
                validating[share] = (*validating[share], *part)
        return cls(training, validating, tokenizer)


def _whole(files: TokenFiles) -> Stretches:
    return [() if file is None else (file,) for file in files]


def recall_text(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> PreparedText | None:
    """What the text came to by its recipe, if there is one and all that it names is whole."""
    recipe = cache.read_index(_recipe_path(cache, data, vocab_size, selection))
    if recipe is None:
        return None
    train, validation = (_open_all(cache, recipe[side]) for side in ("train", "validation"))
    tokenizer = None if recipe["tokenizer"] is None else cache.root / recipe["tokenizer"]
    if train is None or validation is None:
        return None
    if tokenizer is not None and not is_whole(cache, tokenizer):
        return None
    held_out = [None if span is None else (span[0], span[1]) for span in recipe["held_out"]]
    return PreparedText.of(train, validation, held_out, tokenizer)


def build_text(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> PreparedText:
    """Builds what the cache lacks, and keeps the recipe. Only under the cache's lock.

    Raises:
        DataError: records that are no text, text that cannot be split, a tokenizer that has ids
            that the model has not.
    """
    logger.info("preparing the corpus in %s", cache.root)
    training, validating, cuts = _read_split(data, selection)
    folder, tokenizer = _provide_tokenizer(cache, vocab_size, selection, training)
    train = [_provide_tokens(cache, documents, tokenizer) for documents in training]
    validation = [_provide_tokens(cache, documents, tokenizer) for documents in validating]
    held_out = [_span(file, cut) for file, cut in zip(train, cuts, strict=True)]
    if selection.is_settled():
        recipe: Facts = {
            "train": _names(cache, train),
            "validation": _names(cache, validation),
            "held_out": held_out,
            "tokenizer": None if folder is None else folder.relative_to(cache.root).as_posix(),
        }
        cache.write_index(_recipe_path(cache, data, vocab_size, selection), recipe)
    return PreparedText.of(train, validation, held_out, folder)


def _span(file: TokenFile | None, cut: Cut | None) -> Span | None:
    """The tokens at the end of a document that are held out; at least one, and not all."""
    if file is None or cut is None:
        return None
    first, stop = document_span(file, cut.document)
    return stop - min(max(round(cut.fraction * (stop - first)), 1), stop - first - 1), stop


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


def _names(cache: Cache, files: TokenFiles) -> list[str | None]:
    """Where the files are in the cache, as a recipe has it."""
    return [
        None if file is None else file.path.relative_to(cache.root).as_posix() for file in files
    ]


def _open_all(cache: Cache, names: Sequence[str | None]) -> TokenFiles | None:
    """The token files of these names; None where one of them is not whole."""
    files = [None if name is None else TokenFile.open(cache, cache.root / name) for name in names]
    are_whole = [name is None or file is not None for name, file in zip(names, files, strict=True)]
    return files if all(are_whole) else None


def _read_split(
    data: DataConfig, selection: Selection
) -> tuple[Groups, Groups, Sequence[Cut | None]]:
    """(training documents, validation documents, what is cut) of each share."""
    groups = _read_shares(selection.train)
    cuts: Sequence[Cut | None] = [None for _ in groups]
    if selection.validation is not None:
        return groups, _read_shares(selection.validation), cuts
    if data.hold_out_by == "tokens":
        training, held_out, cuts = split_by_tokens(groups, data.validation_fraction, data.seed)
    else:
        training, held_out = split_groups(groups, data.validation_fraction, data.seed)
    problems = [
        _none_left(share, len(held), data.validation_fraction)
        for share, left, held in zip(selection.train, training, held_out, strict=True)
        if held and not left
    ]
    if problems:
        raise DataError(*problems)
    return training, held_out, cuts


def _none_left(share: Share, documents: int, fraction: float) -> str:
    return (
        f"data.train: every source must keep text to train on, and all {documents} documents of "
        f"'{share.name}' are held out: other sources have some of them too, and what one holds out "
        f"none trains on; lower data.validation_fraction ({fraction:g}), give data.validation "
        "sources of its own, or leave out what the sources have in common"
    )


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
    """(its folder in the cache, the tokenizer); nothing where no ids of ours are to be made."""
    if selection.tokenizer is not None:
        return keep_tokenizer(cache, selection.tokenizer, vocab_size)
    documents = [document for group in training for document in group]
    return provide_trained(cache, documents, vocab_size) if documents else (None, None)


def _provide_tokens(
    cache: Cache, documents: list[Document], tokenizer: TextTokenizer | None
) -> TokenFile | None:
    """The documents' token file, written only if it was not before; None of no documents."""
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
    existing = TokenFile.open(cache, path)
    if existing is not None:
        return existing
    logger.info("tokenizing %d documents", len(documents))
    return write_tokens(cache, path, documents, tokenizer)
