"""Model states by hand, and those of the ZeRO paper."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.analysis.costs.memory import (
    MemoryBytes,
    elements_of,
    gathered_in_pass,
    local_parameters,
    model_states,
)
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from tests.support.tiny import merge, tiny_run

TEXT = Path(__file__)

# 12 x 36 x 4096^2 parameters of matrices and 50257 x 4096 of tokens: 7.5 billion.
SEVEN_AND_A_HALF_BILLION = {
    "model": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 1024,
    },
    "data": {"train": [str(TEXT)], "sequence_length": 1024},
    "training": {"steps": 1},
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "bf16"},
}


def run_of(changes: dict[str, Any], world_size: int) -> Run:
    config = parse_config(merge(SEVEN_AND_A_HALF_BILLION, changes))
    return resolve_run(config, World(world_size, "test"), name="paper")


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_table_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, Figure 1 and Table 1: 7.5 billion parameters on 64 devices."""
    run = run_of({"zero_optimization": {"stage": stage}}, 64)
    parameters = local_parameters(run, 0)
    assert elements_of(parameters) == pytest.approx(7.5e9, rel=0.01)
    states = model_states(run, parameters)
    # Theirs is for 7.5 billion sharp.
    scaled = states.total * 7.5e9 / elements_of(parameters)
    assert scaled / 1e9 == pytest.approx(gigabytes, rel=0.005)


def states_of(**changes: Any) -> tuple[MemoryBytes, int]:
    run = tiny_run(TEXT, **changes)
    parameters = local_parameters(run, 0)
    return model_states(run, parameters), elements_of(parameters)


# GPT2 of 3 blocks and width 32: two norms a block and the last one, and the biases of attention's
# qkv and output and of the MLP's up and down.
VECTORS = 3 * (4 * 32 + 96 + 32 + 128 + 32) + 2 * 32
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize(
    ("stage", "changes", "parameter", "gradient", "vector", "state"),
    [
        (0, {}, 4, 4, 0, 12),
        (1, {}, 4, 4, 0, 12 / 2),
        (2, {}, 4, 4 / 2, 4, 12 / 2),
        (3, {}, 4 / 2, 4 / 2, 4, 12 / 2),
        (0, BF16, 2, 2, 0, 12),
        (1, BF16, 2, 2, 0, 12 / 2),
        (2, BF16, 2, 2 / 2, 2, 12 / 2),
        (3, BF16, 2 / 2, 2 / 2, 2, 12 / 2),
        (1, {"bf16": {"enabled": True}}, 2, 4, 0, 12 / 2),
        (2, {"bf16": {"enabled": True}}, 2, 4 / 2, 4, 12 / 2),
        (3, {"gradient_accumulation_steps": 1}, 4 / 2, 4 / 2, 0, 12 / 2),
        (2, {"parallel": {"gradient_reduction": "per_step"}}, 4, 4, 0, 12 / 2),
        (3, {"parallel": {"gradient_reduction": "per_step"}}, 4 / 2, 4 + 4 / 2, 0, 12 / 2),
    ],
)
def test_bytes_a_parameter(
    stage: int,
    changes: dict[str, Any],
    parameter: float,
    gradient: float,
    vector: float,
    state: float,
) -> None:
    """``vector``: whether it is a bias or a norm, whose gradients are summed over a step."""
    states, elements = states_of(dp=2, zero_optimization={"stage": stage}, **changes)
    # Padding: at most 4 elements a group, or half an element a parameter.
    assert states.parameters == pytest.approx(parameter * elements, abs=200)
    gradients = gradient * elements + vector * VECTORS
    assert states.gradients == pytest.approx(gradients, abs=200)
    assert states.optimizer_states == pytest.approx(state * elements, abs=1000)


def test_parameters_below_the_threshold_stay_complete_beside_their_partitions() -> None:
    threshold = {"stage": 3, "stage3_param_persistence_threshold": 100}
    states, elements = states_of(dp=2, zero_optimization=threshold)
    none, _ = states_of(
        dp=2, zero_optimization={**threshold, **{"stage3_param_persistence_threshold": 0}}
    )
    # GPT2 of 3 blocks and width 32: two norms a block and the last one, and the biases of
    # attention's qkv (96) and output (32) and of the MLP's down (32); up's 128 are above it.
    small = 3 * (4 * 32 + 96 + 32 + 32) + 2 * 32
    assert states.parameters - none.parameters == 4 * small
    assert states.optimizer_states == none.optimizer_states
    assert elements > small


def test_offloaded_states_do_not_count_if_the_device_holds_none() -> None:
    states, _ = states_of(
        dp=2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}
    )
    assert states.optimizer_states == 0
    assert states.gradients == 4 * VECTORS
    assert states.parameters > 0


@pytest.mark.parametrize(
    ("bound", "forward", "backward"),
    [
        (None, [12_704, 12_704, 9_792, 0], [0, 0, 12_704, 12_704]),
        # Room for the embedding and a block, or for a block and the head, but not for two blocks.
        (10_496 + 12_704, [12_704, 0, 9_792, 0], [0, 0, 0, 12_704]),
    ],
)
def test_each_pass_gathers_the_layer_ahead_that_it_needs_next(
    bound: int | None, forward: list[int], backward: list[int]
) -> None:
    """Elements at the embedding (10,496), two blocks (12,704 each) and the head (9,792).

    A backward starts at the head, and gathers nothing for the embedding.
    """
    zero = {"stage": 3, "stage3_max_live_parameters": bound}
    run = tiny_run(TEXT, dp=2, model={"num_hidden_layers": 2}, zero_optimization=zero)
    parameters = local_parameters(run, 0)
    for direction, elements in (("forward", forward), ("backward", backward)):
        layers = gathered_in_pass(run, parameters, direction)
        assert [layer.ahead for layer in layers] == [4 * size for size in elements]
