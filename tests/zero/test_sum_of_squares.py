"""The gradient norm sums squares in fp64. If any element is not finite, the sum is not finite."""

import math

import pytest
import torch

from megaspeed.zero.model_states import Fragment
from megaspeed.zero.reductions import OwnedSquares, sum_of_squares


def test_millions_of_equal_numbers_add_up() -> None:
    # A CPU that adds 0.1 squared in fp32, one by one, stops at 2^24 times the summand.
    count = 1 << 25
    squares = sum_of_squares([torch.full((count,), 0.1), torch.full((3,), 2.0)])
    expected = count * float(torch.tensor(0.1).double() ** 2) + 12.0
    assert float(squares) == pytest.approx(expected, rel=1e-9)
    assert squares.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_squared_in_fp64(dtype: torch.dtype) -> None:
    values = torch.full((4,), 300.0, dtype=dtype)  # fp16 cannot represent its square
    assert float(sum_of_squares([values])) == 4 * 300.0**2


def test_of_nothing_it_is_zero() -> None:
    assert float(sum_of_squares([])) == 0.0
    assert float(sum_of_squares([torch.empty(0), torch.empty(0)])) == 0.0


def fragments(values: list[float]) -> list[Fragment]:
    """Return one parameter in two fragments. The second begins at element 2."""
    gradient = torch.tensor(values)
    return [Fragment("weight", 0, gradient[:2]), Fragment("weight", 2, gradient[2:])]


@pytest.mark.parametrize(("owned", "expected"), [(0, 0.0), (1, 1.0), (3, 14.0), (5, 55.0)])
def test_the_leading_elements_that_a_rank_owns_are_counted(owned: int, expected: float) -> None:
    parts = fragments([1.0, 2.0, 3.0, 4.0, 5.0])
    assert float(OwnedSquares(parts, {"weight": owned})()) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4])
def test_a_number_that_is_not_finite_shows_even_if_another_rank_counts_it(
    bad: float, place: int
) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    values[place] = bad
    assert not math.isfinite(float(OwnedSquares(fragments(values), {"weight": 1})()))
