"""Model states, gathers and buffers by hand. ``test_plan.py`` has those of the ZeRO paper."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.parameters import elements_of
from megaspeed.pipeline.schedules import Pass
from megaspeed.planning.costs.memory import MemoryBytes, compression_buffer_bytes, model_states
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.stage_states import held_bytes
from tests.support.tiny import BF16, tiny_run

TEXT = Path(__file__)


def states_of(**changes: Any) -> tuple[MemoryBytes, int]:
    run = tiny_run(TEXT, **changes)
    axis = data_axis_of(run, 0, "cuda")
    return model_states(run, axis), elements_of(axis.parameters)


# GPT2 of 3 blocks and width 32: two norms in each block and the last norm, and the biases of
# attention's qkv and output and of the MLP's up and down.
VECTORS = 3 * (4 * 32 + 96 + 32 + 128 + 32) + 2 * 32


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
    """``vector``: extra bytes for each element of biases and norms, summed over a step."""
    states, elements = states_of(dp=2, zero_optimization={"stage": stage}, **changes)
    # Padding takes at most 4 elements a group, or half an element a parameter.
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
    # GPT2 of 3 blocks and width 32: two norms in each block and the last norm, and the biases of
    # attention's qkv (96) and output (32) and of the MLP's down (32). The 128 of up are above the
    # threshold.
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
    ("bound", "forward", "backward", "last_backward"),
    [
        (
            None,
            [12_704, 12_704, 9_792, 64],
            [23_200, 10_496, 12_704, 12_704],
            [0, 0, 12_704, 12_704],
        ),
        # There is room for the embedding and a block, or for a block and the head, but not for two
        # blocks.
        (10_496 + 12_704, [12_704, 0, 9_792, 64], [23_200, 10_496, 0, 12_704], [0, 0, 0, 12_704]),
    ],
)
def test_each_pass_gathers_the_layer_ahead_that_it_needs_next(
    bound: int | None, forward: list[int], backward: list[int], last_backward: list[int]
) -> None:
    """The elements are in addition to the layer: embedding 10,496, two blocks of 12,704, head
    9,792.

    A backward starts at the head's norm (64), and gathers nothing for the embedding. Before another
    forward, it gathers the embedding while it computes the first block, and keeps the block.
    """
    zero = {"stage": 3, "stage3_max_live_parameters": bound}
    run = tiny_run(TEXT, dp=2, model={"num_hidden_layers": 2}, zero_optimization=zero)
    axis = data_axis_of(run, 0, "cuda")
    in_forward, in_backward = [10_496, 12_704, 12_704, 9_792], [0, 12_704, 12_704, 64]
    passes: list[tuple[Pass, Pass | None, list[int], list[int]]] = [
        ("forward", "backward", in_forward, forward),
        ("backward", "forward", in_backward, backward),
        ("backward", None, in_backward, last_backward),
    ]
    for direction, following, own, ahead in passes:
        expected = [4 * (size + more) for size, more in zip(own, ahead, strict=True)]
        assert held_bytes(axis, direction, following) == expected


def test_int8_needs_most_memory_while_it_gathers_at_zero0_and_while_it_reduces_otherwise() -> None:
    """The parts have 2 x 2,048 elements, in messages of 36 bytes for each 32.

    The sum of a part needs the part in fp32 twice, the sent and the received messages, and the sum
    of two rows. The gather at ZeRO-0 needs the part twice, the received messages, and for a row the
    message and two copies.
    """
    part, message = 4096 * 4, 4096 // 32 * 36
    most = {0: 3 * part + message * 3 // 2, 1: part * 5 // 2 + 2 * message}
    for stage, expected in most.items():
        zero = {"stage": stage, "reduce_bucket_size": 4096}
        parallel = {"gradient_compression": {"type": "int8", "block": 32}}
        run = tiny_run(TEXT, dp=2, zero_optimization=zero, parallel=parallel)
        assert compression_buffer_bytes(run, data_axis_of(run, 0, "cuda")) == expected


def test_the_second_backward_of_gpipe_has_one_micro_batch_fewer() -> None:
    """Each further micro-batch adds its saved activations. None adds a message in flight."""
    peaks = []
    for micro_batches in (1, 2, 3):
        changes: dict[str, Any] = {
            "model": {"vocab_size": 32},  # so the peak is in a backward, not in the loss
            "parallel": {"schedule": "gpipe"},
            "gradient_accumulation_steps": micro_batches,
            "train_batch_size": 4 * micro_batches,
        }
        peaks.append(StageMemory(tiny_run(TEXT, pp=2, **changes), 1, device_type="cuda").peak)
    kept = [after.total - before.total for before, after in pairwise(peaks)]
    assert kept[0] == kept[1] > 0


def test_a_bucket_that_is_reduced_beside_the_backward_takes_memory_meanwhile() -> None:
    """The bucket is a bf16 copy of a block's matrices, 12 D^2 elements. There are few tokens, so
    the buckets determine the peak.
    """
    in_flight = []
    for overlaps in (False, True):
        run = tiny_run(
            TEXT,
            dp=2,
            model={"hidden_size": 128},
            train_batch_size=4,
            gradient_accumulation_steps=2,
            communication_data_type="bf16",
            zero_optimization={"stage": 1, "overlap_comm": overlaps, "reduce_bucket_size": 200_000},
        )
        peak = StageMemory(run, 0, device_type="cuda").peak
        in_flight.append(peak.communication_buffers)
    assert in_flight == [0, 12 * 128**2 * 2]
