"""Prepares the text of a corpus: files of text -> a tokenizer and token files in the cache.

The key of a token file or a tokenizer in the cache is a hash of everything it was made from. A
*recipe* lists the cached files for a configuration, so a second start reads no text. Its key
contains path, size, mtime and ctime of every file. A recipe is stored only if any later change of a
file is certain to change these (`Selection.is_settled`). If the clock of a machine was set back, a
change may be missed. Then delete the cache.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from heapq import nlargest
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import BinaryIO

import tokenizers

from megaspeed.config.data import DataConfig
from megaspeed.data.cache import Cache, cache_key
from megaspeed.data.documents import Document, corpus_fingerprint, read_documents, read_pieces
from megaspeed.data.encode import encode
from megaspeed.data.errors import for_each, raise_any
from megaspeed.data.hold_out import (
    Cut,
    Groups,
    document_span,
    hold_out_spans,
    split_by_tokens,
    split_groups,
)
from megaspeed.data.pieces import CUT_RULE, SKIP_BEFOREHAND
from megaspeed.data.selection import Selection, Share
from megaspeed.data.token_file import TokenFile, TokenIndex, id_type
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

ORIGINS = ".origins.json"
"""Suffix of the file beside a token file with each file of text and its documents' numbers."""

Parts = list[tuple[TokenFile, ...]]
"""The token files of each share, or parts of them; empty if it has none."""


@dataclass(frozen=True)
class PreparedText:
    """The token files that were made from the text of a selection.

    Attributes:
        train: those of each training share.
        validation: those of each validation share; if a fraction is held out, of each training
            share.
        tokenizer: the tokenizer's folder; None if there is no text and no tokenizer is named.
        documents: number and description of the documents of `data.train`; None if an older version
            has read them.
    """

    train: Parts
    validation: Parts
    tokenizer: Path | None
    documents: tuple[int, str] | None


def recall_text(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> PreparedText | None:
    """The files that the recipe lists; None if there is no recipe or a file is not complete."""
    recipe = read_sealed(_recipe_path(cache, data, vocab_size, selection))
    return None if recipe is None else _open(cache, recipe)


def build_text(
    cache: Cache, data: DataConfig, vocab_size: int, selection: Selection
) -> PreparedText:
    """Builds files that the cache does not have, and stores the recipe. Needs the cache's lock.

    Raises:
        DataError: bad records, text that cannot be split, a tokenizer with ids that the model does
            not have.
    """
    logger.info("preparing the corpus in %s", cache.root)
    training, validating, cuts = _read_split(data, selection)
    tokenizer, folder = _provide_tokenizer(cache, vocab_size, selection, training)
    train = [_provide_tokens(cache, documents, tokenizer) for documents in training]
    validation = [_provide_tokens(cache, documents, tokenizer) for documents in validating]
    documents = list(chain(*training, *(validating if selection.validation is None else [])))
    recipe = {
        "train": [_name(cache, path) for path in train],
        "validation": [_name(cache, path) for path in validation],
        "held_out": [_span(cache, path, cut) for path, cut in zip(train, cuts, strict=True)],
        "tokenizer": _name(cache, folder),
        "documents": (len(documents), _described(documents)),
    }
    if selection.is_settled():
        cache.write_index(_recipe_path(cache, data, vocab_size, selection), recipe)
    text = _open(cache, recipe)
    assert text is not None, recipe
    return text


def _described(documents: Sequence[Document]) -> str:
    """Their number, exact copies, and the at most 4 largest if they have more than half of all."""
    copies = len(documents) - len({document.content for document in documents})
    said = f"{len(documents):,} documents ({copies or 'no'} exact copies of others)"
    sizes = [document.size_bytes for document in documents]
    largest = accumulate(nlargest(min(4, len(documents) // 4), sizes))
    for count, size_bytes in enumerate(largest, start=1):
        if (share := size_bytes / sum(sizes)) > 0.5:
            what = "largest is" if count == 1 else f"{count} largest are"
            return f"{said}, of which the {what} {share:.0%} of the text"
    return said


def _name(cache: Cache, path: Path | None) -> str | None:
    return None if path is None else path.relative_to(cache.root).as_posix()


def _recipe_path(cache: Cache, data: DataConfig, vocab_size: int, selection: Selection) -> Path:
    key = cache_key(
        _RECIPE_FORMAT,
        tokenizers.__version__,
        CUT_RULE,
        selection.states,
        [[repr(file.format) for file in share.files] for share in selection.shares],
        len(selection.train),
        (data.validation_fraction, data.hold_out_by) if selection.validation is None else None,
        selection.tokenizer,
        vocab_size,
        data.seed,
    )
    return cache.root / "recipes" / f"{key}.json"


def _open(cache: Cache, recipe: Facts) -> PreparedText | None:
    folder = None if recipe["tokenizer"] is None else cache.root / recipe["tokenizer"]
    if folder is not None and not _is_complete(cache, folder):
        return None
    sides: list[Parts] = []
    for side in ("train", "validation"):
        names = [name for name in recipe[side] if name is not None]
        opened = {name: TokenFile.open(cache, cache.root / name) for name in names}
        if None in opened.values():
            return None
        sides.append([tuple(filter(None, [opened.get(name)])) for name in recipe[side]])
    train, validation = sides
    for share, span in enumerate(recipe["held_out"]):
        if span is not None:
            (file,) = train[share]
            train[share], part = hold_out_spans(file, [(span[0], span[1])])
            validation[share] += part
    return PreparedText(train, validation, folder, recipe.get("documents"))


def _span(cache: Cache, path: Path | None, cut: Cut | None) -> tuple[int, int] | None:
    """The range of tokens at the end of the cut document that are held out for validation.

    It has at least one token, but not all of them. None if no document of this share is cut.
    """
    if path is None or cut is None:
        return None
    file = TokenFile.open(cache, path)
    assert file is not None, path
    first, stop = document_span(file, cut.document)
    return stop - min(max(round(cut.fraction * (stop - first)), 1), stop - first - 1), stop


def _read_split(
    data: DataConfig, selection: Selection
) -> tuple[Groups, Groups, Sequence[Cut | None]]:
    """(training documents, validation documents, the document to be cut) of each share."""
    groups = for_each(selection.train, _read_share)
    cuts: Sequence[Cut | None] = [None for _ in groups]
    if selection.validation is not None:
        return groups, for_each(selection.validation, _read_share), cuts
    if data.hold_out_by == "tokens":
        training, held_out, cuts = split_by_tokens(groups, data.validation_fraction, data.seed)
    else:
        training, held_out = split_groups(groups, data.validation_fraction, data.seed)
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
    return read_documents(share.files, SKIP_BEFOREHAND) if share.files else []


def _provide_tokenizer(
    cache: Cache, vocab_size: int, selection: Selection, training: Groups
) -> tuple[TextTokenizer, Path] | tuple[None, None]:
    """(the tokenizer, its folder in the cache). Trains it if it is not in the cache."""
    documents = [document for group in training for document in group]
    if selection.tokenizer is not None:
        tokenizer = load_tokenizer(selection.tokenizer)
        check_vocabulary(tokenizer.vocab_size, selection.tokenizer, vocab_size)
        key = cache_key(_TOKENIZER_FORMAT, tokenizer.fingerprint, tokenizer.config)
        folder = cache.root / "tokenizers" / key
    elif documents:
        key = cache_key(
            _TOKENIZER_FORMAT,
            tokenizers.__version__,
            CUT_RULE,  # because the training text is cut into pieces
            corpus_fingerprint(documents),
            TRAINING_SAMPLE_BYTES,
            vocab_size,
        )
        folder = cache.root / "tokenizers" / key
        if _is_complete(cache, folder):
            return load_tokenizer(str(folder)), folder
        logger.info("training a byte-level BPE of %d entries", vocab_size)
        tokenizer = train_tokenizer(documents, vocab_size)
    else:
        return None, None
    if not _is_complete(cache, folder):
        for name, content in tokenizer.files().items():
            cache.write(folder / name, partial(_write_content, content))
    return tokenizer, folder


def _is_complete(cache: Cache, folder: Path) -> bool:
    """Whether both files of a tokenizer are as they were written."""
    return all(cache.read(folder / name) is not None for name in (TOKENIZER_FILE, CONFIG_FILE))


def _write_content(content: bytes, stream: BinaryIO) -> Facts:
    stream.write(content)
    return {}


def _provide_tokens(
    cache: Cache, documents: list[Document], tokenizer: TextTokenizer | None
) -> Path | None:
    """The token file of some documents. Writes it if it is not in the cache."""
    if not documents:
        return None
    assert tokenizer is not None, "text has a tokenizer"
    key = cache_key(
        _TOKENS_FORMAT,
        tokenizers.__version__,
        CUT_RULE,
        corpus_fingerprint(documents),
        tokenizer.fingerprint,
        tokenizer.end_of_text,
    )
    path = cache.root / "tokens" / f"{key}.bin"
    # Even if another corpus wrote the token file: this one may have the same text elsewhere.
    by_file = groupby(documents, key=lambda document: document.file)
    origins = [(str(file.path), [each.number for each in group]) for file, group in by_file]
    content = json.dumps(origins).encode()
    cache.write(path.with_suffix(ORIGINS), partial(_write_content, content))
    if TokenFile.open(cache, path) is None:
        logger.info("tokenizing %d documents", len(documents))
        cache.write(path, partial(_write_tokens, documents, tokenizer))
    return path


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
