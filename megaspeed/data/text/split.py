"""The validation split: documents, chosen by the hash of what they say.

Documents with equal content always go to the same side, so nothing that is validated on was
trained on, and the order in which files are listed does not matter.

    by documents    only complete ones, as in version 0.1; if none is short enough, the shortest
    by tokens       if complete ones come to less than 9/10 of the fraction, the end of the longest
                    document is held out as well; if all have copies, only complete ones, and a
                    split that holds out more than twice the fraction is refused
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megaspeed.data.errors import DataError
from megaspeed.data.text.documents import Document

Groups = list[list[Document]]
_SHORT_OF = 0.1
_MOST_TIMES = 2


@dataclass(frozen=True)
class Cut:
    """A document of which the end is held out.

    Attributes:
        document: its number among the training documents of its group.
        fraction: of the document that is held out, in (0, 1).
    """

    document: int
    fraction: float


def split_by_tokens(
    groups: Sequence[Sequence[Document]], fraction: float, seed: int
) -> tuple[Groups, Groups, list[Cut | None]]:
    """(training documents, validation documents, cut) of each group.

    `fraction` of the bytes of every group that has documents is held out by itself. A document
    is cut only if its text is nowhere else.

    Raises:
        DataError: the documents of a group cannot be cut, and it has fewer than two distinct ones,
            or the shortest with its copies is more than twice the fraction.
    """
    whole = [list(group) for group in groups]
    nothing_cut: list[Cut | None] = [None for _ in groups]
    if fraction == 0:
        return whole, [[] for _ in groups], nothing_cut
    held_out = {
        content for group in groups for content in _held_out(_bytes_of(group), fraction, seed)
    }
    copies = Counter(document.content for group in groups for document in group)
    cuts = [_cut(group, held_out, copies, fraction) for group in groups]
    uncut = [
        group
        for group, cut in zip(groups, cuts, strict=True)
        if group and cut is None and not any(document.content in held_out for document in group)
    ]
    if uncut:
        training, validation = split_groups(groups, fraction, seed)
        shares = [_share(held, group) for held, group in zip(validation, groups, strict=True)]
        problems = [
            _too_much(group, share, fraction, uncut[0])
            for group, share in zip(groups, shares, strict=True)
            if share > _MOST_TIMES * fraction
        ]
        if problems:
            raise DataError(*problems)
        return training, validation, nothing_cut
    return *_sides(groups, held_out), cuts


def _cut(
    group: Sequence[Document], held_out: set[str], copies: Counter[str], fraction: float
) -> Cut | None:
    """What is to be held out beyond complete documents, if it is much; of the longest document."""
    wanted = fraction * sum(document.size_bytes for document in group)
    training = [document for document in group if document.content not in held_out]
    held_bytes = sum(document.size_bytes for document in group) - sum(
        document.size_bytes for document in training
    )
    single = [number for number, doc in enumerate(training) if copies[doc.content] == 1]
    if wanted - held_bytes <= _SHORT_OF * wanted or not single:
        return None
    longest = max(single, key=lambda n: (training[n].size_bytes, training[n].content))
    missing = (wanted - held_bytes) / training[longest].size_bytes
    return Cut(longest, min(missing, 1 - _SHORT_OF))


def split_documents(
    documents: Sequence[Document], fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training documents, validation documents), each in the order of `documents`.

    Distinct contents are ranked by sha256(seed, content hash) and taken for validation in this
    order as long as they fit into `fraction` of all bytes, at least the smallest one. A fraction
    of 0 keeps every document for training.

    Raises:
        DataError: fewer than two distinct documents, so that one side would be empty.
    """
    (training,), (validation,) = split_groups([documents], fraction, seed)
    return training, validation


def split_groups(
    groups: Sequence[Sequence[Document]], fraction: float, seed: int
) -> tuple[Groups, Groups]:
    """(training documents, validation documents) of each group.

    `fraction` of every group that has documents is held out by itself, so that each is validated
    on; what one group holds out, no other trains on. So a group whose documents are in others too
    may lose more than its fraction, up to all of them.

    Raises:
        DataError: fewer than two distinct documents in some of the groups.
    """
    if fraction == 0:
        return [list(group) for group in groups], [[] for _ in groups]
    problems = [_too_few(group) for group in groups if group and len(_bytes_of(group)) < 2]
    if problems:
        raise DataError(*problems)
    held_out: set[str] = set()
    for group in groups:
        if group:
            bytes_of = _bytes_of(group)
            shortest = min(bytes_of, key=lambda content: (bytes_of[content], content))
            held_out |= _held_out(bytes_of, fraction, seed) or {shortest}
    return _sides(groups, held_out)


def _sides(groups: Sequence[Sequence[Document]], held_out: set[str]) -> tuple[Groups, Groups]:
    training = [[doc for doc in group if doc.content not in held_out] for group in groups]
    validation = [[doc for doc in group if doc.content in held_out] for group in groups]
    return training, validation


def _bytes_of(documents: Sequence[Document]) -> dict[str, int]:
    """Content hash -> bytes of all documents with this content."""
    bytes_of: dict[str, int] = {}
    for document in documents:
        bytes_of[document.content] = bytes_of.get(document.content, 0) + document.size_bytes
    return bytes_of


def _share(held: Sequence[Document], group: Sequence[Document]) -> float:
    """The fraction of the group's bytes that is held out."""
    return sum(d.size_bytes for d in held) / max(sum(d.size_bytes for d in group), 1)


def _too_much(
    group: Sequence[Document], share: float, fraction: float, uncut: Sequence[Document]
) -> str:
    return (
        f"at most {_MOST_TIMES} x data.validation_fraction {fraction:g} may be held out, and it "
        f"would be {share:.1%} of {_place(group)}: no document of {_place(uncut)} can be cut, "
        f"because all have copies ({len(uncut):,} documents, {len(_bytes_of(uncut)):,} distinct); "
        "remove the copies, give data.validation sources of its own, or set data.hold_out_by to "
        '"documents" to hold out so much'
    )


def _place(group: Sequence[Document]) -> str:
    files = list(dict.fromkeys(str(document.file.path) for document in group))
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} other files"


def _too_few(documents: Sequence[Document]) -> str:
    return (
        "training and validation each need at least one whole document, and the corpus has "
        f"{len(_bytes_of(documents))} distinct document ({documents[0].file.path}, "
        f"{documents[0].size_bytes} bytes); put <|endoftext|> between its parts, name more "
        "files, give data.validation sources of its own, or set data.validation_fraction to 0"
    )


def _held_out(bytes_of: dict[str, int], fraction: float, seed: int) -> set[str]:
    """The contents that fit into the fraction; `bytes_of` is content hash -> bytes."""
    room_bytes = fraction * sum(bytes_of.values())
    ranked = sorted(bytes_of, key=lambda content: _rank(seed, content))
    held_out: set[str] = set()
    for content in ranked[:-1]:  # the last one stays, so that training is never empty
        if bytes_of[content] <= room_bytes:
            held_out.add(content)
            room_bytes -= bytes_of[content]
    return held_out


def _rank(seed: int, content: str) -> bytes:
    return hashlib.sha256(f"{seed}:{content}".encode()).digest()
