"""The log counts what torch sends, for known messages and compared with a second count."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.watched_step import TrafficLog
from megaspeed.planning.costs.traffic import Traffic, bytes_sent
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import one_rank, small_run

TEXT = Path(__file__).parents[3] / "LICENSE"

Sending = Callable[[ParallelContext], object]


def traffic_of(launch: LaunchEnvironment, grid: Grid, send: Sending) -> Traffic:
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        with TrafficLog(context) as log:
            send(context)
        return log.traffic


# --- known messages -------------------------------------------------------------------------------


def one_of_each(context: ParallelContext) -> None:
    """Send 60 fp32 numbers, 240 bytes, in every collective over the data axis of three ranks."""
    numbers, part = torch.ones(60), torch.ones(20)
    dist.all_reduce(numbers, group=context.data_group)
    dist.all_gather_single(numbers, part, group=context.data_group)
    dist.all_gather([torch.ones(20) for _ in range(3)], part, group=context.data_group)
    dist.reduce_scatter_single(part, torch.ones(60), group=context.data_group)
    dist.all_to_all_single(torch.ones(60), numbers, group=context.data_group)
    dist.reduce(numbers, 0, group=context.data_group)
    dist.broadcast(numbers, 0, group=context.data_group)
    functional.all_reduce(numbers, "sum", context.data_group).wait()
    functional.all_gather_single(part, 0, context.data_group).wait()  # type: ignore[attr-defined]
    functional.reduce_scatter_single(numbers, "sum", 0, context.data_group).wait()
    dist.barrier(group=context.data_group)


def test_every_collective_is_counted_with_its_message(pool: RankPool) -> None:
    once = 160  # 2/3 of 240 bytes
    assert pool.run(3, traffic_of, Grid(pp=1, dp=3, tp=1), one_of_each) == 3 * [
        {
            ("dp", "all_reduce"): 2 * 2 * once,
            ("dp", "all_gather"): 3 * once,
            ("dp", "reduce_scatter"): 2 * once,
            ("dp", "all_to_all"): once,
            ("dp", "reduce"): once,
            ("dp", "broadcast"): once,
        }
    ]


def along_every_axis(context: ParallelContext) -> None:
    """Send 100, 200, ... bytes, and a message from the first pipeline stage to the last."""
    for group, length in (
        (context.tp_group, 25),
        (context.data_group, 50),
        (context.world_group, 100),
    ):
        dist.all_reduce(torch.ones(length), group=group)
    if context.is_first_pipeline_stage:
        dist.send(torch.ones(125), context.next_rank, group=context.pp_group)
        dist.recv(torch.ones(150), context.next_rank, group=context.pp_group)
    else:
        dist.recv(torch.ones(125), context.previous_rank, group=context.pp_group)
        dist.send(torch.ones(150), context.previous_rank, group=context.pp_group)


def test_a_message_counts_for_the_axis_of_its_group_and_for_its_sender(pool: RankPool) -> None:
    sums = {
        ("tp", "all_reduce"): 100,
        ("dp", "all_reduce"): 200,
        ("world", "all_reduce"): 700,  # 2 x 7/8 of 400
    }
    ranks = pool.run(8, traffic_of, Grid(pp=2, dp=2, tp=2), along_every_axis)
    assert ranks[:4] == 4 * [{**sums, ("pp", "send"): 500}]
    assert ranks[4:] == 4 * [{**sums, ("pp", "send"): 600}]


def a_number_and_a_vector(context: ParallelContext) -> None:
    dist.all_reduce(torch.ones((), dtype=torch.float64), group=context.world_group)
    dist.all_reduce(torch.ones(25), group=context.data_group)


def test_if_an_axis_is_the_world_messages_in_fp64_are_the_worlds(pool: RankPool) -> None:
    assert pool.run(2, traffic_of, Grid(pp=1, dp=2, tp=1), a_number_and_a_vector) == 2 * [
        {("world", "all_reduce"): 8, ("dp", "all_reduce"): 100}
    ]


# --- nothing is omitted ---------------------------------------------------------------------------


def all_to_all_of_a_list(context: ParallelContext) -> None:
    parts = list(torch.ones(2, 1))
    dist.all_to_all(parts, parts, group=context.data_group)


def a_group_of_its_own(context: ParallelContext) -> None:
    dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1]))


@pytest.mark.parametrize(
    ("send", "complaint"),
    [
        (all_to_all_of_a_list, "c10d::alltoall_ is not known"),
        (a_group_of_its_own, r"ranks \[0, 1\], and no axis of this rank has that group"),
    ],
)
def test_traffic_that_cannot_be_counted_is_an_error(
    pool: RankPool, send: Sending, complaint: str
) -> None:
    with pytest.raises(RankFailure, match=complaint):
        pool.run(2, traffic_of, Grid(pp=1, dp=2, tp=1), send)


def ddp_step(context: ParallelContext) -> None:
    """DistributedDataParallel sends from C++, in the backward pass."""
    model = DistributedDataParallel(
        nn.Linear(10, 5), process_group=context.data_group, init_sync=False
    )
    model(torch.ones(3, 10)).sum().backward()


def test_messages_of_torchs_own_reducer_are_counted(pool: RankPool) -> None:
    assert pool.run(2, traffic_of, Grid(pp=1, dp=2, tp=1), ddp_step) == 2 * [
        {("dp", "all_reduce"): 55 * 4}
    ]


# --- a second way of counting ---------------------------------------------------------------------

# Method of a process group -> (its collective, the index of the argument that is the message).
METHODS: dict[str, tuple[Any, int]] = {
    "allreduce": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "alltoall": ("all_to_all", 0),
    "alltoall_base": ("all_to_all", 0),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
}


@contextmanager
def watched_groups() -> Iterator[Counter[tuple[str, Any, int]]]:
    """Count bytes by (group, collective, ranks) when Python passes them to a process group."""
    counted: Counter[tuple[str, Any, int]] = Counter()

    def watched(method: Callable[..., Any], collective: str, index: int) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves(args[index]) if isinstance(leaf, Tensor)]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            counted[group.group_name, collective, group.size()] += size
            return method(group, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, (collective, index) in METHODS.items():
            if hasattr(dist.ProcessGroup, name):
                method = getattr(dist.ProcessGroup, name)
                patch.setattr(dist.ProcessGroup, name, watched(method, collective, index))
        yield counted


def counted_twice(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[Counter[str], Counter[str]]:
    """Return a step's bytes by collective: from the log, and from the methods of the groups."""
    with (
        one_rank(launch, run, corpus) as rank,
        TrafficLog(rank.context) as log,
        watched_groups() as handed_over,
    ):
        rank.train_step(0)
    logged: Counter[str] = Counter()
    for (_, collective), sent in log.traffic.items():
        logged[collective] += sent
    second: Counter[str] = Counter()
    for (_, collective, ranks), size in handed_over.items():
        second[collective] += bytes_sent(collective, size, ranks)
    return logged, +second


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_step_sends_what_the_process_groups_receive(
    pool: RankPool, tmp_path: Path, zero_stage: int
) -> None:
    run = small_run(
        TEXT,
        pp=2,
        dp=2,
        tp=2 if zero_stage == 3 else 1,
        model={"num_hidden_layers": 2},
        parallel={"sequence_parallel": zero_stage == 3},
        zero_optimization={"stage": zero_stage},
    )
    corpus = tiny_corpus(run, tmp_path)
    for logged, second in pool.run(run.grid.world_size, counted_twice, run, corpus):
        assert logged == second
        assert logged["send"] > 0 and logged["all_reduce"] > 0
