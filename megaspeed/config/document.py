"""Read config files strictly, and merge a file, what it extends and the overrides into one tree.

Syntax errors have a line and a column, and duplicate keys are errors. (Python's own reader keeps
the last of two equal keys without a warning, and accepts NaN.)
"""

import difflib
import json
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.files.paths import file_problem, path_argument, path_problem, read_file

_MOST_KEYS = 16
_SHOWN_CHARACTERS = 200
_DEEPEST = 64
_LENGTHS = ("steps", "tokens")  # of the section training
_TOO_DEEP = f"it is nested too deeply: objects and lists must be at most {_DEEPEST} levels deep"

_TYPE_NAMES = {
    bool: "a boolean",
    int: "a whole number",
    float: "a decimal number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Document:
    """The values of a run before they are checked."""

    values: dict[str, Any]  # the merged JSON
    problems: tuple[Problem, ...] = ()  # what is wrong with the files and the overrides
    # Where each value comes from: a path, ``--set``, or "" for the config file itself.
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    is_complete: bool = True  # False if a file could not be read. Then missing keys are no mistake.


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a config file and all files that it extends, and apply the overrides."""
    problems: list[Problem] = []
    trees: list[tuple[str, dict[str, Any]]] = []  # each with its origin; the first is extended
    files: list[Path] = []
    file, wrong = path, None
    while True:
        try:
            values, found = _read_values(file, files)
        except ValueError as error:
            wrong = str(error)
            problems.append(Problem((), wrong))
            break
        values.pop("$schema", None)
        extended = values.pop("extends", None)
        wrong = _problem_of_extends(extended)
        found += [] if wrong is None else [Problem(("extends",), wrong)]
        place = f" (in {file})" if files else ""
        problems += [Problem(each.path, f"{each.message}{place}") for each in found]
        trees.insert(0, (str(file) if files else "", values))
        files.append(file)
        if wrong is not None or extended is None:
            break
        file = file.parent / extended
    for text in overrides:
        tree, found = parse_override(text)
        problems += found
        trees.append(("--set", tree))
    merged: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for origin, tree in trees:
        merged = merge(merged, tree)
        origins |= dict.fromkeys(paths_in(tree), origin)
    return Document(merged, tuple(problems), origins, is_complete=wrong is None)


def add_config_options(parser: ArgumentParser) -> None:
    """Add ``--config`` and ``--set``, as ``options.config`` and ``options.overrides``."""
    text = "the run's JSON file; if this is the first argument, --config may be omitted"
    parser.add_argument("--config", required=True, type=path_argument, help=text)
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="key.path=value",
        help="replace single values of the file",
    )


def with_config_option(words: Sequence[str]) -> Sequence[str]:
    """Return a command line with ``--config`` before its first word, unless that is an option."""
    count = sum(word.startswith("--local") for word in words[:1])  # deepspeed's --local_rank=0
    first = words[count : count + 1]
    is_file = bool(first) and not first[0].startswith("-")
    return [*words[:count], *["--config"] * is_file, *words[count:]]


def with_hint(message: str) -> str:
    """Return an error of a command line. If a key is used as an option, add how to state it."""
    key = re.search(r"^unrecognized .*?(\w+\.[\w.]+)[= ](\S+)", message)
    return message if key is None else f"{message}; a key is stated with --set {key[1]}={key[2]}"


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``patch`` applied as a JSON Merge Patch (RFC 7396); neither is changed.

    Objects are merged key by key, other values are replaced, and null removes an inherited key:

        base   {"scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": true}}
        patch  {"scheduler": null,                 "bf16": {"check_grad_overflow": false}}
        gives  {"bf16": {"enabled": true, "check_grad_overflow": false}}

    Unlike in RFC 7396, null stays if there is nothing to remove, because some fields accept it.
    The length of a run has two keys. A patch that states one of them replaces both.
    """
    replaced = _LENGTHS if any(patch.get(key) is not None for key in _LENGTHS) else ()
    merged = {key: value for key, value in base.items() if key not in replaced}
    for key, value in patch.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Convert ``a.b=value`` to ``{"a": {"b": value}}``.

    The value is JSON (``2``, ``true``, ``[0.9, 0.95]``, ``{"stage": 3}``). If it is not JSON, it is
    a string (``runs/first``). A string that would be read as JSON needs quotes: ``'"16"'``.
    """
    path, equals, value_text = text.partition("=")
    keys = path.split(".")
    shown = f"--set {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}"
    wrong = ""
    if not equals or any(not key or key != key.strip() for key in keys):
        wrong = "write key.path=value, for example --set parallel.tensor=2"
    elif len(keys) > _MOST_KEYS:
        wrong = f"a key path must have at most {_MOST_KEYS} parts, but this has {len(keys):,}"
    elif keys[0] == "extends":
        wrong = "extends belongs in the file; set the keys themselves"
    if wrong:
        return {}, [Problem((), f"{shown}: {wrong}")]
    duplicates: list[Problem] = []
    try:
        tree, duplicates = parse_json(value_text)
    except JsonSyntaxError:
        tree = value_text
    for key in reversed(keys):
        tree = {key: tree}
    return tree, [
        Problem((*keys, *problem.path), f"{shown}: {problem.message}") for problem in duplicates
    ]


def paths_in(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every value in a tree of objects, and of the objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths_in(inner, (*path, key))


def _read_values(file: Path, extended_by: Sequence[Path]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of a file, and its duplicate keys, or raise ValueError."""
    problem = file_problem(file)
    if problem is not None:
        raise ValueError(_missing_file(file, extended_by, problem))
    if any(file.samefile(earlier) for earlier in extended_by):
        cycle = " -> ".join(map(str, (*extended_by, file)))
        raise ValueError(f"extends forms a cycle: {cycle}; remove one of them")
    return read_json_object(file)


def _problem_of_extends(extended: Any) -> str | None:
    """Return why the value of ``extends`` cannot be used; None if it is a path or omitted."""
    if extended is None:
        return None
    wrong = path_problem(extended) if isinstance(extended, str) else "wanted the path of one file"
    return None if wrong is None else f"extends: given {describe_value(extended)}, {wrong}"


def _missing_file(path: Path, extended_by: Sequence[Path], problem: str) -> str:
    extended = f", which {extended_by[-1]} extends," if extended_by else ""
    siblings = sorted(file.name for file in path.parent.glob("*.json"))
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    mend = f"did you mean {path.parent / nearest[0]}?" if nearest else "name a JSON file"
    return f"{path}{extended} {problem}; {mend}"


class JsonSyntaxError(ValueError):
    """The text is not JSON. The message has the line, the column and, if known, a fix."""


class _Pairs(list[tuple[str, Any]]):
    """An object as a list of pairs, which can have the same key twice."""


def parse_json(text: str, *, allow_nan: bool = False) -> tuple[Any, list[Problem]]:
    """Read JSON, with Python's NaN and Infinity if they are allowed, and find duplicate keys.

    Returns:
        The value, with the last of equal keys, and a problem for each duplicate.

    Raises:
        JsonSyntaxError: the text is not JSON.
    """
    duplicates: list[KeyPath] = []
    try:
        read_constant = float if allow_nan else _refuse_constant
        pairs = json.loads(text, object_pairs_hook=_Pairs, parse_constant=read_constant)
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


def read_json_object(path: Path, **options: bool) -> tuple[dict[str, Any], list[Problem]]:
    """Read a file that contains one JSON object, as ``parse_json`` does.

    Raises JsonSyntaxError if it cannot be read, is not JSON or is not an object.
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
        value, problems = parse_json(text, **options)
    except JsonSyntaxError as error:
        raise JsonSyntaxError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise JsonSyntaxError(
            f"{path} must contain one JSON object {{...}}, but it contains {describe_value(value)}"
        )
    return value, problems


def describe_value(value: Any) -> str:
    """Return a JSON value and its type, such as ``"16" (a string)``, for error messages."""
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else text[:57] + "..."
    kind = _TYPE_NAMES.get(type(value), type(value).__name__)
    return shown if value is None else f"{shown} ({kind})"


def _refuse_constant(name: str) -> NoReturn:
    raise JsonSyntaxError(f"{name} is not a JSON number; write a finite number")


def _with_dicts(value: Any, path: KeyPath, duplicates: list[KeyPath]) -> Any:
    """Return ``value`` with a dict for each object, and collect the paths of ``duplicates``."""
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
    return f"line {error.lineno}, column {error.colno}: {error.msg}{shown}"
