"""Converts pydantic's errors to our messages: full path, given value, wanted value."""

import re
from collections import defaultdict
from collections.abc import Mapping, Set
from difflib import get_close_matches
from math import isfinite
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megaspeed.config.errors import MOST_LISTED, KeyPath, Problem, dotted
from megaspeed.config.families import FAMILIES
from megaspeed.config.keys import keys_at, unknown_key
from megaspeed.config.model import DERIVED_FIELDS
from megaspeed.config.presets import PRESETS
from megaspeed.config.scheduler import SCHEDULER_TYPES
from megaspeed.config.strict_json import describe_value

_WANTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "greater_than": "more than {gt:,.12g}",
    "greater_than_equal": "at least {ge:,.12g}",
    "less_than": "less than {lt:,.12g}",
    "less_than_equal": "at most {le:,.12g}",
    "string_too_short": "a string that is not empty",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def translate(error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
    """One problem for each key that is wrong; `values` is the JSON that was refused.

    pydantic gives one error for each branch of a union ("a whole number" or "auto"); they become
    one problem. Errors that only follow from another one are omitted.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = defaultdict(list)
    for detail in error.errors(include_url=False):
        by_path[_path_in_json(detail, values)].append(detail)
    has_bad_preset = ("model", "preset") in by_path
    containers = {path[:length] for path in by_path for length in range(len(path))}
    unknown = 0
    problems = []
    for path, details in by_path.items():
        if has_bad_preset and details[0]["type"] == "missing" and path[0] == "model":
            continue
        if _follows_from_another(path, values) or _follows_from_a_part(details, path, containers):
            continue
        if details[0]["type"] == "extra_forbidden":
            unknown += 1
            # Finding the nearest known key takes a millisecond; only the first are printed.
            known = keys_at(path[:-1], values) if unknown <= MOST_LISTED else []
            problems.append(unknown_key(path, known))
        else:
            problems.append(Problem(path, _message(path, details, values)))
    return problems


def _message(path: KeyPath, details: list[ErrorDetails], values: Mapping[str, Any]) -> str:
    kind = details[0]["type"]
    if kind == "missing" and not isinstance(details[0]["loc"][-1], int):
        return _missing(path)
    if _is_left_out(path, values):
        return f"{dotted(path)} is missing: state it, or name a model.preset"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(path, details[0])
    wanted = " or ".join(dict.fromkeys(_wanted(detail) for detail in _last_of_tuple(details)))
    given = details[0]["input"]
    return f"{dotted(path)}: given {describe_value(given)}, wanted {wanted}{_mend(given, details)}"


def _path_in_json(detail: ErrorDetails, values: Mapping[str, Any]) -> KeyPath:
    """pydantic's location without the names of union branches, which are not in the JSON."""
    path: list[str | int] = []
    here: Any = values
    for part in detail["loc"]:
        if _has(here, part):
            here = here[part]
            path.append(part)
    last = detail["loc"][-1] if detail["loc"] else None
    is_absent = detail["type"] == "missing" or _is_derived(detail["loc"])
    if is_absent and isinstance(last, str) and (not path or path[-1] != last):
        path.append(last)
    return tuple(path)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _last_of_tuple(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """A list that is too short has one error for each missing entry; the last has its length."""
    return details[-1:] if details[0]["type"] == "missing" else details


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        return _choice(str(context["expected"]))
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"a list of {int(detail['loc'][-1]) + 1}"
    template = _WANTED.get(kind)
    return template.format(**context) if template else detail["msg"]


def _choice(expected: str) -> str:
    """pydantic writes Python: 'gpipe' or '1f1b', True."""
    return expected.replace("'", '"').replace("True", "true").replace("False", "false")


def _wrong_tag(path: KeyPath, detail: ErrorDetails) -> str:
    given = detail["input"].get("type") if isinstance(detail["input"], dict) else None
    known = " or ".join(f'"{name}"' for name in SCHEDULER_TYPES)
    if given is None:
        return f"{dotted(path)}.type is missing, wanted {known}"
    return f"{dotted((*path, 'type'))}: given {describe_value(given)}, wanted {known}"


def _missing(path: KeyPath) -> str:
    if path == ("model",):
        return f"model is missing; it needs at least a preset ({', '.join(PRESETS)})"
    if path[0] == "model" and len(path) == 2:
        return f"{dotted(path)} is missing: state it, or name a model.preset such as gpt2"
    return f"{dotted(path)} is missing and has no default"


def _mend(given: Any, details: list[ErrorDetails]) -> str:
    kinds = {detail["type"] for detail in details}
    if isinstance(given, str) and kinds & {"int_type", "float_type"} and _reads_as_number(given):
        return f"; write {given} without quotes"
    if isinstance(given, str) and kinds == {"tuple_type"}:
        return f"; write [{describe_value(given).rpartition(' (')[0]}]"
    if isinstance(given, str) and "bool_type" in kinds and given.lower() in ("true", "false"):
        return f"; write {given.lower()} without quotes"
    if "string_type" in kinds and isinstance(given, int | float):
        return f'; write "{given}" in quotes'
    if isinstance(given, str) and kinds == {"literal_error"}:
        choices = re.findall(r"'([^']*)'", str(details[0]["ctx"]["expected"]))
        nearest = get_close_matches(given, choices, n=1)
        return f'; the nearest is "{nearest[0]}"' if nearest else ""
    return ""


def _reads_as_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _is_derived(location: tuple[str | int, ...]) -> bool:
    return len(location) == 2 and location[0] == "model" and location[1] in DERIVED_FIELDS


def _is_left_out(path: KeyPath, values: Mapping[str, Any]) -> bool:
    """Whether the JSON omits this field, and it is derived from others."""
    return _is_derived(path) and values["model"].get(path[1]) is None


def _follows_from_a_part(
    details: list[ErrorDetails], path: KeyPath, containers: Set[KeyPath]
) -> bool:
    """Whether an error of an object or a list only follows from an error of one of its parts.

    An object with a wrong key is meant to be an object, even if a string is also allowed. A list
    may be too short only because its wrong entries do not count.
    """
    is_consequence = isinstance(details[0]["input"], dict) or details[0]["type"] == "too_short"
    return is_consequence and path in containers


def _follows_from_another(path: KeyPath, values: Mapping[str, Any]) -> bool:
    """Whether a derived field is wrong only because the field that it derives from is wrong."""
    if not _is_left_out(path, values):
        return False
    family = FAMILIES.get(str(values["model"].get("architecture")))
    stated = values["model"].get("mlp") or (family and family.features["mlp"])
    return not (path[1] == "intermediate_size" and stated == "swiglu")
