"""Equal bits have equal fingerprints. If a bit or the order changes, the fingerprint changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaspeed.training.replicas import fingerprint

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
TYPES = pytest.mark.parametrize("dtype", INTEGERS)


def values(dtype: torch.dtype, count: int = 1003) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)


def exchanged(bits: Tensor) -> None:
    bits[[3, 700]] = bits[[700, 3]]


def exchanged_neighbours(bits: Tensor) -> None:
    bits[[3, 4]] = bits[[4, 3]]


def cancelling(bits: Tensor) -> None:
    bits[3] += 1
    bits[700] -= 1


def sign_of_the_last(bits: Tensor) -> None:
    bits[-1] ^= torch.iinfo(bits.dtype).min


def signs_of_two(bits: Tensor) -> None:
    bits[[3, 703]] ^= torch.iinfo(bits.dtype).min


def lowest_bit(bits: Tensor) -> None:
    bits[0] ^= 1


@TYPES
@pytest.mark.parametrize(
    "damage",
    [
        exchanged,
        exchanged_neighbours,
        cancelling,
        sign_of_the_last,
        signs_of_two,
        lowest_bit,
    ],
)
def test_damage_changes_it(dtype: torch.dtype, damage: Callable[[Tensor], None]) -> None:
    right = values(dtype)
    wrong = right.clone()
    damage(wrong.view(INTEGERS[dtype]))
    assert not torch.equal(right, wrong)
    for size in (1 << 22, 64):
        assert fingerprint([right], size) != fingerprint([wrong], size)


@TYPES
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    right = values(dtype, 40)
    seen = {float(fingerprint([right], 16))}
    for element in range(40):
        for bit in range(8 * right.element_size()):
            wrong = right.clone()
            integers = wrong.view(INTEGERS[dtype])
            one = torch.tensor(1, dtype=integers.dtype)
            integers[element] ^= one << bit
            seen.add(float(fingerprint([wrong], 16)))
    assert len(seen) == 1 + 40 * 8 * right.element_size()


@TYPES
def test_it_depends_on_the_elements_and_not_on_how_they_are_divided(dtype: torch.dtype) -> None:
    """Two pipeline stages may hold different parts of a tied embedding. Views may be odd."""
    flat = values(dtype)
    parts = [flat[:1], flat[1:1], flat[1:700], flat[700:]]
    for size in (1 << 22, 64):
        assert fingerprint(parts, size) == fingerprint([flat], size)
    assert fingerprint(parts[::-1]) != fingerprint(parts)


def test_nothing_is_changed_and_nothing_may_be_empty() -> None:
    flat = values(torch.float32)
    fingerprint([flat])
    assert torch.equal(flat, values(torch.float32))
    assert fingerprint([flat[:0]]) == 0


def test_exchanged_batches_change_it() -> None:
    flat = values(torch.float32, 128)
    assert fingerprint([flat], 64) != fingerprint([flat[64:], flat[:64]], 64)
