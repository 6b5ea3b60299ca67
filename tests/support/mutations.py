"""A mistake that tests make in the code, to show that a comparison notices it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], object]) -> Iterator[None]:
    """Replace ``owner.name`` by ``make(owner.name)`` within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield
