"""How far one process drifts from itself, and what a layout is therefore allowed after step 1.

    one process, samples in order  --+
                                     +--> distance of each step --> allowed at each later step
    one process, samples shuffled  --+

A sum depends on the order of its terms, to rounding. AdamW divides a gradient by its own size, so a
step can turn a rounding difference into one a hundred times as large, in every layout and in one
process too. Step 1 has no optimizer step before it and is never allowed more.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megaspeed.analysis.verification.comparison import relative_difference
from megaspeed.model.micro_batch import MicroBatch

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
