"""Memory outside of tensors: NCCL's buffers as measured, and the verdict at its limits."""

import pytest

from megaspeed.config.resolve import Run
from megaspeed.planning.costs.reserved_memory import (
    UNEXPECTED,
    ReservedMemory,
    communicator_bytes,
    nccl_bytes,
    reserved_memory,
    verdict,
)
from megaspeed.topology.devices import Device, device_named
from megaspeed.topology.grid import Grid
from tests.planning.tiny_runs import tiny

MIB = 2**20
A100, H100 = device_named("a100-80gb"), device_named("h100-80gb")


def run(pp: int = 1, dp: int = 1, tp: int = 1, zero_stage: int = 1) -> Run:
    overrides = (
        f"parallel.pipeline={pp}",
        f"parallel.tensor={tp}",
        f"zero_optimization.stage={zero_stage}",
    )
    return tiny(*overrides, world_size=pp * dp * tp).run


def test_the_buffers_of_two_a100_are_as_measured() -> None:
    """NVIDIA/nccl, issue 964: 544 MiB for a group of 2, 688 MiB at the end of a chain of 4."""
    assert communicator_bytes(2, 2, A100) == 544 * MIB
    within, end = 12 * MIB, 6 * MIB
    assert communicator_bytes(4, 4, A100) - 24 * (within - end) == 688 * MIB


def test_a_receiver_has_buffers_of_three_protocols() -> None:
    """NCCL, src/init.cc and src/include/device.h: LL, LL128 and Simple, rounded up to 2 MiB."""
    ll, ll128, simple = 8 * 512 * 8 * 16, 120 * 640 * 8 * 8, 4 * MIB
    received = -(-(ll + ll128 + simple) // (2 * MIB)) * 2 * MIB
    one_rank = communicator_bytes(1, 1, A100)
    assert communicator_bytes(2, 2, A100) - one_rank == 24 * (received + 2 * MIB)


def test_each_group_of_a_grid_has_its_communicator() -> None:
    node, pair, alone = (communicator_bytes(ranks, ranks, A100) for ranks in (8, 2, 1))
    assert nccl_bytes(run().grid, A100, 8) == alone
    assert nccl_bytes(run(dp=8).grid, A100, 8) == node
    # The data axis has a group even if it has one rank.
    assert nccl_bytes(run(tp=4).grid, A100, 8) == node + alone
    # World, tp and dp.
    assert nccl_bytes(run(dp=2, tp=4).grid, A100, 8) == 2 * node + pair
    # ZeRO-0 partitions over a group of one rank.
    assert nccl_bytes(run(dp=8, zero_stage=0).grid, A100, 8) == node + alone
    # World, dp of one rank, tp and pp; sends to one neighbour on 32 channels.
    assert nccl_bytes(run(pp=2, tp=4).grid, A100, 8) == 2 * node + alone + pair + 32 * 12 * MIB


def test_a_group_between_nodes_has_fewer_channels_and_more_bytes_for_each() -> None:
    within, between = communicator_bytes(8, 8, A100), communicator_bytes(8, 1, A100)
    assert between < within
    shared = 4 * 16 * 128 * 1024
    assert (between - shared) / 4 > 2 * (within - 256 * MIB) / 24


def test_shared_experts_have_communicators_of_their_own() -> None:
    """8 data ranks on one node. With ep 4, the two ranks with the same experts are shards."""
    plain, shared = Grid(pp=1, dp=8, tp=1), Grid(pp=1, dp=8, tp=1, ep=4, expert_shard=2)
    more = nccl_bytes(shared, H100, 8) - nccl_bytes(plain, H100, 8)
    assert more == communicator_bytes(4, 4, H100) + communicator_bytes(2, 2, H100)
    # If all ranks share them, each expert has one copy, which has a communicator of its own.
    alone = Grid(pp=1, dp=8, tp=1, ep=8)
    more = nccl_bytes(alone, H100, 8) - nccl_bytes(plain, H100, 8)
    assert more == communicator_bytes(8, 8, H100) + communicator_bytes(1, 1, H100)


def test_hopper_has_buffers_for_reductions_in_the_switch() -> None:
    more = communicator_bytes(8, 8, H100) - communicator_bytes(8, 8, A100)
    assert more == 16 * 2 * MIB * 8
    card = device_named("h100-pcie-80gb")
    assert communicator_bytes(8, 8, card) < communicator_bytes(8, 8, A100)


def test_hopper_has_larger_workspaces() -> None:
    hopper, other = (reserved_memory(run(), each, 8, 0).workspace for each in (H100, A100))
    assert hopper == 2 * 32 * MIB
    # torch's allocator shows 8,519,680 bytes for one.
    assert other == 2 * 8_519_680


@pytest.mark.parametrize(
    ("peak", "expected"),
    [(0, "fits"), (800, "fits"), (801, "tight"), (900, "tight"), (901, "does not fit")],
)
def test_the_verdict_changes_at_the_last_byte(peak: int, expected: str) -> None:
    device = Device(name="small", memory_bytes=1000)
    reserved = ReservedMemory(context=50, nccl=40, workspace=10, fragmentation=60, unexpected=40)
    assert verdict(peak, reserved, device) == expected


def test_nine_of_ten_published_runs_are_below_the_upper_end_of_the_interval() -> None:
    """By the prediction, tensors of 64 GB fit an 80 GB GPU. By the published runs, they may not."""
    reserved = reserved_memory(run(dp=8), H100, 8, 64 * 10**9)
    assert reserved.most - reserved.certain == pytest.approx(UNEXPECTED * 64 * 10**9)
    assert 64 * 10**9 + reserved.total < H100.memory_bytes < 64 * 10**9 + reserved.most
    assert verdict(64 * 10**9, reserved, H100) == "tight"


def test_a_cpu_reserves_nothing() -> None:
    cpu = Device(name="cpu", memory_bytes=10**9)
    assert reserved_memory(run(dp=2), cpu, 2, 10**8).total == 0
