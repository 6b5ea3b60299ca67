"""Whether two trainings are the same: losses, gradient norms, the first step's gradients."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megaspeed.model.micro_batch import MicroBatch


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that count as equal at step 1.

    ``Amplification`` is what a later step is allowed beyond them.
    """

    loss: float
    grad_norm: float
    gradient: float


# fp32: rounding alone, in another order of summation. bf16 keeps 8 bits, and a sum over tensor
# ranks is rounded where one process rounds nothing. fp16 keeps 11 bits, so it rounds 8 times finer.
TOLERANCES = {
    "fp32": Tolerance(loss=1e-6, grad_norm=1e-5, gradient=1e-5),
    "bf16": Tolerance(loss=1e-3, grad_norm=2e-2, gradient=5e-2),
    "fp16": Tolerance(loss=1e-3 / 8, grad_norm=2e-2 / 8, gradient=5e-2 / 8),
}


@dataclass(frozen=True)
class Difference:
    """One compared number.

    Attributes:
        name: of what is compared.
        parallel, reference: the two values (norms, for a gradient).
        relative: their difference over the reference's size; for a gradient the norm of the
            difference over the norm.
        allowed: largest relative difference that counts as equal.
    """

    name: str
    parallel: float
    reference: float
    relative: float
    allowed: float

    @property
    def equal(self) -> bool:
        """Whether it is within what is allowed; never true of a NaN."""
        return self.relative <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """All compared numbers of two trainings.

    Attributes:
        losses, grad_norms: one for each step.
        gradients: of the first step, one for each parameter.
        weights_bitwise_equal: whether the initial weights are.
        copies_differ_by: largest absolute difference between the copies that several ranks hold of
            the same element (tied, replicated), over gradients and weights; they must be equal.
    """

    losses: list[Difference]
    grad_norms: list[Difference]
    gradients: list[Difference]
    weights_bitwise_equal: bool
    copies_differ_by: float

    @property
    def differences(self) -> list[Difference]:
        """Every compared number."""
        return [*self.losses, *self.grad_norms, *self.gradients]

    @property
    def equal(self) -> bool:
        """Whether the trainings are the same."""
        copies_equal = self.copies_differ_by == 0.0
        return (
            self.weights_bitwise_equal and copies_equal and all(d.equal for d in self.differences)
        )

    @property
    def differs_only_after_step_1(self) -> bool:
        """Whether later losses or gradient norms are all that differs, so that a wider tolerance
        could make the trainings equal.
        """
        first = [*self.losses[:1], *self.grad_norms[:1], *self.gradients]
        sound = self.weights_bitwise_equal and self.copies_differ_by == 0.0
        return sound and all(d.equal for d in first) and not self.equal

    @property
    def largest(self) -> Difference:
        """The number furthest out, as a multiple of what is allowed."""
        return max(
            self.differences,
            key=lambda d: math.inf if math.isnan(d.relative) else d.relative / d.allowed,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, for a file; null for what JSON has no number for."""
        return {
            "equal": self.equal,
            "weights_bitwise_equal": self.weights_bitwise_equal,
            "copies_equal": self.copies_differ_by == 0.0,
            "largest": _as_json(self.largest),
            "losses": [_as_json(difference) for difference in self.losses],
            "grad_norms": [_as_json(difference) for difference in self.grad_norms],
            "gradients": [_as_json(difference) for difference in self.gradients],
        }


def compare_numbers(
    name: str,
    parallel: Sequence[float],
    reference: Sequence[float],
    allowed: Sequence[float],
) -> list[Difference]:
    """One difference for each step, each with what that step is allowed."""
    steps = zip(parallel, reference, allowed, strict=True)
    return [
        Difference(f"{name} of step {step}", a, b, relative_difference(a, b), limit)
        for step, (a, b, limit) in enumerate(steps, start=1)
    ]


def compare_gradients(
    parallel: Mapping[str, Tensor], reference: Mapping[str, Tensor], allowed: float
) -> list[Difference]:
    """One difference for each parameter; one that a side lacks is infinitely different."""
    differences = []
    for name in sorted({*parallel, *reference}):
        if (
            name not in parallel
            or name not in reference
            or parallel[name].shape != reference[name].shape
        ):
            differences.append(Difference(name, 0.0, 0.0, math.inf, allowed))
            continue
        a, b = parallel[name].double(), reference[name].double()
        size = float(b.norm())
        relative = _relative(float((a - b).norm()), size)
        differences.append(Difference(name, float(a.norm()), size, relative, allowed))
    return differences


def relative_difference(number: float, reference: float) -> float:
    """Their distance over the size of the reference."""
    return _relative(abs(number - reference), abs(reference))


def _relative(difference: float, size: float) -> float:
    """Only zero equals zero."""
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def _as_json(difference: Difference) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(difference).items()
    }


# How far one process drifts from itself, and what a layout is therefore allowed after step 1.
#
#     one process, samples in order  --+
#                                      +--> distance of each step --> allowed at each later step
#     one process, samples shuffled  --+
#
# A sum depends on the order of its terms, to rounding. AdamW divides a gradient by its own size, so
# a step can turn a rounding difference into one a hundred times as large, in every layout and in
# one process too. Step 1 has no optimizer step before it and is never allowed more.

TIMES_SHUFFLED = 3
# Measured with ten configurations (GPT-2 and Llama, learning rates 1e-3 to 3e-2) on tp 2,
# pp 2 x tp 2 and pp 2 x dp 2, 14 steps each. If a layout exceeded step 1's tolerance, it was at
# most 6.1 times as far from the reference as the furthest of three shuffles. Tensor ranks split
# every product, so they round more often.
FACTOR = 16.0
# A mistake must not hide in an unstable training.
LARGEST_WIDENING = 100.0


def shuffled(batch: Sequence[MicroBatch], seed: int) -> list[MicroBatch]:
    """The same samples in parts of the same size, in another order; a function of ``seed``."""
    tokens = torch.cat([part.tokens for part in batch])
    targets = torch.cat([part.targets for part in batch])
    samples = torch.cat([part.samples for part in batch])
    stated = [part.documents for part in batch if part.documents is not None]
    documents = torch.cat(stated) if stated else None
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))

    def part_of(rows: Tensor) -> MicroBatch:
        return MicroBatch(
            tokens=tokens[rows],
            targets=targets[rows],
            samples=samples[rows],
            documents=None if documents is None else documents[rows],
        )

    return [part_of(rows) for rows in order.split(len(batch[0].samples))]


def allowed_at_steps(
    base: float, reference: Sequence[float], again: Sequence[Sequence[float]]
) -> list[float]:
    """The largest relative difference that each step is allowed.

    Args:
        base: what step 1 is allowed, and every later step at least.
        reference: one number for each step of one process, such as its loss.
        again: the same numbers of trainings of that process with its samples in other orders.

    Returns:
        For step t > 1, ``FACTOR`` times the largest relative distance between ``again`` and
        ``reference`` in steps 1 to t, but at least ``base`` and at most ``LARGEST_WIDENING`` times
        ``base``.
    """
    distances = [
        max((relative_difference(run[step], number) for run in again), default=0.0)
        for step, number in enumerate(reference)
    ]
    # Weights that differ stay different, so a later step inherits an earlier step's distance.
    largest = itertools.accumulate(distances, max)
    later = (min(max(base, FACTOR * d), LARGEST_WIDENING * base) for d in largest)
    return [base, *list(later)[1:]]
