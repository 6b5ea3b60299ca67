"""Gradients are clipped by the norm over all axes, and the norm before clipping is reported.

AdamW hardly depends on the size of its gradients. With an epsilon of 1, far above the gradients,
its update is proportional to them. Then the weights show how much the gradients were clipped.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.measurement.verification.verify import train_rank
from tests.support.rank_pool import RankPool
from tests.support.tiny import merge, tiny_corpus
from tests.zero.one_rank import OFFLOAD, OFFLOAD_ALL, reference_of, small_run

STEPS = 3
LIMIT = 0.05


def proportional_run(text: Path, limit: float, **changes: Any) -> Run:
    proportional = {
        "gradient_clipping": limit,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1.0, "weight_decay": 0.0}},
    }
    return small_run(text, **merge(proportional, changes))


def change(run: Any) -> dict[str, Tensor]:
    """Return how much training moved each weight."""
    return {name: run.weights[name] - run.initial_weights[name] for name in run.weights}


def norm(tensors: dict[str, Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the relative difference over all weights."""
    return norm({name: a[name] - b[name] for name in b}) / norm(b)


def test_the_reference_moves_further_without_a_limit(text: Path, cache: Path) -> None:
    runs = proportional_run(text, LIMIT), proportional_run(text, 0.0)
    clipped, free = (reference_of(run, tiny_corpus(run, cache), STEPS) for run in runs)
    assert clipped.grad_norms[0] == free.grad_norms[0] > 10 * LIMIT
    assert norm(change(free)) > 10 * norm(change(clipped))


@pytest.mark.parametrize(
    ("stage", "offload", "limit"),
    [
        (0, {}, LIMIT),
        (1, {}, LIMIT),
        (1, {}, 0.0),
        (2, OFFLOAD, LIMIT),
        (3, {}, LIMIT),
        (3, OFFLOAD_ALL, 0.0),
    ],
)
def test_the_update_is_the_clipped_one_of_one_process(
    pool: RankPool, text: Path, cache: Path, stage: int, offload: dict[str, Any], limit: float
) -> None:
    zero = {"zero_optimization": {"stage": stage, **offload}}
    run = proportional_run(text, limit, pp=2, dp=2, **zero)
    corpus = tiny_corpus(run, cache)
    parallel = pool.run(4, train_rank, run, corpus, STEPS)[0]
    assert parallel is not None
    reference = reference_of(run, corpus, STEPS)
    assert parallel.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
    assert difference(change(parallel), change(reference)) < 1e-4
