"""Whether two trainings are the same: losses, gradient norms, the first step's gradients.

The tolerance after step 1 depends on how much one process changes if its samples are reordered:

    one process, samples in order  --+
                                     +--> distance of each step --> tolerance of each later step
    one process, samples shuffled  --+

Because of rounding, a sum depends on the order of its terms. AdamW divides a gradient by its own
size, so a step can make a rounding difference a hundred times as large, in every layout and also in
one process. Step 1 has no optimizer step before it, so its tolerance stays fixed.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megaspeed.files.json_values import picked
from megaspeed.measurement.verification.experts import ExpertRecord
from megaspeed.model.documents import Documents
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.units import table_of


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that count as equal at step 1."""

    loss: float
    grad_norm: float
    gradient: float


# In fp32, results differ only because sums are rounded in another order. In bf16, which has 8 bits,
# a sum over tensor ranks has roundings that one process does not have. fp16 has 11 bits, so its
# rounding error is 8 times smaller.
TOLERANCES = {
    "fp32": Tolerance(loss=1e-6, grad_norm=1e-5, gradient=1e-5),
    "bf16": Tolerance(loss=1e-3, grad_norm=2e-2, gradient=5e-2),
    "fp16": Tolerance(loss=1e-3 / 8, grad_norm=2e-2 / 8, gradient=5e-2 / 8),
}

TIMES_SHUFFLED = 3
# Measured with ten configurations (GPT-2 and Llama, learning rates 1e-3 to 3e-2) on tp 2,
# pp 2 x tp 2 and pp 2 x dp 2, 14 steps each. If a layout exceeded step 1's tolerance, its distance
# from the reference was at most 6.1 times the largest distance of three shuffled trainings. Layouts
# have larger distances because tensor ranks split every product and so round more often.
FACTOR = 16.0
# This limit finds mistakes even if the training is unstable.
LARGEST_WIDENING = 100.0
# Relative. Two different fp32 numbers, or two different counts of tokens, differ by more than this.
_EXACT = 1e-12


@dataclass(frozen=True)
class Difference:
    """One compared number."""

    name: str  # what is compared
    parallel: float  # the layout's value; for a gradient, its norm
    reference: float  # the value of the single process
    relative: float  # the size of their difference divided by the reference's size
    allowed: float  # largest relative difference that counts as equal

    @property
    def equal(self) -> bool:
        """Whether the difference is allowed; false if it is NaN."""
        return self.relative <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """All compared numbers of two trainings."""

    losses: list[Difference]  # one for each step
    grad_norms: list[Difference]  # one for each step
    gradients: list[Difference]  # of the first step, one for each parameter
    weights_bitwise_equal: bool  # whether the initial weights are bitwise equal
    # Largest absolute difference between the copies that several ranks hold of the same element
    # (tied, replicated), over gradients and weights. It must be 0.
    copies_differ_by: float
    z_losses: list[Difference] = field(default_factory=list)  # one for each step, or none
    # The following fields are for a mixture of experts.
    auxiliary_losses: list[Difference] = field(default_factory=list)  # one for each step, or none
    # Biases, tokens of each expert, and the scores of flipped choices.
    experts: list[Difference] = field(default_factory=list)
    choices: int = 0  # k for each token, block and step
    flipped: int = 0  # how many of them the single process would have made differently

    @property
    def differences(self) -> list[Difference]:
        """Every compared number."""
        steps = [*self.losses, *self.grad_norms, *self.z_losses, *self.auxiliary_losses]
        return [*steps, *self.gradients, *self.experts]

    @property
    def equal(self) -> bool:
        """Whether the trainings are the same."""
        return self._copies_equal and all(d.equal for d in self.differences)

    @property
    def differs_only_after_step_1(self) -> bool:
        """Whether only losses or gradient norms after step 1 differ. Then a larger tolerance for
        later steps could make the trainings equal.
        """
        steps = (self.losses, self.grad_norms, self.z_losses, self.auxiliary_losses)
        first = [difference for each in steps for difference in each[:1]]
        fixed = [*first, *self.gradients, *self.experts]
        return self._copies_equal and all(d.equal for d in fixed) and not self.equal

    @property
    def _copies_equal(self) -> bool:
        return self.weights_bitwise_equal and self.copies_differ_by == 0.0

    @property
    def largest(self) -> Difference:
        """The number whose difference is the largest multiple of its tolerance."""
        return max(
            self.differences,
            key=lambda d: math.inf if math.isnan(d.relative) else d.relative / d.allowed,
        )

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values; null for numbers that are not finite."""
        return {
            **picked(self, "equal", "weights_bitwise_equal"),
            "copies_equal": self.copies_differ_by == 0.0,
            **picked(self, "largest", "losses", "grad_norms", "gradients"),
            **picked(self, "z_losses", "auxiliary_losses", "experts", "choices", "flipped"),
        }


def compare_numbers(
    name: str, parallel: Sequence[float], reference: Sequence[float], allowed: Sequence[float]
) -> list[Difference]:
    """One difference for each step, with the tolerance of that step."""
    steps = zip(parallel, reference, allowed, strict=True)
    return [
        Difference(f"{name} of step {step}", a, b, relative_difference(a, b), limit)
        for step, (a, b, limit) in enumerate(steps, start=1)
    ]


def compare_gradients(
    parallel: Mapping[str, Tensor], reference: Mapping[str, Tensor], allowed: float
) -> list[Difference]:
    """One difference for each parameter, infinite if one training lacks it."""
    differences = []
    for name in sorted({*parallel, *reference}):
        a, b = parallel.get(name), reference.get(name)
        if a is None or b is None or a.shape != b.shape:
            differences.append(Difference(name, 0.0, 0.0, math.inf, allowed))
            continue
        a, b = a.double(), b.double()
        size = float(b.norm())
        relative = _relative(float((a - b).norm()), size)
        differences.append(Difference(name, float(a.norm()), size, relative, allowed))
    return differences


def compare_experts(
    parallel: ExpertRecord, reference: ExpertRecord, allowed: float
) -> list[Difference]:
    """Compare the experts of both trainings. Without experts, the list is empty.

    The single process has replayed the choices, so biases and counts of tokens must be equal.
    ``allowed`` is the limit for the scores of a flipped choice at step 1. At later steps, the
    weights differ, too, so the limit is 100 times as large. In fp32, only near ties are below it,
    in 16 bits almost all choices.
    """
    if parallel.bias is None or reference.bias is None:
        return []
    own, other = (
        {"biases of routers": bias, "tokens of each expert": torch.tensor(loads)}
        for bias, loads in ((parallel.bias, parallel.loads), (reference.bias, reference.loads))
    )
    name, later = "scores of a flipped choice at", max(reference.gaps)
    return [
        *compare_gradients(own, other, _EXACT),
        Difference(f"{name} step 1", 0.0, 0.0, reference.gaps[0], allowed),
        Difference(f"{name} any step", 0.0, 0.0, later, LARGEST_WIDENING * allowed),
    ]


def relative_difference(number: float, reference: float) -> float:
    """The absolute difference divided by the absolute value of the reference."""
    return _relative(abs(number - reference), abs(reference))


def _relative(difference: float, size: float) -> float:
    """``difference`` / ``size``; infinity if the size is 0 and the difference is not."""
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def shuffled(batch: Sequence[MicroBatch], seed: int) -> list[MicroBatch]:
    """The samples of ``batch`` in another order, drawn from ``seed``. Parts keep their size."""
    tokens = torch.cat([part.tokens for part in batch])
    targets = torch.cat([part.targets for part in batch])
    samples = torch.cat([part.samples for part in batch])
    stated = [part.documents.positions for part in batch if part.documents is not None]
    begins = torch.cat(stated) == 0 if stated else None
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    return [
        MicroBatch(
            tokens=tokens[rows],
            targets=targets[rows],
            samples=samples[rows],
            documents=None if begins is None else Documents.beginning_at(begins[rows]),
        )
        for rows in order.split(len(batch[0].samples))
    ]


def allowed_at_steps(
    base: float, reference: Sequence[float], again: Sequence[Sequence[float]]
) -> list[float]:
    """The tolerance of each step: the largest allowed relative difference.

    Args:
        base: the tolerance of step 1, and the smallest tolerance of later steps.
        reference: one number for each step of one process, such as its loss.
        again: the same numbers from trainings of one process with reordered samples.

    Returns:
        For step t > 1, ``FACTOR`` times the largest relative distance between ``again`` and
        ``reference`` in steps 1 to t, but at least ``base`` and at most ``LARGEST_WIDENING`` times
        ``base``.
    """
    distances = [
        max((relative_difference(run[step], number) for run in again), default=0.0)
        for step, number in enumerate(reference)
    ]
    # Different weights stay different, so the distance of a step also applies to later steps.
    largest = itertools.accumulate(distances, max)
    later = (min(max(base, FACTOR * d), LARGEST_WIDENING * base) for d in largest)
    return [base, *list(later)[1:]]


def step_table(comparison: Comparison) -> Table:
    """Loss and gradient norm of every step, of both trainings, with their relative difference."""
    compared = ("one\nprocess", "difference")
    table = table_of(right=("step", "loss", *compared, "gradient\nnorm", *compared))
    steps = zip(comparison.losses, comparison.grad_norms, strict=True)
    for step, (loss, norm) in enumerate(steps, start=1):
        table.add_row(str(step), *_cells(loss), *_cells(norm))
    return table


def gradient_table(comparison: Comparison) -> Table:
    """The norm of every parameter's gradient at step 1, of both trainings and of the difference."""
    table = table_of(left=("parameter",), right=("norm", "one process", "difference"))
    for gradient in comparison.gradients:
        table.add_row(gradient.name, *_cells(gradient))
    return table


def _cells(difference: Difference) -> tuple[str, str, str]:
    return (
        f"{difference.parallel:.7g}",
        f"{difference.reference:.7g}",
        f"{difference.relative:.1e}{'' if difference.equal else ' !'}",
    )


def widened_tolerances(comparison: Comparison) -> list[str]:
    """A sentence each for losses and gradient norms if later steps have a larger tolerance."""
    sentences = []
    for name, steps in (("losses", comparison.losses), ("gradient norms", comparison.grad_norms)):
        base = steps[0].allowed
        wider = [number for number, step in enumerate(steps, 1) if step.allowed > base]
        if wider:
            most = max(step.allowed for step in steps)
            limited = f", limited to {LARGEST_WIDENING:.0f} times the tolerance of step 1"
            sentences.append(
                f"{name}: {base:.0e} allowed at step 1, up to {most:.1e} from step {wider[0]} on: "
                f"{FACTOR:.0f} times the largest difference in one process if only the order of "
                f"the samples in each step changes{limited * (most >= LARGEST_WIDENING * base)}"
            )
    return sentences


def flipped_choices(comparison: Comparison) -> list[str]:
    """If the model has experts, a sentence that states how many choices are flipped."""
    if not comparison.choices:
        return []
    if not comparison.flipped:
        return [f"of {comparison.choices:,} choices of experts, none is flipped"]
    *_, first, later = comparison.experts
    return [
        f"flipped choices of experts: {comparison.flipped:,} of {comparison.choices:,}; one "
        "process would have chosen other experts by itself, but it used those of the layout; the "
        f"scores of the two experts differ by up to {first.relative:.1e} of the token's largest "
        f"score at step 1 ({first.allowed:.0e} allowed), and {later.relative:.1e} at any step"
    ]


def verdict(comparison: Comparison) -> str:
    """One sentence: equal or not, and the largest difference."""
    if not comparison.weights_bitwise_equal:
        return "DIFFERENT: the initial weights are not bitwise equal"
    if comparison.copies_differ_by != 0.0:
        return (
            "DIFFERENT: copies of the same weights on several ranks must be equal, but differ by "
            f"up to {comparison.copies_differ_by:.1e}"
        )
    largest = comparison.largest
    word = "EQUAL" if comparison.equal else "DIFFERENT"
    return (
        f"{word}: initial weights bitwise equal; largest difference: {largest.name}, relative "
        f"{largest.relative:.1e} ({largest.allowed:.0e} allowed)"
    )
