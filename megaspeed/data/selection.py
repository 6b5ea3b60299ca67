"""Find the files that a ``data`` section names, check that they fit together, read their state.

Sources become *shares*, each of which becomes one component of the mixture:

    no weights   [a.txt, b.jsonl, TOKENS]            one share: all of them, read once an epoch
    weights      [a.txt 3, b.jsonl 1, TOKENS 2]      three shares, with these weights

The tokenizer is determined by ``data.tokenizer`` and the sources:

    a path       any                              this tokenizer; token folders must be made with it
    train        token folders, and others        the folders' tokenizer, which must be the same
    train        text                             a tokenizer trained on the text
    train        .bin files                       none, because none is needed
    train        text and .bin files              refused: the tokenizer of the ids is unknown
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megaspeed.config.run import DataConfig, Source
from megaspeed.data.errors import DataError, for_each, raise_any
from megaspeed.data.formats import WITH_RECORDS
from megaspeed.data.sources import SourceFile, files_by_source, files_of, find
from megaspeed.data.token_sources import is_token_folder, read_index, token_paths, why_not_tokens
from megaspeed.data.tokenizer import (
    TOKENIZER_FILE,
    TRAIN,
    check_trainable,
    check_vocabulary,
    load_tokenizer,
    tokenizer_files,
)
from megaspeed.files.paths import FileState, expand_home


@dataclass(frozen=True)
class Share:
    """Sources that become one component of the mixture."""

    files: tuple[SourceFile, ...]  # the files of text, in order
    tokens: tuple[Path, ...]  # the token folders and token files, in order
    weight: float  # its weight, relative to the weights of the other shares
    name: str  # its sources as the configuration names them
    # Its only source if it is tokenized while the run trains. Then files is empty.
    stream: Source | None = None


@dataclass(frozen=True)
class Selection:
    """The files of a corpus at one moment."""

    train: tuple[Share, ...]  # the training data
    # The validation data; None if a fraction is held out instead.
    validation: tuple[Share, ...] | None
    # The path of an existing tokenizer; None if one must be trained or none is needed.
    tokenizer: str | None
    states: list[tuple[str, FileState]]  # name and state of every file of text and of the tokenizer

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of training and of validation."""
        return self.train + (self.validation or ())


def select_files(data: DataConfig) -> Selection:
    """Find the files and read their state, but no text.

    Raises DataError with every problem with the sources, or with the choice of the tokenizer.
    """
    train, validation = _find_both(data)
    shares = (*train, *(validation or ()))
    tokenizer = choose_tokenizer(data, shares)
    files = [file for share in shares for file in share.files]
    if tokenizer is not None:
        files += [SourceFile(path.name, path) for path in tokenizer_files(tokenizer)]
    states = [(file.name, file.state()) for file in files]
    return Selection(train, validation, tokenizer, states)


def find_problems(data: DataConfig, vocab_size: int) -> Iterator[str]:
    """Yield every problem that can be found without reading the corpus, as soon as it is found."""
    shares: Sequence[Share] = ()
    try:
        train, validation = _find_both(data)
        shares = (*train, *(validation or ()))
    except DataError as error:
        yield from error.problems
    yield from _first_records(shares)
    yield from first_ids(shares, vocab_size)
    try:
        tokenizer = choose_tokenizer(data, shares)
        if tokenizer is not None:
            check_vocabulary(load_tokenizer(tokenizer).vocab_size, tokenizer, vocab_size)
        elif data.tokenizer == TRAIN and not token_places(shares):
            check_trainable(vocab_size)
    except DataError as error:
        yield from error.problems


def first_ids(shares: Sequence[Share], vocab_size: int) -> list[str]:
    """Return problems with the first ids of token files that do not state the size of an id."""
    return list(filter(None, (why_not_tokens(place, vocab_size) for place in token_places(shares))))


def _first_records(shares: Sequence[Share]) -> Iterator[str]:
    """Yield problems with the first record of each file, such as a wrong ``text_field``."""
    for file in (file for share in shares for file in share.files):
        try:
            if isinstance(file.format, WITH_RECORDS):
                next(file.pieces(), None)
        except DataError as error:
            yield from error.problems


def _find_both(data: DataConfig) -> tuple[tuple[Share, ...], tuple[Share, ...] | None]:
    """Return (shares of training, of validation or None)."""
    listed = [(data.train_sources, "data.train")]
    if data.validation_sources is not None:
        listed.append((data.validation_sources, "data.validation"))
    train, *rest = for_each(listed, lambda item: find_shares(*item))
    trained_on, validated_on = _places(train), _places(rest[0] if rest else ())
    both = [shown for place, shown in validated_on.items() if place in trained_on]
    if both:
        raise DataError(
            f"validation data must not be trained on, but {len(both)} of {len(validated_on)} "
            f"files of data.validation are also in data.train, the first is {both[0]}; "
            "narrow one of the two lists"
        )
    return train, rest[0] if rest else None


def _places(shares: Sequence[Share]) -> dict[tuple[str, str], str]:
    """Map the identity of each file to its path."""
    streams = [file for share in shares if share.stream for file in files_of(share.stream, [])]
    files = chain(streams, *(share.files for share in shares))
    text = {file.place(): str(file.path) for file in files}
    return text | {(str(place.resolve()), ""): str(place) for place in token_places(shares)}


def find_shares(sources: Sequence[Source], setting: str) -> tuple[Share, ...]:
    """Return the shares of a list of sources.

    Args:
        sources: at least one; all of them have a weight or none has.
        setting: the key they come from, for messages: ``data.train`` or ``data.validation``.

    Raises:
        DataError: every source that cannot be used.
    """
    found = find(sources)
    tokens = [tuple(token_paths(paths)) for _, paths in found]
    matched = Counter(path.resolve() for paths in tokens for path in paths)
    raise_any(
        f"{setting}: tokens may be listed only once, but {path} is matched {count} times; narrow "
        "the sources that match it"
        for path, count in matched.items()
        if count > 1
    )
    text = [
        (source, [path for path in every if path not in paths])
        for (source, every), paths in zip(found, tokens, strict=True)
    ]
    with_tokens = [source for source, paths in zip(sources, tokens, strict=True) if paths]
    listed = files_by_source(text, setting, may_be_empty=with_tokens)
    shares = [
        Share(tuple(files), paths, source.weight or 1.0, str(source))
        if source.tokens is None
        else Share((), (), source.weight or 1.0, str(source), source)
        for source, paths, files in zip(sources, tokens, listed, strict=True)
    ]
    if sources[0].weight is not None or shares[0].stream is not None:
        return tuple(shares)
    files = tuple(file for share in shares for file in share.files)
    name = ", ".join(share.name for share in shares)
    return (Share(files, tuple(token_places(shares)), 1.0, name),)


def token_places(shares: Sequence[Share]) -> list[Path]:
    """Return the token folders and token files of all shares, in order."""
    return [path for share in shares for path in share.tokens]


def choose_tokenizer(data: DataConfig, shares: Sequence[Share]) -> str | None:
    """Return the path of an existing tokenizer; None if one must be trained or none is needed.

    Raises DataError if token folders have different tokenizers, or ids have no known tokenizer.
    """
    places = token_places(shares)
    folders = [place for place in places if is_token_folder(place)]
    if data.tokenizer == TRAIN and not folders:
        if places and any(share.files for share in shares):
            raise DataError(
                "text must be tokenized with the tokenizer of the other sources, but "
                f'data.tokenizer is "{TRAIN}" and {places[0]} does not state the tokenizer of its '
                "ids; name that tokenizer in data.tokenizer"
            )
        return None
    chosen = str(folders[0] if data.tokenizer == TRAIN else expand_home(data.tokenizer))
    if data.tokenizer == TRAIN and not (folders[0] / TOKENIZER_FILE).is_file():
        raise DataError(
            f"a token folder must contain its tokenizer, but {folders[0] / TOKENIZER_FILE} is "
            "missing; copy it again, or name the tokenizer in data.tokenizer"
        )
    if folders:
        wanted = load_tokenizer(chosen).fingerprint
        fingerprints = [read_index(folder).tokenizer_fingerprint for folder in folders]
        raise_any(
            f"all tokens must be made with one tokenizer: the fingerprint of the one in {chosen} "
            f"is {wanted[:16]}..., but the tokens in {folder} were made with {found[:16]}...; name "
            "the tokenizer of these tokens in data.tokenizer, or make them again with the other"
            for folder, found in zip(folders, fingerprints, strict=True)
            if found != wanted
        )
    return chosen
