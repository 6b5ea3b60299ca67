"""The configuration that is passed to DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.zero.build import deepspeed_json
from tests.support.tiny import tiny_run


def some_run(**changes: Any) -> Run:
    return tiny_run(Path("never read.txt"), **changes)


@pytest.mark.parametrize(("stage", "message"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_zero0_is_stage_1_and_the_others_are_as_they_are(stage: int, message: int) -> None:
    run = some_run(dp=2, zero_optimization={"stage": stage})
    assert deepspeed_json(run)["zero_optimization"]["stage"] == message


@pytest.mark.parametrize(("stage", "samples"), [(0, 4), (1, 12), (2, 12), (3, 12)])
def test_a_batch_is_one_micro_batch_of_every_rank_that_shares_the_partition(
    stage: int, samples: int
) -> None:
    json = deepspeed_json(
        some_run(
            pp=2,
            dp=3,
            train_batch_size=24,
            gradient_accumulation_steps=2,
            zero_optimization={"stage": stage},
        )
    )
    assert json["gradient_accumulation_steps"] == 1
    assert json["train_micro_batch_size_per_gpu"] == 4
    assert json["train_batch_size"] == samples


def test_our_sections_and_the_optimizer_are_kept_from_deepspeed() -> None:
    run = some_run(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    ours = {"model", "parallel", "data", "training", "optimizer", "scheduler"}
    assert ours <= set(run.as_json())
    assert ours & set(deepspeed_json(run)) == set()


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_clipping_is_always_stated_because_deepspeeds_default_is_1(limit: float) -> None:
    assert deepspeed_json(some_run(gradient_clipping=limit))["gradient_clipping"] == limit


def test_what_is_stated_is_passed_on_and_what_has_no_value_is_left_to_deepspeed() -> None:
    stated = {"stage": 3, "sub_group_size": 7}
    zero = deepspeed_json(some_run(zero_optimization=stated))["zero_optimization"]
    assert zero["sub_group_size"] == 7
    assert "stage3_model_persistence_threshold" not in zero


def test_deepspeed_has_no_buckets_and_streams_for_gradients() -> None:
    stated = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}
    zero = deepspeed_json(some_run(zero_optimization=stated))["zero_optimization"]
    assert not zero["overlap_comm"] and not zero["contiguous_gradients"]


def test_offload_keeps_torchs_optimizer_which_needs_no_compiler() -> None:
    offload = {"device": "cpu", "pin_memory": False}
    json = deepspeed_json(some_run(zero_optimization={"stage": 2, "offload_optimizer": offload}))
    assert json["zero_force_ds_cpu_optimizer"] is False
    assert json["zero_optimization"]["offload_optimizer"] == offload
