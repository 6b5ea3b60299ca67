"""The base class of every section of the JSON, field types, and the largest numbers accepted."""

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from megaspeed.files.paths import path_problem


class AbsentKey(AttributeError):
    """A rule reads a key that the config does not have, because its value was wrong."""


class Section(BaseModel):
    """One object of the JSON: immutable, without unknown keys.

    ``strict`` means that "16" is not 16 and that true is not 1. Fields with tuples set
    ``strict=False``, because JSON has lists and no tuples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # with it, a type checker would allow any attribute

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise AbsentKey(f"{type(self).__name__} has no {name}, whose value was wrong")
            return super().__getattr__(name)

    @field_validator("*")
    @classmethod
    def _fits_torch(cls, value: Any) -> Any:
        """Bound fields without their own bound: torch has 64-bit integers and fp32 numbers."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("a whole number of at most 2^63 - 1")
        if isinstance(value, float) and abs(value) > LARGEST_NUMBER:
            raise ValueError(f"a number of at most {LARGEST_NUMBER:g}")
        if isinstance(value, float) and 0 < abs(value) < SMALLEST_NUMBER:
            size = f"0, or a number whose size is at least {SMALLEST_NUMBER:g}"
            raise ValueError(f"{size}: fp32 loses digits of smaller ones")
        return value


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


TOKEN_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _tokens(value: Any) -> Any:
    if not isinstance(value, str):
        return _whole_number(value)
    if re.fullmatch("[0-9]{1,18}([.][0-9]{1,18})?[KMBTkmbt]", value) is None:
        raise ValueError('a whole number, or text such as "300M", "20B" or "1.5T"')
    return round(float(value[:-1]) * TOKEN_UNITS[value[-1].upper()])


def _possible_path(text: str) -> str:
    problem = path_problem(text)
    if problem is not None:
        raise ValueError(f"a path: {problem}")
    return text


ElementCount = Annotated[int, BeforeValidator(_whole_number), Field(le=10**15)]
"""A number of tensor elements. It may be written as 5e8, which JSON reads as a float."""

TokenCount = Annotated[int, BeforeValidator(_tokens, json_schema_input_type=int | str)]
"""A number of tokens. It may be written as "20B"; K, M, B and T are powers of 1,000."""

PathText = Annotated[str, Field(min_length=1), AfterValidator(_possible_path)]
"""A path or a glob that is not empty and that this system can have."""

Bandwidth = Annotated[float, Field(ge=1e-6)]
"""In Gb/s or GB/s. A smaller value is a mistake, and times would be too large for a float."""

# About a hundred times the numbers of large runs. A larger number is a mistake, and computing
# something for each layer, rank or micro-batch would use up all memory.
LARGEST_LAYERS = 10**4
LARGEST_WIDTH = 10**7  # elements of an activation of one token
LARGEST_HEADS = 10**5
LARGEST_EXPERTS = 10**4  # in a block
LARGEST_VOCABULARY = 10**8
LARGEST_LENGTH = 10**8  # tokens of a sequence
LARGEST_WORLD = 10**6  # processes
LARGEST_BATCH = 10**7  # samples of a step
LARGEST_ACCUMULATION = 10**5  # micro-batches of a step
LARGEST_COUNT = 10**9  # anything else
LARGEST_SECONDS = 10**7  # 115 days; system calls cannot wait much longer
LARGEST_NUMBER = 1e20  # of a float; AdamW divides by 1 - beta, and the result must fit fp32
SMALLEST_NUMBER = (
    1.18e-38  # of a float that is not 0; in fp32, smaller ones lose digits or become 0
)
