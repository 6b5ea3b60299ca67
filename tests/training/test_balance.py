"""The biases of routers and the loads of experts, worked by hand."""

from typing import Any

import pytest
import torch

from megaspeed.config.model import ModelConfig
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import GPT
from megaspeed.training.balance import Balance, split_sums
from megaspeed.training.resumed_run import model_changes
from tests.checkpoint.written import run_state
from tests.parallel.references import TEXT
from tests.support.tiny import MOE, tiny_run

CPU = torch.device("cpu")


def balance_of(rate: float, chunks: list[range] | None = None) -> tuple[GPT, Balance]:
    config = ModelConfig.model_validate({**MOE, "num_experts": 4, "router_bias_rate": rate})
    model = GPT(config, chunks=chunks)
    return model, Balance(model, config, CPU)


def add_counts(model: GPT, counts: list[list[int]]) -> None:
    for block, own in zip(model.blocks.values(), counts, strict=True):
        experts = block.mlp
        assert isinstance(experts, Experts) and experts.counts is not None
        experts.counts += torch.tensor(own)


def test_the_bias_moves_against_the_load_and_stays_at_the_mean() -> None:
    model, balance = balance_of(0.5)
    add_counts(model, [[6, 2, 4, 4], [4, 4, 4, 4], [16, 0, 0, 0]])
    balance.pop_counts()
    balance.end_step(taken=True)
    assert balance.bias.tolist() == [[-0.5, 0.5, 0, 0], [0] * 4, [-0.5, 0.5, 0.5, 0.5]]
    experts = model.blocks["2"].mlp
    assert isinstance(experts, Experts) and experts.bias is not None
    assert experts.bias.tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_a_skipped_step_moves_nothing_and_its_counts_are_not_used_again() -> None:
    model, balance = balance_of(0.5)
    add_counts(model, [[6, 2, 4, 4]] * 3)
    balance.pop_counts()
    balance.end_step(taken=False)
    assert not balance.bias.any()
    balance.pop_counts()
    balance.end_step(taken=True)
    assert not balance.bias.any()


def test_counts_of_all_ranks_are_added_by_block() -> None:
    """Each pipeline stage holds some of the blocks. The sum over all ranks has all blocks."""
    first, one = balance_of(0.1, chunks=[range(0, 2)])
    second, other = balance_of(0.1, chunks=[range(2, 5)])
    add_counts(first, [[1, 2, 3, 4]])
    add_counts(second, [[5, 6, 7, 8], [9, 10, 11, 12]])
    sums = one.pop_counts() + other.pop_counts()
    loads, auxiliary = split_sums(sums.tolist(), 4)
    assert loads == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert auxiliary == 0.0


def test_a_stage_without_blocks_has_no_counts() -> None:
    """The first stage of two may have the embedding only. In an earlier version, it failed."""
    model, balance = balance_of(0.1, chunks=[range(0, 1)])
    assert not model.blocks
    assert not balance.pop_counts().any()
    balance.end_step(taken=True)
    assert not list(balance.pieces())


@pytest.mark.parametrize(
    ("before", "now", "refused"), [(0.1, 0.2, False), (0.0, 0.1, False), (0.1, 0.0, True)]
)
def test_a_run_may_change_the_rate_of_the_bias_but_not_lose_the_bias(
    before: float, now: float, refused: bool
) -> None:
    model: dict[str, Any] = {**MOE, "router_bias_rate": before}
    saved = run_state(1, config=tiny_run(TEXT, model=model).as_json())
    problems = model_changes(saved, tiny_run(TEXT, model={**model, "router_bias_rate": now}))
    assert bool(problems) == refused
    if refused:
        assert problems[0].startswith("model.router_bias_rate was 0.1 and is 0.0; set it back")
