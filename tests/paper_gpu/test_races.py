"""No two streams touch the same memory without an order between them.

If a wait is removed, a step is faster, but the next forward may gather weights that are still being
written. On a GPU, the loss then differs a little, and only sometimes.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.model.experts import Received
from megaspeed.tensor_parallel.experts import AllToAll
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero.layer_gathers import GatheredLayer
from tests.paper_gpu.accelerator import PaperEvent, PaperStream, paper_accelerator
from tests.paper_gpu.cases import CASES, OVERLAP, PER_MICRO_BATCH, chunks, experts, replicas, zero
from tests.paper_gpu.fake_world import batches, fake_rank, paper_run
from tests.paper_gpu.races import RaceFinder
from tests.paper_gpu.recorder import caller
from tests.support.rank_pool import RankPool

NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}}
PER_STEP = {"gradient_reduction": "per_step"}
ALL_REDUCE = {"use_multi_rank_bucket_allreduce": True}

MORE_CASES: dict[str, dict[str, Any]] = {
    "zero3-nothing-persists": zero(3, **NOTHING_PERSISTS),
    "zero3-offload": zero(3, **OFFLOAD),
    "zero3-offload-nothing-persists": zero(3, **OFFLOAD, **NOTHING_PERSISTS),
    "zero2-offload": zero(2, **OFFLOAD),
    **{f"zero{stage}-overlap-offload": zero(stage, **OVERLAP, **OFFLOAD) for stage in (1, 2, 3)},
    **{
        f"zero{stage}-overlap-once-a-step": zero(stage, **OVERLAP) | {"parallel": PER_STEP}
        for stage in (2, 3)
    },
    "zero3-overlap-nothing-persists": zero(3, **OVERLAP, **NOTHING_PERSISTS),
    **{f"zero{stage}-replicas-offload": replicas(stage, **OVERLAP, **OFFLOAD) for stage in (1, 3)},
    "zero1-replicas-of-all-offload": replicas(1, **OFFLOAD, parallel={"replicate": 4}),
    "zero3-chunks-ahead-nothing-persists": chunks(3, 3, 0, **NOTHING_PERSISTS),
    "zero3-chunks-ahead-offload": chunks(3, 3, 3, **OFFLOAD_ALL, **NOTHING_PERSISTS),
    "zero3-expert-axis-nothing-persists": experts("all_to_all", 3, **NOTHING_PERSISTS)
    | {"dp": 4, "rank": 2},
    "zero2-small-buckets": zero(2, **OVERLAP, **ALL_REDUCE, reduce_bucket_size=2000)
    | {"parallel": PER_MICRO_BATCH},
}
ALL_CASES = {
    name: changes
    for name, changes in (CASES | MORE_CASES).items()
    if name.startswith("zero") or name == "3d-last"
}


def _races(launch: LaunchEnvironment, changes: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the races of two steps, an evaluation and a third step. Before it, the state is
    loaded.
    """
    changes = dict(changes)
    rank = changes.pop("rank", 0)
    run = paper_run(**changes)
    with paper_accelerator() as accelerator, fake_rank(run, rank) as worker:
        with RaceFinder(accelerator) as finder:
            for _ in range(2):
                assert not worker.train_step(batches(run), 1e-3).skipped
            worker.evaluate(batches(run), 2, 1)
            for fragment in worker.engine.state_fragments():
                fragment.weights.mul_(1.0)
            worker.engine.load_state(2)
            assert not worker.train_step(batches(run), 1e-3).skipped
        return list(finder.races)


@pytest.mark.parametrize("case", ALL_CASES)
def test_no_two_streams_race(pool: RankPool, case: str) -> None:
    assert pool.run(1, _races, ALL_CASES[case]) == [[]]


def _races_of_one_rank_with_offload(launch: LaunchEnvironment) -> list[tuple[str, str]]:
    """Return the races if all partitions are copied, as if these layers were not in host memory."""
    make, device = GatheredLayer.__init__, torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GatheredLayer,
            "__init__",
            lambda layer, parameters, _: make(layer, parameters, device),
        )
        return _races(launch, zero(3, **OFFLOAD_ALL) | {"dp": 1})


def test_one_rank_waits_for_copies_from_the_host(pool: RankPool) -> None:
    """One rank has no collective to wait for."""
    assert pool.run(1, _races_of_one_rank_with_offload) == [[]]


def _races_of_gathers_that_wait_for_nothing(launch: LaunchEnvironment) -> list[str]:
    """Return the places of all races if the gather stream does not wait for the compute stream."""
    wait_stream = PaperStream.wait_stream

    def sometimes(stream: PaperStream, other: PaperStream) -> None:
        if "layer_gathers" not in caller() or stream.name == "default":
            wait_stream(stream, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaperStream, "wait_stream", sometimes)
        return [f"{first} | {then}" for first, then in _races(launch, zero(3))]


def test_a_gather_that_waits_for_nothing_races_with_the_step_and_with_the_layer_before(
    pool: RankPool,
) -> None:
    (races,) = pool.run(1, _races_of_gathers_that_wait_for_nothing)
    assert any("_reassign_or_swap_out" in race for race in races), "partitions being written"
    assert any("aten::" in race and "layer_gathers" in race for race in races)


def _races_of_inputs_that_wait_for_nothing(launch: LaunchEnvironment, wait: str) -> list[str]:
    """Return the places of all races if the copies to host memory and back have no such waits."""
    waits = getattr(PaperStream, wait)

    def sometimes(stream: PaperStream, other: Any) -> None:
        if "host_inputs" not in caller():
            waits(stream, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaperStream, wait, sometimes)
        changes = CASES["zero3-full-offloaded"]
        return [f"{first} | {then}" for first, then in _races(launch, changes)]


@pytest.mark.parametrize("wait", ["wait_stream", "wait_event"])
def test_inputs_that_wait_for_nothing_race_with_the_block(pool: RankPool, wait: str) -> None:
    (races,) = pool.run(1, _races_of_inputs_that_wait_for_nothing, wait)
    assert any("host_inputs" in race for race in races)


def _races_of_counts_that_wait_for_nothing(launch: LaunchEnvironment) -> list[str]:
    """Return the places of all races if the host reads numbers of rows without a wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaperEvent, "synchronize", lambda event: None)
        return [f"{a} | {b}" for a, b in _races(launch, CASES["zero1-expert-axis"])]


def test_numbers_of_rows_that_the_host_reads_too_early_race_with_their_copy(pool: RankPool) -> None:
    (races,) = pool.run(1, _races_of_counts_that_wait_for_nothing)
    assert races and all("begin aten::copy_ | " in race and " wait " in race for race in races)


def _kernels_around_the_wait_for_counts(launch: LaunchEnvironment) -> list[tuple[int, int]]:
    """Return two numbers of kernels for each forward of a block: those launched between the copy
    that the host waits for and the wait, and those between the wait and the exchange.
    """
    synchronize, send = PaperEvent.synchronize, AllToAll.send
    times: list[tuple[int, int, int]] = []
    copied, waited, stream = 0, 0, None

    def synchronized(event: PaperEvent) -> None:
        nonlocal copied, waited, stream
        stream = event._accelerator.current_stream()
        copied, waited = event.clock[stream.number], stream.clock[stream.number]
        synchronize(event)

    def sent(exchange: AllToAll, packed: Tensor, received: Received) -> Tensor:
        assert stream is not None
        times.append((copied, waited, stream.clock[stream.number]))
        return send(exchange, packed, received)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaperEvent, "synchronize", synchronized)
        patch.setattr(AllToAll, "send", sent)
        _races(launch, CASES["zero1-expert-axis"])
    return [(then - first, last - then) for first, then, last in times]


def test_while_the_host_waits_for_counts_the_device_packs_tokens(pool: RankPool) -> None:
    (launched,) = pool.run(1, _kernels_around_the_wait_for_counts)
    assert len(launched) == (3 + 1) * 2 * 2, "3 steps and an evaluation: 2 blocks, 2 micro-batches"
    assert all(packing >= 5 and more == 0 for packing, more in launched)


def _races_without_joins(
    launch: LaunchEnvironment, file: str, changes: dict[str, Any]
) -> list[str]:
    """Return the places of all races if the code of this file does not wait for its collectives."""
    join = RaceFinder.join

    def sometimes(finder: RaceFinder, work: dist.Work) -> None:
        if file not in caller():
            join(finder, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaceFinder, "join", sometimes)
        return [f"{first} | {then}" for first, then in _races(launch, changes)]


@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("zero/layer_gathers", "zero3"),
        ("zero/step_gathers", "zero1"),
        ("zero/step_gathers", "zero2-small-buckets"),
        ("zero/buckets", "zero3"),
        ("zero/buckets", "zero2-overlap"),
        ("zero/buckets", "zero3-replicas-overlap"),
        ("pipeline/p2p", "3d-last"),
        ("tensor_parallel/collectives", "3d-last"),
        ("tensor_parallel/collectives", "zero3-all-gather"),
        ("tensor_parallel/collectives", "zero3-expert-axis-gathered"),
        ("zero/muon", "zero0-muon-tensor"),
        ("zero/muon", "zero1-muon-tensor"),
        ("zero/muon", "zero3-muon"),
    ],
)
def test_a_collective_that_nobody_waits_for_races_with_what_uses_its_result(
    pool: RankPool, file: str, case: str
) -> None:
    (races,) = pool.run(1, _races_without_joins, file, ALL_CASES[case])
    assert any(file in race and "c10d::" in race for race in races)


def _gathered_memory_kept_for_a_stream(launch: LaunchEnvironment) -> int:
    """Return how often a step asks the allocator to keep gathered memory until a stream is done."""
    with paper_accelerator() as accelerator, fake_rank(paper_run(**zero(3)), 0) as worker:
        worker.train_step(batches(worker.run), 1e-3)
        gathers: Any = worker.engine._gathers
        layers = {layer for held in gathers._holds[("forward", 0), None] for layer in held}
        memory = {layer._gathered.untyped_storage()._cdata for layer in layers}
        return sum(storage._cdata in memory for storage, _ in accelerator.kept)


def test_gathered_memory_is_free_at_once_because_the_next_gather_waits(pool: RankPool) -> None:
    assert pool.run(1, _gathered_memory_kept_for_a_stream) == [0]


def _priority_of_gathers(launch: LaunchEnvironment) -> int:
    with paper_accelerator(), fake_rank(paper_run(**zero(3)), 0) as worker:
        gathers: Any = worker.engine._gathers
        priority: int = gathers._stream.priority
        return priority


def test_gathers_go_before_the_products_that_they_run_beside(pool: RankPool) -> None:
    assert pool.run(1, _priority_of_gathers) == [-1]
