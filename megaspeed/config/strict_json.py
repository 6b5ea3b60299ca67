"""A strict JSON reader: syntax errors have a line and a column, duplicate keys are errors.

Python's own reader keeps the last of two equal keys without a warning, and accepts NaN.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.files.reading import read_file


class JsonSyntaxError(ValueError):
    """The text is not JSON. The message has the line, the column and, if known, a fix."""


_DEEPEST = 64
_TOO_DEEP = f"it is nested too deeply: objects and lists must be at most {_DEEPEST} levels deep"

_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a whole number",
    float: "a decimal number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class _Pairs(list[tuple[str, Any]]):
    """An object as a list of pairs, which can have the same key twice."""


def parse_json(text: str) -> tuple[Any, list[Problem]]:
    """Reads JSON and finds duplicate keys at any depth.

    Returns:
        The value, with the last of equal keys, and a problem for each duplicate.

    Raises:
        JsonSyntaxError: the text is not JSON.
    """
    duplicates: list[KeyPath] = []
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
        value = _with_dicts(pairs, (), duplicates)
    except json.JSONDecodeError as error:
        raise JsonSyntaxError(_describe_syntax_error(text, error)) from None
    except JsonSyntaxError:
        raise
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise JsonSyntaxError("it has a number with more than 4,300 digits") from None
    except RecursionError:
        raise JsonSyntaxError(_TOO_DEEP) from None
    return value, [
        Problem(path, f"{dotted(path)} is a duplicate key in one object; keep one of them")
        for path in duplicates
    ]


def read_json_object(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Reads a file that contains one JSON object, as `parse_json` does.

    Raises:
        JsonSyntaxError: it cannot be read, is not JSON or is not an object.
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
            f"{path} must contain one JSON object {{...}}, and contains {describe_value(value)}"
        )
    return value, problems


def describe_value(value: Any) -> str:
    """A JSON value and its type, such as `"16" (a string)`, for error messages."""
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return f"{shown} ({_TYPE_NAMES.get(type(value), type(value).__name__)})"


def _refuse_constant(name: str) -> NoReturn:
    raise JsonSyntaxError(f"{name} is not a JSON number; write a finite number")


def _with_dicts(value: Any, path: KeyPath, duplicates: list[KeyPath]) -> Any:
    """`value` with a dict for each object. Adds the path of each duplicate key to `duplicates`."""
    if isinstance(value, list) and len(path) >= _DEEPEST:
        raise JsonSyntaxError(_TOO_DEEP)
    if isinstance(value, _Pairs):
        result: dict[str, Any] = {}
        for key, inner in value:
            plain = _with_dicts(inner, (*path, key), duplicates)
            if key in result:
                duplicates.append((*path, key))
            result[key] = plain
        return result
    if isinstance(value, list):
        return [_with_dicts(each, (*path, i), duplicates) for i, each in enumerate(value)]
    return value


def _describe_syntax_error(text: str, error: json.JSONDecodeError) -> str:
    lines = text.splitlines()
    line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    shown = f", in `{line[:70]}`" if line else ""
    return f"line {error.lineno}, column {error.colno}: {error.msg}{shown}{_hint(text, error.pos)}"


def _hint(text: str, position: int) -> str:
    """A fix for common mistakes, such as the syntax of hjson or of Python."""
    if not text.strip():
        return " (the text is empty)"
    here = text[position:].lstrip()
    if here.startswith(("//", "/*", "#")):
        return " (JSON has no comments)"
    if here.startswith(("}", "]")) and text[:position].rstrip().endswith(","):
        return " (JSON has no comma after the last entry)"
    if here.startswith(("True", "False", "None")):
        return " (JSON has true, false and null)"
    if here.startswith("'"):
        return ' (JSON has double quotes around strings: ")'
    return ""
