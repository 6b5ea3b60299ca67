"""Select the part of the data that is held out for validation.

**Text.** The hash of its text decides whether a document is held out. So equal documents are always
on the same side, and the order of files does not matter. If the documents that are held out are
less than 9/10 of the fraction, the end of the longest other document is held out, too. A document
with a copy is never cut. If no document can be cut, a complete one is held out, unless it is more
than twice the fraction, which is an error.

**Token files.** Blocks are held out, chosen by the hash of their first ids. They begin and end
between documents, if a document ends near enough.

    block . block . block . block . block
            validation      validation
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megaspeed.data.documents import Document, described_files
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.token_file import TokenFile, document_ends

_SHORT_OF = 0.1
_MOST_TIMES = 2

_BLOCKS = 16
_SMALLEST_BLOCK_TOKENS = 1 << 16
_HASHED_TOKENS = 1 << 10
# The largest distance by which a cut moves to the end of a document, as a fraction of a block and
# of all held-out tokens.
_BLOCK_SLACK, _TOTAL_SLACK = 1 / 4, 1 / 50

Groups = list[list[Document]]
"""Documents, by the component of the mixture that they belong to."""

Sides = tuple[tuple[TokenFile, ...], tuple[TokenFile, ...]]
"""(training, validation)"""


@dataclass(frozen=True)
class Cut:
    """A document whose end is held out."""

    document: int  # its number among the training documents of its group
    fraction: float  # the fraction of the document that is held out, in (0, 1)


def split_documents(
    groups: Sequence[Sequence[Document]], fraction: float, seed: int
) -> tuple[Groups, Groups, list[Cut | None]]:
    """Return the training documents, the validation documents, and the cut of each group.

    In every group with documents, ``fraction`` of the bytes is held out. Distinct contents are
    sorted by sha256(seed, content hash), and in this order, each one that fits is held out. A
    document is cut only if no other document has the same text. Documents that one group holds out
    are removed from the training documents of all groups, so a group may lose more.

    If a group has nothing to hold out or to cut, no group is cut, and a group in which nothing fits
    holds out its shortest document.

    Raises DataError if the documents of a group cannot be cut, and the group has fewer than two
    distinct ones, or more than twice the fraction would be held out.
    """
    nothing_cut: list[Cut | None] = [None for _ in groups]
    if fraction == 0:
        return *_sides(groups, set()), nothing_cut
    chosen = [_chosen(_bytes_of(group), fraction, seed) for group in groups]
    held_out = set(chain(*chosen))
    copies = Counter(document.content for group in groups for document in group)
    cuts = [_cut(group, held_out, copies, fraction) for group in groups]
    uncut = [
        group
        for group, cut in zip(groups, cuts, strict=True)
        if group and cut is None and not any(document.content in held_out for document in group)
    ]
    if not uncut:
        return *_sides(groups, held_out), cuts
    raise_any(
        "training and validation each need at least one complete document, but the corpus has "
        f"{len(_bytes_of(group))} distinct document ({group[0].file.path}, "
        f"{group[0].size_bytes} bytes); put <|endoftext|> between its parts, name more files, give "
        "data.validation sources of its own, or set data.validation_fraction to 0"
        for group in groups
        if group and len(_bytes_of(group)) < 2
    )
    for group, contents in zip(groups, chosen, strict=True):
        if group and not contents:
            bytes_of = _bytes_of(group)
            held_out.add(min(bytes_of, key=lambda content: (bytes_of[content], content)))
    training, validation = _sides(groups, held_out)
    raise_any(
        f"at most {_MOST_TIMES} x data.validation_fraction {fraction:g} may be held out, but it "
        f"would be {_bytes(held) / _bytes(group):.1%} of {described_files(group)}: no document of "
        f"{described_files(uncut[0])} can be cut, because all have copies "
        f"({len(uncut[0]):,} documents, {len(_bytes_of(uncut[0])):,} distinct); remove the copies, "
        "or give data.validation sources of its own"
        for group, held in zip(groups, validation, strict=True)
        if group and _bytes(held) > _MOST_TIMES * fraction * _bytes(group)
    )
    return training, validation, nothing_cut


def _cut(
    group: Sequence[Document], held_out: set[str], copies: Counter[str], fraction: float
) -> Cut | None:
    """Cut the longest document without copies, if complete documents are not enough."""
    wanted = fraction * _bytes(group)
    training = [document for document in group if document.content not in held_out]
    missing = wanted - (_bytes(group) - _bytes(training))
    single = [number for number, doc in enumerate(training) if copies[doc.content] == 1]
    if missing <= _SHORT_OF * wanted or not single:
        return None
    longest = max(single, key=lambda n: (training[n].size_bytes, training[n].content))
    return Cut(longest, min(missing / training[longest].size_bytes, 1 - _SHORT_OF))


def _chosen(bytes_of: dict[str, int], fraction: float, seed: int) -> set[str]:
    """Choose the contents to hold out, by hash. Together they do not exceed the fraction."""
    room_bytes = fraction * sum(bytes_of.values())
    ranked = sorted(
        bytes_of, key=lambda content: hashlib.sha256(f"{seed}:{content}".encode()).digest()
    )
    chosen: set[str] = set()
    for content in ranked[:-1]:  # the last one stays, so that training is never empty
        if bytes_of[content] <= room_bytes:
            chosen.add(content)
            room_bytes -= bytes_of[content]
    return chosen


def _sides(groups: Sequence[Sequence[Document]], held_out: set[str]) -> tuple[Groups, Groups]:
    training = [[doc for doc in group if doc.content not in held_out] for group in groups]
    validation = [[doc for doc in group if doc.content in held_out] for group in groups]
    return training, validation


def _bytes(documents: Sequence[Document]) -> int:
    return sum(document.size_bytes for document in documents)


def _bytes_of(documents: Sequence[Document]) -> dict[str, int]:
    """Content hash -> bytes of all documents with this content."""
    bytes_of: Counter[str] = Counter()
    for document in documents:
        bytes_of[document.content] += document.size_bytes
    return bytes_of


def hold_out_tokens(files: Sequence[TokenFile], fraction: float, seed: int) -> Sides:
    """Hold out ``fraction`` of the tokens of each file, with an error of at most 2 %.

    A file is divided into blocks so that about 16 blocks are held out. If they would be shorter
    than 65,536 tokens, fewer blocks are held out. Blocks are selected in the order of sha256(seed,
    first ids). Only a part of the last one is used. Neither side of a file is empty, unless the
    fraction is 0.

    Args:
        files: complete token files.
        fraction: in [0, 1).
        seed: ``data.seed``.

    Raises:
        DataError: a file has a single token.
    """
    if fraction == 0:
        return tuple(files), ()
    sides = [hold_out_spans(file, _held_out_blocks(file, fraction, seed)) for file in files]
    train = tuple(part for training, _ in sides for part in training)
    return train, tuple(part for _, validation in sides for part in validation)


def hold_out_start(shards: Sequence[TokenFile], fraction: float) -> Sides:
    """Hold out the start of a stream: ``fraction`` of it, but at most half of the first shard."""
    wanted = round(fraction * sum(shard.index.tokens for shard in shards))
    training, held_out = hold_out_spans(shards[0], [(0, min(wanted, shards[0].index.tokens // 2))])
    return (*training, *shards[1:]), held_out


def hold_out_spans(file: TokenFile, spans: Sequence[tuple[int, int]]) -> Sides:
    """Return the file without the spans [first, stop), and the spans. Adjacent spans are joined."""
    bounds = [0, *(bound for span in sorted(spans) for bound in span), file.index.tokens]
    between = list(zip(bounds[::2], bounds[1::2], strict=True))
    return _stretches(file, between), _stretches(file, spans)


def _stretches(file: TokenFile, spans: Sequence[tuple[int, int]]) -> tuple[TokenFile, ...]:
    joined: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        if first < stop:
            joined.append((first, stop))
    return tuple(file.stretch(first, stop - first) for first, stop in joined)


def document_span(file: TokenFile, number: int) -> tuple[int, int]:
    """Return the range [first, stop) of the ids of a document, including its end-of-text token."""
    ends = document_ends(file.map(), file.index.end_of_text)
    return int(ends[number - 1]) if number else 0, int(ends[number])


def _held_out_blocks(file: TokenFile, fraction: float, seed: int) -> list[tuple[int, int]]:
    tokens = file.index.tokens
    if tokens < 2:
        raise DataError(
            f"holding out a part of {file.path} needs at least 2 tokens, but it has {tokens}; "
            "set data.validation_fraction to 0, or name data.validation"
        )
    wanted = min(max(round(tokens * fraction), 1), tokens - 1)
    length = max(wanted / _BLOCKS, min(wanted, _SMALLEST_BLOCK_TOKENS))
    count = max(2, round(tokens / length))
    slack = int(_BLOCK_SLACK * tokens / count)
    bounds = [_end_near(file, i * tokens // count, slack) for i in range(1, count)]
    ids = file.map()

    def rank(block: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
        first_ids = ids[block[0] : block[0] + _HASHED_TOKENS].tobytes()
        return hashlib.sha256(f"{seed}:".encode() + first_ids).digest(), block

    held_out: list[tuple[int, int]] = []
    left, most = wanted, tokens - 1
    for first, stop in sorted(zip([0, *bounds], [*bounds, tokens], strict=True), key=rank):
        if stop - first >= left:
            cut = _end_near(file, first + left, int(_TOTAL_SLACK * wanted))
            return [*held_out, (first, min(cut, stop, first + most))]
        held_out.append((first, stop))
        left, most = left - (stop - first), most - (stop - first)
    raise AssertionError("blocks make up the file, and less than all of it is held out")


def _end_near(file: TokenFile, token: int, slack: int) -> int:
    """Return the first end of a document in [token, token + slack]; if there is none, ``token``."""
    if file.index.end_of_text is None:
        return token
    near = file.map()[token - 1 : token + slack]
    found = np.flatnonzero(near == file.index.end_of_text)
    return token + int(found[0]) if len(found) else token
