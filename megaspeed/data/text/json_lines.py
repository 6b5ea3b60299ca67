"""JSON lines: one object on each line, one of its fields the text of a document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megaspeed.data.text.byte_stream import ByteStream
from megaspeed.data.text.cutting import pieces_of
from megaspeed.data.text.pieces import BadRecord, OnBad, Piece
from megaspeed.data.text.records import CORRECT_IT, STATE_FIELD, no_such_field, what_is_wrong
from megaspeed.data.text.text_format import TextFormat

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _NoText(Exception):
    """A line has no text; says why."""

    def __init__(self, problem: str, mend: str = CORRECT_IT) -> None:
        self.problem, self.mend = problem, mend


class _NoJson(_NoText):
    """A line is not what one who writes JSON lines writes."""


class _Doubled(dict[str, object]):
    """A JSON object that has some of its keys more than once, with the last value of each."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        times = Counter(key for key, _ in pairs)
        self.doubled = {key for key in times if times[key] > 1}


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    return record if len(record) == len(pairs) else _Doubled(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


@dataclass(frozen=True, slots=True)
class JsonLines(TextFormat):
    """A mark is the byte, in the text, behind the line of a document. One line is held in memory.

    Attributes:
        text_field: the field of the text.
    """

    has_records: ClassVar[bool] = True
    text_field: str = "text"

    def pieces(self, path: Path, after: int, on_bad: OnBad) -> Iterator[Piece]:
        with ByteStream(path, after) as stream:
            start = stream.position
            while line := stream.line():
                if start == 0:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line and not line.isspace():
                    try:
                        text = self._text_of(line)
                    except _NoText as wrong:
                        where = f"line {stream.line_number():,} (byte {start:,})"
                        doubt = stream.doubt if isinstance(wrong, _NoJson) else ""
                        on_bad(BadRecord(path, where, wrong.problem + doubt, wrong.mend))
                        text = ""
                    if text:
                        yield from pieces_of(text, stream.position, stream.disk_bytes)
                start = stream.position
            stream.tell_damage(on_bad)

    def _text_of(self, line: bytes) -> str:
        record = _parsed(line)
        if self.text_field not in record:
            raise _NoText(
                no_such_field(self.text_field, record, "field"), f"{STATE_FIELD}, or {CORRECT_IT}"
            )
        if isinstance(record, _Doubled) and self.text_field in record.doubled:
            raise _NoText(f'a line has one field "{self.text_field}", and this one has several')
        text = record[self.text_field]
        wrong = what_is_wrong(text)
        if wrong is not None:
            raise _NoText(f'the field "{self.text_field}" must be a string, and is {wrong}')
        assert isinstance(text, str)
        return text


def _parsed(line: bytes) -> dict[str, object]:
    law = "a line must be one JSON object in UTF-8, and this one"
    try:
        record = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = f"0x{line[error.start]:02x} at byte {error.start:,} of the line"
        raise _NoJson(f"{law} has {byte} ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise _NoJson(f"{law} is not JSON ({error.msg} at character {error.pos:,})") from None
    except (ValueError, RecursionError) as error:  # a number or a depth that is too large
        raise _NoJson(f"{law} is not read as JSON ({error})") from None
    if not isinstance(record, dict):
        raise _NoText(f"{law} is {what_is_wrong(record) or 'a string'}")
    return record
