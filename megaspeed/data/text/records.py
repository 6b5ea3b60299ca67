"""What is wrong with a record that should have text in a field, in the same words everywhere."""

from __future__ import annotations

from collections.abc import Iterable

CORRECT_IT = "correct it"
STATE_FIELD = "name the right one as text_field, or --text-field"
BRING_AGAIN = "bring the whole file here again"

_KINDS = {
    **{dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"},
    bytes: "not UTF-8",
}
_FIELDS_SHOWN = 12


def what_is_wrong(value: object) -> str | None:
    """What a value that must be text is instead; None where it is text."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return _KINDS.get(type(value), type(value).__name__)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            return f"one with half a character ({half} at character {error.start:,})"
    return None


def no_such_field(name: str, present: Iterable[str], kind: str) -> str:
    """That a record has no field (or a table no column) of this name, and which it has."""
    names = [f'"{other}"' for other in present]
    shown = ", ".join(names[:_FIELDS_SHOWN]) or "none"
    more = f" and {len(names) - _FIELDS_SHOWN} more" if len(names) > _FIELDS_SHOWN else ""
    return f'the text is in the {kind} "{name}", and there is none; there is {shown}{more}'
