"""Figures as JSON values: dataclasses as objects, infinite numbers as null."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


def json_value(value: Any) -> Any:
    """Return the value as JSON: a dataclass as an object of its fields, a range as its ends."""
    if is_dataclass(value):
        return picked(value, *(field.name for field in fields(value)))
    if isinstance(value, Mapping):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, list | tuple):
        return list(map(json_value, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def picked(source: object, *names: str) -> dict[str, Any]:
    """Return these fields and properties of an object as JSON values."""
    return {name: json_value(getattr(source, name)) for name in names}
