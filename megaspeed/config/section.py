"""What every section of the JSON has in common: immutable, closed to unknown keys, no coercion."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """One object of the JSON.

    `strict` means that "16" is not 16 and true is not 1. A list is accepted where a tuple is
    declared, because JSON has no tuples (those fields say `strict=False`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _whole_number(value: Any) -> Any:
    """5e8 is how everybody writes bucket sizes, and JSON reads that as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_boolean(value: Any) -> Any:
    """True == 1, so that a list of allowed numbers would let true pass."""
    if isinstance(value, bool):
        raise ValueError("a whole number")
    return value


ElementCount = Annotated[int, BeforeValidator(_whole_number)]
"""A number of tensor elements; 5e8 may be written for 500000000."""

LARGEST_COUNT = 10**9
"""Of layers, heads, widths, ranks: beyond it, messages that list divisors would take for ever."""

NoBoolean = BeforeValidator(_no_boolean)
"""Marks a field that lists allowed numbers, so that a boolean is refused."""
