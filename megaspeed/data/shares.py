"""The sources of a list, found on this machine and gathered into the components they become.

no weights   [a.txt, b.jsonl, TOKENS]            one share: all of them, read once an epoch
weights      [a.txt 3, b.jsonl 1, TOKENS 2]      three shares, of these weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaspeed.config.data import BUNDLED_CORPUS, Source
from megaspeed.data.errors import DataError
from megaspeed.data.text.sources import SourceFile, files_by_source, matched_twice
from megaspeed.data.tokens.token_sources import is_token_source, text_beside_tokens, token_paths


@dataclass(frozen=True)
class Share:
    """What becomes one component of the mixture.

    Attributes:
        files: of text, in order.
        token_sources: those whose files hold token ids already, in order.
        weight: relative to the other shares' weights.
        name: what a person calls it: its sources as the configuration has them.
    """

    files: tuple[SourceFile, ...]
    token_sources: tuple[Source, ...]
    weight: float
    name: str


def find_shares(sources: Sequence[Source], setting: str) -> tuple[Share, ...]:
    """The shares of a list of sources; opens no file.

    Args:
        sources: at least one; all of them have a weight or none has.
        setting: the JSON key they come from, for messages: `data.train` or `data.validation`.

    Raises:
        DataError: every source that cannot be used.
    """
    holds_tokens = [_holds_tokens(source) for source in sources]
    text_sources = [
        source for source, tokens in zip(sources, holds_tokens, strict=True) if not tokens
    ]
    token_sources = [source for source, tokens in zip(sources, holds_tokens, strict=True) if tokens]
    _check_tokens(token_sources, setting)
    listed = iter(files_by_source(text_sources, setting) if text_sources else [])
    alone = [
        Share((), (source,), source.weight or 1.0, str(source))
        if tokens
        else Share(tuple(next(listed)), (), source.weight or 1.0, str(source))
        for source, tokens in zip(sources, holds_tokens, strict=True)
    ]
    return tuple(alone) if sources[0].weight is not None else (_together(alone),)


def token_places(shares: Sequence[Share]) -> list[Path]:
    """The token folders, token files and prefixes of token files, in order."""
    return [
        place
        for share in shares
        for source in share.token_sources
        for place in token_paths(Path(str(source.path)))
    ]


def _holds_tokens(source: Source) -> bool:
    if source.path is None or source.path == BUNDLED_CORPUS:
        return False
    return is_token_source(Path(source.path))


def _check_tokens(sources: Sequence[Source], setting: str) -> None:
    """Raises DataError if one of these sources of tokens has text, too, or two have the same."""
    first: dict[Path, tuple[Path, Source]] = {}
    problems: list[str] = []
    for source in sources:
        path = Path(str(source.path))
        places, text = token_paths(path), text_beside_tokens(path)
        if text is not None:
            problems.append(
                f"{setting}: a source is of text or of tokens, and '{source}' matches {text}, "
                f"which is read as text, and {places[0]}, which holds tokens; name the two as "
                "sources of their own"
            )
        for place in places:
            found = (place, source)
            if first.setdefault(place.resolve(), found) is not found:
                problems.append(matched_twice(setting, first[place.resolve()], found))
    if problems:
        raise DataError(*problems)


def _together(shares: Sequence[Share]) -> Share:
    return Share(
        tuple(file for share in shares for file in share.files),
        tuple(source for share in shares for source in share.token_sources),
        weight=1.0,
        name=", ".join(share.name for share in shares),
    )
