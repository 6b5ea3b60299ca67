"""Merges a config file, the files that it extends and the overrides into one tree of values."""

import difflib
import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspeed.config.errors import KeyPath, Problem
from megaspeed.config.strict_json import (
    JsonSyntaxError,
    describe_value,
    parse_json,
    read_json_object,
)
from megaspeed.files.paths import path_argument, path_problem
from megaspeed.files.reading import file_problem

_MOST_KEYS = 16
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Document:
    """The values of a run before they are checked.

    Attributes:
        values: the merged JSON.
        problems: what is wrong with the files and the overrides.
        origins: where each value comes from: a path, `--set`, or "" for the config file itself.
        is_complete: False if a file could not be read. Then missing keys are no mistake.
    """

    values: dict[str, Any]
    problems: tuple[Problem, ...] = ()
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    is_complete: bool = True


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Reads a config file and all files that it extends, and applies the overrides."""
    problems: list[Problem] = []
    trees: list[tuple[str, dict[str, Any]]] = []  # each with its origin; a later one is extended
    files: list[Path] = []
    following: Path | None = path
    while following is not None:
        file = following
        origin = str(file) if files else ""
        try:
            values, duplicates = _read_values(file, files)
            following = _extended_file(file, values.pop("extends", None))
        except ValueError as error:
            problems.append(Problem((), str(error)))
            break
        values.pop("$schema", None)
        in_file = f" (in {file})" if origin else ""
        problems += [Problem(each.path, f"{each.message}{in_file}") for each in duplicates]
        trees.append((origin, values))
        files.append(file)
    trees.reverse()
    for text in overrides:
        tree, found = parse_override(text)
        problems += found
        trees.append(("--set", tree))
    merged: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for origin, tree in trees:
        merged = merge(merged, tree)
        origins |= dict.fromkeys(_paths_in(tree), origin)
    return Document(merged, tuple(problems), origins, is_complete=following is None)


def add_config_options(parser: ArgumentParser) -> None:
    """Adds `--config` and `--set`, as `options.config` and `options.overrides`."""
    parser.add_argument("--config", required=True, type=path_argument, help="the run's JSON file")
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="key.path=value",
        help="replace single values of the file",
    )


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `patch` applied as a JSON Merge Patch (RFC 7396); neither is changed.

    Objects are merged key by key, other values are replaced, and null removes an inherited key:

        base   {"scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": true}}
        patch  {"scheduler": null,                 "bf16": {"check_grad_overflow": false}}
        gives  {"bf16": {"enabled": true, "check_grad_overflow": false}}

    Unlike in RFC 7396, null stays if there is nothing to remove, because some fields accept it.
    """
    merged = dict(base)
    for key, value in patch.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Converts `a.b=value` to `{"a": {"b": value}}`.

    The value is JSON (`2`, `true`, `[0.9, 0.95]`, `{"stage": 3}`). If it is not JSON, it is a
    string (`runs/first`). A string that would be read as JSON needs quotes: `'"16"'`.
    """
    path, equals, value_text = text.partition("=")
    keys = path.split(".")
    shown = f"--set {_short(text)}"
    wrong = "write key.path=value, for example --set parallel.tensor=2"
    if equals:
        wrong = _key_path_problem(path, keys)
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


def _key_path_problem(path: str, keys: list[str]) -> str:
    if len(keys) > _MOST_KEYS:
        return f"the key path has {len(keys):,} parts, and no key has more than {_MOST_KEYS}"
    if any(not key or key != key.strip() for key in keys):
        return f"the key path {_short(path)!r} has an empty part or a space"
    if keys[0] == "extends":
        return "extends belongs in the file; set the keys themselves"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _paths_in(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value in a tree of objects, and of the objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from _paths_in(inner, (*path, key))


def _read_values(file: Path, extended_by: Sequence[Path]) -> tuple[dict[str, Any], list[Problem]]:
    """The values of a file, and its duplicate keys. Raises ValueError if there are none."""
    problem = file_problem(file)
    if problem is not None:
        raise ValueError(_missing_file(file, extended_by, problem))
    if any(file.samefile(earlier) for earlier in extended_by):
        cycle = " -> ".join(map(str, (*extended_by, file)))
        raise ValueError(f"extends forms a cycle: {cycle}; remove one of them")
    return read_json_object(file)


def _extended_file(file: Path, parent: Any) -> Path | None:
    """The file that a file extends. Raises ValueError if the value of `extends` is not a path."""
    if parent is None:
        return None
    wrong = path_problem(parent) if isinstance(parent, str) else "wanted the path of one file"
    if wrong is not None:
        raise ValueError(f"extends: given {describe_value(parent)}, {wrong}")
    return file.parent / parent


def _missing_file(path: Path, extended_by: Sequence[Path], problem: str) -> str:
    extended = f", which {extended_by[-1]} extends," if extended_by else ""
    if os.path.isdir(path):
        return f"{path}{extended} is a folder; name a JSON file in it"
    if os.path.lexists(path):
        return f"{path}{extended} {problem}; name a JSON file"
    siblings = sorted(file.name for file in path.parent.glob("*.json"))
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
    return f"{path}{extended} {problem}{hint}"
