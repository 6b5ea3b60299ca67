"""`--set key.path=value`: one change to the JSON from the command line."""

from argparse import ArgumentParser
from typing import Any

from megaspeed.config.errors import Problem
from megaspeed.config.strict_json import JsonSyntaxError, parse_json
from megaspeed.files.places import named_place

ORIGIN = "--set"
"""How an override is named where an error tells which source a value came from."""


def add_config_options(parser: ArgumentParser) -> None:
    """`--config` and `--set`, alike in every program: `options.config`, `options.overrides`."""
    parser.add_argument("--config", required=True, type=named_place, help="the run's JSON file")
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

    The value is JSON where it can be read as JSON (`2`, `true`, `[0.9, 0.95]`, `{"stage": 3}`), a
    plain string otherwise (`runs/first`). Quote what is a string but reads as JSON: `'"16"'`.
    """
    path, equals, value_text = text.partition("=")
    keys = path.split(".")
    if not equals:
        message = f"--set {text}: write key.path=value, for example --set parallel.tensor=2"
        return {}, [Problem((), message)]
    if any(not key or key != key.strip() for key in keys):
        message = f"--set {text}: the key path {path!r} has an empty part or a space"
        return {}, [Problem((), message)]
    if keys[0] == "extends":
        message = f"--set {text}: extends belongs in the file; set the keys themselves"
        return {}, [Problem((), message)]
    tree, duplicates = _parse_value(value_text)
    for key in reversed(keys):
        tree = {key: tree}
    return tree, [
        Problem((*keys, *problem.path), f"--set {text}: {problem.message}")
        for problem in duplicates
    ]


def _parse_value(text: str) -> tuple[Any, list[Problem]]:
    try:
        return parse_json(text)
    except JsonSyntaxError:
        return text, []
