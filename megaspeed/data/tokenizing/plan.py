"""What is tokenized, with what and how: all that the ids depend on.

It is written before the first id. Work that was cut off goes on only under the plan it began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tokenizers

from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizer import TextTokenizer

# Raise it when the same plan is to give other files.
_FORMAT = 1


@dataclass(frozen=True)
class InputFile:
    """A file as it was when tokenizing began.

    Attributes:
        name: relative to its source.
        place: where it is; of a dataset known by name, that and which files are meant by it.
        read_as: the format and what it was told, such as the field of the text.
        size_bytes, mtime_ns: of the file on disk.
    """

    name: str
    place: str
    read_as: str
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
        input: the files, in order.
        format: of what is written.
    """

    tokenizer_fingerprint: str
    end_of_text: int
    shard_tokens: int
    library_version: str
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
        ("the format of token folders", before.format, now.format),
    ):
        if old != new:
            yield f"{what} was {old} and is {new}"
    yield from _differing_files(before.input, now.input)


def _as_input(file: SourceFile) -> InputFile:
    place, size_bytes, mtime_ns, _ = file.state()
    return InputFile(file.name, place, repr(file.format), size_bytes, mtime_ns)


def _differing_files(before: Sequence[InputFile], now: Sequence[InputFile]) -> Iterator[str]:
    """The number of files, or the first one that is another."""
    if len(before) != len(now):
        yield f"the input was {len(before)} files and is {len(now)}"
        return
    for old, new in zip(before, now, strict=True):
        if (old.name, old.place, old.read_as) != (new.name, new.place, new.read_as):
            yield (
                f"the input had {old.place} as {old.name} ({old.read_as}) where it has {new.place} "
                f"as {new.name} ({new.read_as})"
            )
            return
        if old != new:
            yield (
                f"{new.place} was changed (it had {old.size_bytes} bytes and has {new.size_bytes})"
            )
            return
