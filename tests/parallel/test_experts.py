"""A mixture of experts trains like one process at every layout.

The single process replays the choices of the ranks. In fp32, they must equal its own: no choice is
flipped. It computes the auxiliary loss with autograd, and the biases from its own counts.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.comparison import Comparison
from megaspeed.measurement.verification.verify import ParallelRun, train_rank
from megaspeed.model.experts import Experts
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import StepInputs, Worker
from tests.model.tiny_gpt import initialized
from tests.parallel.covering import EXPERTS, Row, pairs_of, possible_pairs, rows_of
from tests.parallel.expert_mistakes import LOSS_SCALE, the_auxiliary_loss_lacks_the_scale_of_fp16
from tests.parallel.few_rows import train_with_few_rows
from tests.parallel.references import (
    FEW_STEPS,
    TEXT,
    References,
    train_and_compare,
    train_rank_in_fp16,
)
from tests.parallel.runs_of_rows import run_of
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16_IN_FP32, MOE, tiny_corpus, tiny_run

ROWS = rows_of(EXPERTS)
BALANCED: dict[str, Any] = {**MOE, "router_aux_loss_coef": 0.1, "router_bias_rate": 0.01}


def name_of(row: Row) -> str:
    return "-".join(map(str, (*row["layout"], *list(row.values())[1:])))


def test_every_possible_pair_of_settings_is_covered() -> None:
    assert possible_pairs(EXPERTS) == set().union(*map(pairs_of, ROWS))
    assert len(ROWS) <= 23


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_experts_equal_one_process(
    row: Row, pool: RankPool, references: References, documents: Path
) -> None:
    run = run_of(row, documents)
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest
    assert comparison.flipped == 0 < comparison.choices
    exact = {difference.name: difference.relative for difference in comparison.experts[:2]}
    assert exact == {"biases of routers": 0.0, "tokens of each expert": 0.0}
    has_loss = run.config.model.router_aux_loss_coef > 0.0
    assert len(comparison.auxiliary_losses) == FEW_STEPS * has_loss


@pytest.mark.parametrize(
    ("exchange", "layout"),
    [("all_to_all", {"pp": 2, "dp": 2, "cp": 2}), ("all_gather", {"dp": 2, "tp": 2})],
)
def test_two_runs_of_a_layout_have_the_same_bits(
    pool: RankPool, references: References, exchange: str, layout: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {
        "parallel": {"expert": 4, "expert_exchange": exchange},
        "zero_optimization": {"stage": 2},
    }
    run = tiny_run(TEXT, **layout, model=BALANCED, **changes)
    corpus = tiny_corpus(run, references.cache)
    ranks = run.grid.world_size
    first, second = (pool.run(ranks, train_rank, run, corpus, FEW_STEPS)[0] for _ in range(2))
    assert first is not None and second is not None
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


# --- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "cp": 2},
        {"dp": 2, "tp": 2, "parallel": {"expert": 2, "expert_exchange": "all_gather"}},
        {"dp": 2, "tp": 2, "parallel": {"expert": 4, "expert_exchange": "all_to_all"}},
    ],
    ids=["cp", "tp-all_gather", "tp-all_to_all"],
)
def test_bf16_stays_within_its_bound_although_choices_are_flipped(
    pool: RankPool, references: References, layout: dict[str, Any]
) -> None:
    # Weights are large, so that scores differ. With a context or a tensor axis, attention rounds
    # differently.
    model = {**BALANCED, "initializer_range": 0.2}
    changes: dict[str, Any] = {"model": model, "zero_optimization": {"stage": 3}, **BF16_IN_FP32}
    run = tiny_run(TEXT, **layout, **changes)
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.equal, comparison.largest
    assert 0 < comparison.flipped < comparison.choices / 50
    *_, first, later = comparison.experts
    assert first.relative <= later.relative <= first.allowed


def train_without_the_scale_of_fp16(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    with the_auxiliary_loss_lacks_the_scale_of_fp16():
        return train_rank_in_fp16(launch, run, corpus, steps)


def test_the_auxiliary_loss_has_the_scale_of_fp16(pool: RankPool, references: References) -> None:
    fp16 = {"enabled": True, "loss_scale": LOSS_SCALE}
    zero = {"stage": 1}
    layout: dict[str, Any] = {"pp": 2, "dp": 2, "device_type": "cuda"}
    run = tiny_run(TEXT, **layout, model=BALANCED, fp16=fp16, zero_optimization=zero)

    def comparison(train: Any) -> Comparison:
        return train_and_compare(pool, references, run, FEW_STEPS, train)

    right, wrong = comparison(train_rank_in_fp16), comparison(train_without_the_scale_of_fp16)
    assert right.equal, right.largest
    routers = [each for each in wrong.gradients if each.name.endswith("mlp.router.weight")]
    assert all(each.relative > 10 * each.allowed for each in routers) and len(routers) == 3


# --- memory ---------------------------------------------------------------------------------------


def tensors_after_steps(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> list[int]:
    """Return how many tensors there are after the second step, and after the fourth."""
    counts = []
    with ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context:
        worker, inputs = Worker(run, context), StepInputs(run, corpus, context)
        for step in range(4):
            worker.train_step(inputs.load(0), learning_rate=1e-3)
            if step % 2:
                gc.collect()
                counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
    return counts


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_a_recomputed_block_frees_what_it_has_kept(
    pool: RankPool, references: References, exchange: str
) -> None:
    """With gloo, a collective refers to the checkpoint in which it was started. If a block kept the
    collective, both would be in a cycle that Python cannot free.
    """
    parallel: dict[str, Any] = {"expert": 2, "expert_exchange": exchange}
    parallel["activation_checkpointing"] = "full"
    run = tiny_run(TEXT, dp=2, model=BALANCED, parallel=parallel)
    for before, after in pool.run(2, tensors_after_steps, run, tiny_corpus(run, references.cache)):
        assert after < before + 10


# --- ranks and experts without tokens -------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_a_rank_may_receive_one_row_or_none(
    pool: RankPool, references: References, exchange: str, recomputation: str
) -> None:
    parallel: dict[str, Any] = {"expert": 4, "expert_exchange": exchange}
    parallel["activation_checkpointing"] = recomputation
    run = tiny_run(TEXT, dp=4, model=BALANCED, parallel=parallel, gradient_accumulation_steps=3)
    found = train_and_compare(pool, references, run, FEW_STEPS, train_with_few_rows)
    # One process would choose otherwise.
    assert found.flipped > 0
    numbers = [*found.losses, *found.grad_norms, *found.gradients, *found.auxiliary_losses]
    assert all(each.relative <= each.allowed for each in numbers)
    assert found.copies_differ_by == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_without_tokens_gets_a_gradient_of_zero(dtype: torch.dtype) -> None:
    config = tiny_run(TEXT, model=MOE).config.model
    model = initialized(config, seed=2).to(dtype)
    bias = torch.zeros(8)
    bias[[0, 3, 7]] = -1.0  # scores are between 0 and 1
    experts = [block.mlp for block in model.blocks.values() if isinstance(block.mlp, Experts)]
    assert len(experts) == 3
    for each in experts:
        each.bias = bias
    model(torch.randint(301, (2, 16))).float().square().sum().backward()
    for matrices in (module for each in experts for module in (each.gate_up, each.down)):
        assert isinstance(matrices.weight, Tensor) and matrices.weight.grad is not None
        gradients = matrices.weight.grad.view(8, -1)
        assert gradients.isfinite().all()
        assert gradients.ne(0.0).any(dim=1).tolist() == (bias == 0.0).tolist()
