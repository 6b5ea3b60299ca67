"""A strict JSON reader: syntax errors have a line and a column, duplicate keys are errors.

Python's own reader silently keeps the last of two equal keys, and accepts NaN as a number.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.files.reading import read_file


class JsonSyntaxError(ValueError):
    """The text is not JSON; the message has the line, the column and, if known, a fix."""


_DEEPEST = 64
_TOO_DEEP = f"it is nested too deeply: objects and lists must be at most {_DEEPEST} levels deep"


class _Pairs(list[tuple[str, Any]]):
    """An object as a list of pairs, with its duplicate keys."""


def parse_json(text: str) -> tuple[Any, list[Problem]]:
    """Read JSON and find duplicate keys at any depth.

    Returns:
        The value (the last of two equal keys is used) and one problem for each duplicate.

    Raises:
        JsonSyntaxError: the text is not JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
        _check_depth(value)
    except json.JSONDecodeError as error:
        raise JsonSyntaxError(_describe_syntax_error(text, error)) from None
    except JsonSyntaxError:
        raise
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise JsonSyntaxError("it has a number with more than 4,300 digits") from None
    except RecursionError:
        raise JsonSyntaxError(_TOO_DEEP) from None
    problems = [
        Problem(path, f"{dotted(path)} is a duplicate key in one object; keep one of them")
        for path in _duplicates(value, ())
    ]
    return _plain(value), problems


def read_json_object(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Read a file that holds one JSON object.

    Raises:
        JsonSyntaxError: it cannot be read, or is not JSON, or not an object.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonSyntaxError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except OSError as error:
        raise JsonSyntaxError(f"{path} cannot be read: {error.strerror}") from None
    try:
        value, problems = parse_json(text)
    except JsonSyntaxError as error:
        raise JsonSyntaxError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise JsonSyntaxError(
            f"{path} must hold one JSON object {{...}}, and holds {describe_value(value)}"
        )
    return value, problems


def describe_value(value: Any) -> str:
    """A JSON value with its type, for errors: 16 and "16" must look different."""
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return f"{shown} ({_type_name(value)})"


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "a boolean"),
        (int, "a whole number"),
        (float, "a decimal number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    ):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def _refuse_constant(name: str) -> NoReturn:
    raise JsonSyntaxError(f"{name} is not a JSON number; write a finite number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for outer in level for inner in _values_in(outer)]
        if not level:
            return
    raise JsonSyntaxError(_TOO_DEEP)


def _values_in(value: Any) -> Iterable[Any]:
    if isinstance(value, _Pairs):
        return (inner for _, inner in value)
    return value if isinstance(value, list) else ()


def _duplicates(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, inner in value:
            if key in seen:
                yield (*path, key)
            seen.add(key)
            yield from _duplicates(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _duplicates(inner, (*path, index))


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _plain(inner) for key, inner in value}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value


def _describe_syntax_error(text: str, error: json.JSONDecodeError) -> str:
    lines = text.splitlines()
    line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    shown = f", in `{line[:70]}`" if line else ""
    return f"line {error.lineno}, column {error.colno}: {error.msg}{shown}{_mend(text, error.pos)}"


def _mend(text: str, position: int) -> str:
    """A hint for common mistakes of users of DeepSpeed's hjson or of Python."""
    if not text.strip():
        return " (the text is empty)"
    here = text[position:].lstrip()
    if here.startswith(("//", "/*", "#")):
        return " (JSON has no comments)"
    if here.startswith(("}", "]")) and text[:position].rstrip().endswith(","):
        return " (JSON has no comma after the last entry)"
    if here.startswith(("True", "False", "None")):
        return " (JSON writes true, false and null)"
    if here.startswith("'"):
        return ' (JSON strings stand in double quotes: ")'
    return ""
