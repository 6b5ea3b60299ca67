"""The cheapest change really fits, and comes first in the documented order."""

from dataclasses import replace

import pytest

from megaspeed.planning.changes import Change, cheapest_change
from megaspeed.planning.costs.reserved_memory import reserved_memory
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import Training
from tests.planning.tiny_runs import FOLDER, a100s, from_file, tiny

CHUNKS = (
    "parallel.pipeline=2",
    "parallel.virtual_stages=2",
    "train_micro_batch_size_per_gpu=1",
)


def peak_of(training: Training) -> int:
    return predict(training.run).fullest.peak_bytes


def change_of(training: Training, share: float, gpus_per_node: int = 8) -> Change | None:
    """Return the change if the device has this share of what the run needs at most."""
    peak, cluster = peak_of(training), a100s(gpus_per_node)
    needed = peak + reserved_memory(training.run, cluster.device, gpus_per_node, peak).most
    return cheapest_change(training, a100s(gpus_per_node, memory_bytes=int(share * needed)))


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
        ((*CHUNKS, "parallel.micro_batch_groups=1"), 2, "parallel.micro_batch_groups=auto"),
        (
            (*CHUNKS, "parallel.activation_checkpointing=full"),
            2,
            "parallel.virtual_stages=1",
        ),
    ],
    ids=["sequence", "1f1b", "ZeRO-1", "recompute", "reduction", "ZeRO-2", "groups", "chunks"],
)
def test_one_byte_too_many_is_mended_by_the_cheapest_change(
    settings: tuple[str, ...], world_size: int, change: str
) -> None:
    # Sequences are long and the vocabulary is small, so activations of the blocks fill a rank.
    shape = {"model": {"max_position_embeddings": 256, "vocab_size": 64}}
    length = ("data.sequence_length=256",)
    training = tiny(*settings, *length, world_size=world_size, **shape)
    found = change_of(training, 1 - 1e-9)
    assert found is not None and found.set_text == (change,)
    typed = tiny(*settings, *length, change, world_size=world_size, **shape)
    assert peak_of(typed) == found.peak_bytes


def test_if_no_single_change_is_enough_none_is_named() -> None:
    assert change_of(tiny(world_size=2), 0.01) is None


def test_a_stated_number_of_recomputed_blocks_is_removed_by_null() -> None:
    stated = ("parallel.activation_checkpointing=full", "parallel.recomputed_blocks=1")
    training = tiny(*stated)
    every = replace(training.settings, recomputed_blocks=None)
    assert training.set_text(every) == ("parallel.recomputed_blocks=null",)
    assert tiny(*stated, *training.set_text(every)).settings == every


def test_tensor_groups_stay_within_a_node() -> None:
    training = tiny("zero_optimization.stage=3", world_size=8)
    for hundredths in range(1, 100):
        found = change_of(training, hundredths / 100, gpus_per_node=2)
        assert found is None or "parallel.tensor=4" not in found.set_text


def test_half_the_micro_batch_of_llama_70b() -> None:
    training = from_file(FOLDER / "llama2_70b_64.json", world_size=64)
    found = change_of(training, 1 - 1e-9)
    assert found is not None and found.set_text == ("train_micro_batch_size_per_gpu=2",)
