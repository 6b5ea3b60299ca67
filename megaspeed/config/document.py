"""Merges a config file, the files that it extends and the overrides into one tree."""

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

# How one set of keys is laid over another: RFC 7396, JSON Merge Patch.
#
# Objects merge key by key, anything else replaces what was there, and null takes an inherited key
# away, so that a file can get rid of what the file it extends has set:
#
#     base   {"scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": true}}
#     patch  {"scheduler": null,                 "bf16": {"check_grad_overflow": false}}
#     gives  {"bf16": {"enabled": true, "check_grad_overflow": false}}
#
# One difference: a null where nothing was inherited is kept, because our optional fields take null.


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `patch` laid over it; neither is changed."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def paths_in(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value in a tree of objects, containers included."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths_in(inner, (*path, key))


# `--set key.path=value`: one change to the JSON from the command line.

ORIGIN = "--set"
"""The name of an override in an error message that states where a value came from."""

_NO_VALUE = "write key.path=value, for example --set parallel.tensor=2"
_MOST_KEYS = 16
_SHOWN_CHARACTERS = 200


def add_config_options(parser: ArgumentParser) -> None:
    """Add `--config` and `--set`, as `options.config` and `options.overrides`."""
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


def parse_override(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Turn `a.b=value` into `{"a": {"b": value}}`.

    The value is parsed as JSON (`2`, `true`, `[0.9, 0.95]`, `{"stage": 3}`). If it is not JSON, it
    is a plain string (`runs/first`). Quote a string that would be parsed as JSON: `'"16"'`.
    """
    path, equals, value_text = text.partition("=")
    keys = path.split(".")
    shown = f"--set {_short(text)}"
    wrong = _problem_of_path(path, keys) if equals else _NO_VALUE
    if wrong is not None:
        return {}, [Problem((), f"{shown}: {wrong}")]
    tree, duplicates = _parse_value(value_text)
    for key in reversed(keys):
        tree = {key: tree}
    return tree, [
        Problem((*keys, *problem.path), f"{shown}: {problem.message}") for problem in duplicates
    ]


def _problem_of_path(path: str, keys: list[str]) -> str | None:
    if len(keys) > _MOST_KEYS:
        return f"the key path has {len(keys):,} parts, and no key has more than {_MOST_KEYS}"
    if any(not key or key != key.strip() for key in keys):
        return f"the key path {_short(path)!r} has an empty part or a space"
    if keys[0] == "extends":
        return "extends belongs in the file; set the keys themselves"
    return None


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _parse_value(text: str) -> tuple[Any, list[Problem]]:
    try:
        return parse_json(text)
    except JsonSyntaxError:
        return text, []


_LONGEST_CHAIN = 32
"""Files that extend each other, the first one included."""


@dataclass(frozen=True)
class Document:
    """The keys of a run before they are checked, and where each came from."""

    values: dict[str, Any]
    problems: tuple[Problem, ...] = ()
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    """Where a value comes from, if not from the config file itself: a path or `--set`."""
    is_complete: bool = True
    """False if a file could not be read, so missing keys are not the user's mistake."""


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a config file and all files that it extends, and apply the overrides."""
    document = _read_chain(path, chain=(), root=path)
    values, problems, origins = document.values, list(document.problems), dict(document.origins)
    for text in overrides:
        tree, found = parse_override(text)
        problems += found
        values = merge(values, tree)
        origins |= dict.fromkeys(paths_in(tree), ORIGIN)
    return Document(values, tuple(problems), origins, document.is_complete)


def _read_chain(path: Path, chain: tuple[Path, ...], root: Path) -> Document:
    """Merge this file over the file that it extends; `chain` has the files that extend it."""
    problem = file_problem(path)
    if problem is not None:
        return _unreadable(_missing_file(path, chain, problem))
    if path.resolve() in [earlier.resolve() for earlier in chain]:
        circle = " -> ".join(str(file) for file in (*chain, path))
        return _unreadable(f"extends forms a cycle: {circle}; remove one of them")
    if len(chain) == _LONGEST_CHAIN:
        return _unreadable(
            f"the chain of extends that begins at {chain[0]} must have at most {_LONGEST_CHAIN} "
            f"files, and {path} is one more; merge some of them"
        )
    try:
        values, found = read_json_object(path)
    except JsonSyntaxError as error:
        return _unreadable(str(error))
    problems = tuple(_in_file(problem, path, root) for problem in found)
    values.pop("$schema", None)
    parent = values.pop("extends", None)
    own_origins = {} if path == root else dict.fromkeys(paths_in(values), str(path))
    if parent is None:
        return Document(values, problems, own_origins)
    unusable = path_problem(parent) if isinstance(parent, str) else "wanted the path of one file"
    if not isinstance(parent, str) or unusable is not None:
        message = f"extends: given {describe_value(parent)}, {unusable}"
        wrong = _in_file(Problem(("extends",), message), path, root)
        return Document(values, (*problems, wrong), own_origins, is_complete=False)
    base = _read_chain(path.parent / parent, (*chain, path), root)
    own = set(paths_in(values))
    inherited = {path: origin for path, origin in base.origins.items() if path not in own}
    return Document(
        merge(base.values, values),
        (*base.problems, *problems),
        {**inherited, **own_origins},
        base.is_complete,
    )


def _unreadable(message: str) -> Document:
    return Document({}, (Problem((), message),), is_complete=False)


def _in_file(problem: Problem, path: Path, root: Path) -> Problem:
    """Add the file's name to the message, unless it is the file that the user named."""
    return problem if path == root else Problem(problem.path, f"{problem.message} (in {path})")


def _missing_file(path: Path, chain: tuple[Path, ...], problem: str) -> str:
    asked = f", which {chain[-1]} extends," if chain else ""
    if os.path.isdir(path):
        return f"{path}{asked} is a folder; name a JSON file in it"
    if os.path.lexists(path):
        return f"{path}{asked} {problem}; name a JSON file"
    siblings = sorted(file.name for file in path.parent.glob("*.json"))
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"; did you mean {path.parent / nearest[0]}?" if nearest else ""
    return f"{path}{asked} {problem}{hint}"
