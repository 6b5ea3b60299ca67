"""What is tokenized, with what and how: all that the ids depend on.

It is written before the first id. Work that was cut off goes on only under the plan it began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import tokenizers

from megaspeed.data.text.cutting import HOW_CUT
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer

# Raise it when the same plan is to give other files.
_FORMAT = 1


@dataclass(frozen=True)
class InputFile:
    """A file as it was when tokenizing began.

    Attributes:
        name: relative to its source.
        place: where it is; of a dataset known by name, that and which files are meant by it.
        format: how it is read.
        settings: what the format was told, such as the field of the text; by option.
        size_bytes, mtime_ns: of the file on disk.
    """

    name: str
    place: str
    format: str
    settings: Mapping[str, str]
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Plan:
    """All that decides which ids are written, and into which shards.

    Attributes:
        tokenizer_fingerprint: sha256 of the tokenizer as JSON.
        end_of_text: the id behind each document.
        shard_tokens: how many tokens fill a shard.
        library_version: of `tokenizers`; another one may encode some text otherwise.
        cutting: how long documents are cut; positions within them count their pieces.
        input: the files, in order.
        format: of what is written.
    """

    tokenizer_fingerprint: str
    end_of_text: int
    shard_tokens: int
    library_version: str
    cutting: str
    input: tuple[InputFile, ...]
    format: int

    @classmethod
    def of(cls, files: Sequence[SourceFile], tokenizer: TextTokenizer, shard_tokens: int) -> Plan:
        """The plan for these files as they are now.

        Raises:
            OSError: a file is not there any more.
        """
        return cls(
            tokenizer_fingerprint=tokenizer.fingerprint,
            end_of_text=tokenizer.end_of_text,
            shard_tokens=shard_tokens,
            library_version=tokenizers.__version__,
            cutting=HOW_CUT,
            input=tuple(map(_as_input, files)),
            format=_FORMAT,
        )


def differences(before: Plan, now: Plan) -> Iterator[str]:
    """What is not as it was, for a person to read."""
    if before.tokenizer_fingerprint != now.tokenizer_fingerprint:
        yield (
            f"the tokenizer was {before.tokenizer_fingerprint[:16]}... and is "
            f"{now.tokenizer_fingerprint[:16]}..."
        )
    for what, old, new in (
        ("the end-of-text id", before.end_of_text, now.end_of_text),
        ("--shard-size", before.shard_tokens, now.shard_tokens),
        ("the version of tokenizers", before.library_version, now.library_version),
        ("the cutting of long documents", before.cutting, now.cutting),
        ("the format of token folders", before.format, now.format),
    ):
        if old != new:
            yield f"{what} was {old} and is {new}"
    yield from _differing_files(before.input, now.input)


def _as_input(file: SourceFile) -> InputFile:
    place, size_bytes, mtime_ns, _ = file.state()
    how: Any = file.format  # a dataclass, whichever format it is
    settings = {
        f"--{name.replace('_', '-')}": "not given" if value is None else str(value)
        for name, value in asdict(how).items()
    }
    kind = type(file.format).__name__
    return InputFile(file.name, place, kind, settings, size_bytes, mtime_ns)


def _differing_files(before: Sequence[InputFile], now: Sequence[InputFile]) -> Iterator[str]:
    """The number of files, or the first one that is another."""
    if len(before) != len(now):
        yield f"the input was {len(before)} files and is {len(now)}"
        return
    for old, new in zip(before, now, strict=True):
        if old != new:
            yield _difference(old, new)
            return


def _difference(old: InputFile, new: InputFile) -> str:
    if (old.name, old.place) != (new.name, new.place):
        return f"the input had {old.place} as {old.name} where it has {new.place} as {new.name}"
    if old.format != new.format:
        return f"{new.place} was read as {old.format} and is read as {new.format}"
    for option, value in new.settings.items():
        if old.settings.get(option) != value:
            return f"{option} was {old.settings.get(option)} and is {value}"
    if old.size_bytes != new.size_bytes:
        return f"{new.place} was changed (it had {old.size_bytes} bytes and has {new.size_bytes})"
    return (
        f"{new.place} was written again (it has {new.size_bytes} bytes as before, and was last "
        f"changed at {_time(old.mtime_ns)}, now at {_time(new.mtime_ns)})"
    )


def _time(nanoseconds: int) -> str:
    """As clocks here show it."""
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(" ")
