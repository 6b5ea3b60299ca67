"""The cheapest change really fits, and comes first in the documented order."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megaspeed.config.resolve import Run
from megaspeed.config.run import Recomputation
from megaspeed.planning.prediction import predict_peak_bytes
from megaspeed.planning.variants import Training, cheapest_change
from tests.planning.tiny_runs import FOLDER, from_file, tiny, tiny_file


def at_most(usable_bytes: int) -> Callable[[Run], int]:
    """Return the same usable bytes for every variant."""
    return lambda _: usable_bytes


def peak_of(training: Training) -> int:
    return predict_peak_bytes(training.run)


@pytest.mark.parametrize(
    ("settings", "world_size", "change"),
    [
        (
            ("parallel.tensor=2", "parallel.sequence_parallel=false"),
            2,
            "parallel.sequence_parallel=true",
        ),
        (("parallel.pipeline=2", "parallel.schedule=gpipe"), 2, "parallel.schedule=1f1b"),
        ((), 2, "zero_optimization.stage=1"),
        (("zero_optimization.stage=1",), 2, "parallel.activation_checkpointing=selective"),
        (
            (
                "zero_optimization.stage=3",
                "parallel.gradient_reduction=per_step",
                "parallel.activation_checkpointing=full",
                "train_micro_batch_size_per_gpu=1",
            ),
            4,
            "parallel.gradient_reduction=per_micro_batch",
        ),
        (
            (
                "zero_optimization.stage=1",
                "parallel.activation_checkpointing=full",
                "train_micro_batch_size_per_gpu=1",
            ),
            4,
            "zero_optimization.stage=2",
        ),
    ],
    ids=["sequence", "1f1b", "ZeRO-1", "recompute", "reduction", "ZeRO-2"],
)
def test_one_byte_too_many_is_mended_by_the_cheapest_change(
    settings: tuple[str, ...], world_size: int, change: str
) -> None:
    # Sequences are long and the vocabulary is small, so activations of the blocks fill a rank.
    shape = {"model": {"max_position_embeddings": 256, "vocab_size": 64}}
    training = tiny(*settings, "data.sequence_length=256", world_size=world_size, **shape)
    found = cheapest_change(training, at_most(peak_of(training) - 1), 8)
    assert (found.fits, found.set_text, found.world_size) == (True, (change,), world_size)


@pytest.mark.parametrize("tenths", [1, 3, 5, 6, 8, 9])
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((), 8),
        (("parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=gpipe"), 8),
        (("zero_optimization.stage=2", "bf16.enabled=true"), 4),
    ],
    ids=["data", "3d", "bf16"],
)
def test_the_change_fits_when_it_is_typed(
    tenths: int, settings: tuple[str, ...], world_size: int, tmp_path: Path
) -> None:
    file = tiny_file(tmp_path, *settings)
    training = from_file(file, world_size=world_size)
    usable = peak_of(training) * tenths // 10
    found = cheapest_change(training, at_most(usable), 8)
    typed = from_file(file, *found.set_text, world_size=found.world_size)
    assert peak_of(typed) == found.peak_bytes
    assert found.fits is (found.peak_bytes <= usable)
    assert typed.run.batch.train_batch_size == training.run.batch.train_batch_size


def test_as_few_blocks_as_possible_are_recomputed_in_full() -> None:
    shape = {"model": {"max_position_embeddings": 256, "vocab_size": 64}}
    stated = ("zero_optimization.stage=1", "data.sequence_length=256")
    training = tiny(*stated, world_size=2, **shape)
    kinds: list[tuple[Recomputation, int | None]]
    kinds = [("selective", None), ("full", 1), ("full", 2), ("full", 3), ("full", None)]
    peaks, found = [], []
    for kind, count in kinds:
        variant = replace(training.settings, activation_checkpointing=kind, recomputed_blocks=count)
        peaks.append(int(training.peak_bytes(variant)))
        if peaks.index(min(peaks)) == len(peaks) - 1:  # each cheaper change needs more memory
            change = cheapest_change(training, at_most(peaks[-1]), 8).set_text
            number = () if count is None else (f"parallel.recomputed_blocks={count}",)
            assert change == (f"parallel.activation_checkpointing={kind}", *number)
            found.append((kind, count))
    assert found[0] == ("selective", None) and len(found) >= 3


def test_a_stated_number_of_recomputed_blocks_is_removed_by_null() -> None:
    stated = ("parallel.activation_checkpointing=full", "parallel.recomputed_blocks=1")
    training = tiny(*stated)
    every = replace(training.settings, recomputed_blocks=None)
    assert training.set_text(every) == ("parallel.recomputed_blocks=null",)
    assert tiny(*stated, *training.set_text(every)).settings == every


def test_more_ranks_are_proposed_only_if_no_setting_is_enough() -> None:
    training = tiny("train_micro_batch_size_per_gpu=1", world_size=2)
    changes = [
        cheapest_change(training, at_most(peak_of(training) * percent // 100), 8)
        for percent in range(95, 0, -10)
    ]
    sizes = [change.world_size for change in changes if change.fits]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2 and sizes[-1] > 2


def test_a_run_that_cannot_fit_states_the_smallest_size() -> None:
    training = tiny(world_size=2)
    found = cheapest_change(training, at_most(1000), 8)
    assert not found.fits
    assert 1000 < found.peak_bytes < peak_of(training)


def test_tensor_groups_stay_within_a_node() -> None:
    training = tiny("zero_optimization.stage=3", world_size=8)
    for percent in (70, 40, 20):
        found = cheapest_change(training, at_most(peak_of(training) * percent // 100), 2)
        assert "parallel.tensor=4" not in found.set_text


def test_half_the_micro_batch_of_llama_70b() -> None:
    file = FOLDER / "llama2_70b_64.json"
    training = from_file(file, world_size=64)
    found = cheapest_change(training, at_most(peak_of(training) - 1), 8)
    assert found.set_text == ("train_micro_batch_size_per_gpu=2",)
