"""A dataclass as a small sealed file: it is what was written, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from megaspeed.data.errors import DataError
from megaspeed.files.json_values import read_sealed, write_sealed

Record = TypeVar("Record")


def write_record(path: Path, record: object) -> None:
    """Writes it, whole or not at all."""
    write_sealed(path, TypeAdapter(type(record)).dump_python(record, mode="json"))


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The record at ``path``; None where there is nothing.

    Raises:
        DataError: it is not as it was written.
    """
    if not path.exists():
        return None
    facts = read_sealed(path)
    if facts is not None:
        try:
            return TypeAdapter(kind).validate_python(facts)
        except ValidationError:
            pass
    raise DataError(
        f"tokenizing goes on from what it wrote down before, and {path} is not as it was written; "
        "begin anew with --fresh"
    )
