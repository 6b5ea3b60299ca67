"""`--set key.path=value`: one change to the JSON from the command line."""

from argparse import ArgumentParser
from typing import Any

from megaspeed.config.errors import Problem
from megaspeed.config.strict_json import JsonSyntaxError, parse_json
from megaspeed.files.paths import path_argument

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
