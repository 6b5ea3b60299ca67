"""The arithmetic of "equal": it is relative to the reference, and NaN equals nothing."""

import json
import math
from typing import Any

import pytest
import torch

from megaspeed.measurement.verification.comparison import (
    Comparison,
    Difference,
    compare_gradients,
    compare_numbers,
    gradient_table,
    step_table,
    verdict,
    widened_tolerances,
)
from megaspeed.units import show


def difference(
    relative: float, *, name: str = "loss of step 1", allowed: float = 1e-6
) -> Difference:
    return Difference(name, parallel=1.0, reference=1.0, relative=relative, allowed=allowed)


def comparison(
    *losses: Difference, weights_bitwise_equal: bool = True, copies_differ_by: float = 0.0
) -> Comparison:
    return Comparison(
        losses=list(losses),
        grad_norms=[difference(0.0, name="gradient norm of step 1", allowed=1e-5)],
        gradients=[],
        weights_bitwise_equal=weights_bitwise_equal,
        copies_differ_by=copies_differ_by,
    )


def test_a_number_differs_relative_to_the_reference() -> None:
    first, second = compare_numbers("loss", [4.5, 2.0], [4.0, 2.0], allowed=[0.1, 0.1])
    assert (first.name, first.parallel, first.reference) == ("loss of step 1", 4.5, 4.0)
    assert first.relative == 0.5 / 4.0 and not first.equal
    assert second.relative == 0.0 and second.equal


def test_the_limit_itself_is_equal_and_the_next_float_is_not() -> None:
    assert difference(1e-6).equal
    assert not difference(math.nextafter(1e-6, 1.0)).equal


@pytest.mark.parametrize(
    ("parallel", "reference"),
    [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan), (math.inf, math.inf), (1.0, 0.0)],
)
def test_numbers_that_cannot_be_compared_are_different(parallel: float, reference: float) -> None:
    (only,) = compare_numbers("loss", [parallel], [reference], allowed=[1e9])
    assert not only.equal
    assert not comparison(only).equal


def test_nothing_equals_nothing() -> None:
    (only,) = compare_numbers("gradient norm", [0.0], [0.0], allowed=[0.0])
    assert only.equal


def test_runs_of_different_length_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare_numbers("loss", [1.0], [1.0, 2.0], allowed=[1.0, 1.0])


def test_a_gradients_difference_is_a_norm_over_a_norm() -> None:
    reference = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]])}
    parallel = {"w": torch.tensor([[3.0, 0.0], [0.3, 4.4]])}
    (only,) = compare_gradients(parallel, reference, allowed=0.1 + 1e-6)
    assert only.reference == 5.0
    assert only.relative == pytest.approx(0.5 / 5.0, rel=1e-6) and only.equal


def test_one_element_that_is_not_a_number_makes_a_gradient_different() -> None:
    reference = {"w": torch.ones(1000)}
    parallel = {"w": torch.ones(1000)}
    parallel["w"][7] = math.nan
    (only,) = compare_gradients(parallel, reference, allowed=1e9)
    assert not only.equal


@pytest.mark.parametrize(
    ("parallel", "reference"),
    [
        ({}, {"w": torch.ones(2)}),
        ({"w": torch.ones(2)}, {}),
        ({"w": torch.ones(2)}, {"w": torch.ones(2, 1)}),
        ({"w": torch.full((2,), 1e-30)}, {"w": torch.zeros(2)}),
    ],
    ids=["missing", "too many", "another shape", "should be zero"],
)
def test_a_gradient_without_a_counterpart_is_infinitely_different(
    parallel: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    (only,) = compare_gradients(parallel, reference, allowed=1e9)
    assert only.relative == math.inf


def test_gradients_that_are_zero_on_both_sides_are_equal() -> None:
    (only,) = compare_gradients({"b": torch.zeros(3)}, {"b": torch.zeros(3)}, allowed=0.0)
    assert only.equal


def test_copies_of_the_same_weight_must_be_equal() -> None:
    assert comparison(difference(0.0)).equal
    assert not comparison(difference(0.0), copies_differ_by=1e-9).equal
    assert not comparison(difference(0.0), copies_differ_by=math.inf).equal


def test_weights_must_be_equal_bit_by_bit() -> None:
    assert comparison(difference(0.0)).equal
    unequal = comparison(difference(0.0), weights_bitwise_equal=False)
    assert not unequal.equal
    assert verdict(unequal) == "DIFFERENT: the initial weights are not bitwise equal"


def test_the_largest_difference_is_relative_to_its_limit() -> None:
    near = difference(9e-7, name="near its limit", allowed=1e-6)
    far = difference(5e-6, name="larger, but allowed more", allowed=1e-5)
    assert comparison(far, near).largest is near
    assert verdict(comparison(far, near)) == (
        "EQUAL: initial weights bitwise equal; largest difference: near its limit, relative "
        "9.0e-07 (1e-06 allowed)"
    )


def test_a_nan_is_the_largest_difference() -> None:
    nan = difference(math.nan, name="not a number")
    assert comparison(difference(1.0), nan, difference(2.0)).largest is nan
    assert verdict(comparison(nan)).startswith("DIFFERENT: ")


def of_two_steps(
    *, first: float = 0.0, second: float = 0.0, allowed: float = 1e-5, **changes: Any
) -> Comparison:
    values: dict[str, Any] = {
        "losses": [difference(first), difference(second, allowed=allowed)],
        "grad_norms": [difference(0.0), difference(0.0)],
        "gradients": [],
        "weights_bitwise_equal": True,
        "copies_differ_by": 0.0,
    }
    return Comparison(**{**values, **changes})


def test_only_later_steps_can_be_allowed_more() -> None:
    assert of_two_steps(second=1.0).differs_only_after_step_1
    assert of_two_steps(second=math.nan).differs_only_after_step_1
    assert not of_two_steps().differs_only_after_step_1, "nothing differs"
    for also_wrong in (
        {"first": 1.0},
        {"gradients": [difference(1.0)]},
        {"grad_norms": [difference(1.0), difference(0.0)]},
        {"weights_bitwise_equal": False},
        {"copies_differ_by": 1e-9},
    ):
        assert not of_two_steps(second=1.0, **also_wrong).differs_only_after_step_1


def test_a_wider_tolerance_is_reported() -> None:
    assert widened_tolerances(of_two_steps(allowed=1e-6)) == []
    assert widened_tolerances(of_two_steps(allowed=3.4e-5)) == [
        "losses: 1e-06 allowed at step 1, up to 3.4e-05 from step 2 on: 16 times the largest "
        "difference in one process if only the order of the samples in each step changes"
    ]
    (at_the_cap,) = widened_tolerances(of_two_steps(allowed=1e-4))
    assert at_the_cap.endswith(", limited to 100 times the tolerance of step 1")


def test_the_json_of_a_diverged_run_has_only_numbers_of_json() -> None:
    result = comparison(difference(math.nan), difference(math.inf)).as_json()
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text)["equal"] is False
    assert [loss["relative"] for loss in result["losses"]] == [None, None]


def test_the_tables_mark_what_is_beyond_its_limit_and_cut_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    weight, long_name = torch.ones(4), "blocks.103.attention.output.weight"
    result = Comparison(
        losses=compare_numbers("loss", [12.34567, 4.5], [12.34568, 4.0], allowed=[0.1, 0.1]),
        grad_norms=compare_numbers(
            "gradient norm", [1.234567e-05, 1.0], [1.234568e-05, 1.0], allowed=[0.1, 0.1]
        ),
        gradients=compare_gradients(
            {"w": weight, long_name: weight * 1.234567e-07},
            {"w": weight, long_name: weight * 2.345678e-07},
            allowed=0.1,
        ),
        weights_bitwise_equal=True,
        copies_differ_by=0.0,
    )
    show([step_table(result), gradient_table(result)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("\u2026" in line for line in lines)
    cells = [line.split() for line in lines]
    assert ["2", "4.5", "4", "1.2e-01", "!", "1", "1", "0.0e+00"] in cells
    assert ["w", "2", "2", "0.0e+00"] in cells
    assert [long_name, "2.469134e-07", "4.691356e-07", "4.7e-01", "!"] in cells
