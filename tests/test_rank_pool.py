"""The pool returns results by rank, reports the first failure at once, and shows
stacks of a hang.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankFailure, RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def fragile() -> Iterator[RankPool]:
    """Return a pool that the test may break, because the pool of the session must stay intact."""
    with RankPool(size=2) as ranks:
        yield ranks


def _sum_of_ranks(launch: LaunchEnvironment, scale: float) -> float:
    grid = Grid(pp=1, dp=launch.world_size, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        total = torch.tensor(scale * context.rank)
        dist.all_reduce(total, group=context.data_group)
        return total.item()


def _process_and_launch(launch: LaunchEnvironment) -> tuple[int, LaunchEnvironment]:
    return os.getpid(), launch


def _leave_a_mess(launch: LaunchEnvironment) -> None:
    import deepspeed

    dist.init_process_group("gloo", init_method="env://")
    deepspeed.comm.comm.cdb = "a communication backend"
    deepspeed.utils.groups.mpu = "an mpu"
    deepspeed.utils.groups._EXPERT_PARALLEL_GROUP["name"] = "a group"
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)


def _find_a_mess(launch: LaunchEnvironment) -> list[object]:
    import deepspeed

    return [
        dist.is_initialized(),
        deepspeed.comm.comm.cdb,
        deepspeed.utils.groups.mpu,
        deepspeed.utils.groups._EXPERT_PARALLEL_GROUP,
        os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype(),
    ]


def _raise_on_rank_1(launch: LaunchEnvironment) -> None:
    if launch.rank == 1:
        os.write(1, b"about to raise\n")
        raise KeyError("the parameter that nobody has")
    _wait_in_a_collective(launch)


def _wait_in_a_collective(launch: LaunchEnvironment) -> None:
    dist.init_process_group("gloo", init_method="env://")


def _die_after_the_peer_has_reported(launch: LaunchEnvironment) -> None:
    if launch.rank == 0:
        raise RuntimeError("Connection closed by peer")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_1_never_comes(launch: LaunchEnvironment) -> None:
    dist.init_process_group("gloo", init_method="env://")
    if launch.rank == 1:
        _sleep_for_ever()
    dist.all_reduce(torch.ones(1))


def _sleep_for_ever() -> None:
    time.sleep(10**6)


def _kill_rank_1(launch: LaunchEnvironment) -> None:
    if launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_in_a_collective(launch)


def test_jobs_of_changing_world_size_follow_each_other(pool: RankPool) -> None:
    for world_size in (1, 2, 3, 8, 2, 8):
        expected = 10.0 * sum(range(world_size))
        assert pool.run(world_size, _sum_of_ranks, 10.0) == [expected] * world_size


def test_results_come_in_the_order_of_ranks_from_fresh_processes(pool: RankPool) -> None:
    first = pool.run(3, _process_and_launch)
    second = pool.run(3, _process_and_launch)
    assert [launch.rank for _, launch in first] == [0, 1, 2]
    assert [launch for _, launch in first] == [launch for _, launch in second]
    assert len({process for process, _ in first + second}) == 6


def test_a_job_leaves_nothing_behind_for_the_next(pool: RankPool) -> None:
    pool.run(2, _leave_a_mess)
    clean: list[object] = [False, None, None, {}, None, torch.float32]
    assert pool.run(2, _find_a_mess) == [clean, clean]


def test_the_first_failing_rank_is_shown_at_once_though_its_peer_hangs(fragile: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        fragile.run(2, _raise_on_rank_1)
    assert time.monotonic() - start < limit(10)
    report = str(failure.value)
    assert "rank 1 of 2 failed first" in report
    assert "in _raise_on_rank_1" in report
    assert "KeyError: 'the parameter that nobody has'" in report
    assert "about to raise" in report
    assert fragile.run(2, _sum_of_ranks, 1.0) == [1.0, 1.0]


def test_a_hang_fails_with_the_stack_of_every_rank(fragile: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        fragile.run(2, _rank_1_never_comes, timeout_seconds=5)
    report = str(failure.value)
    assert f"2 of 2 ranks did not return within {limit(5):.0f} s" in report
    stack_0, stack_1 = report.split("--- rank 1 ---")
    assert "in all_reduce" in stack_0 and "in _rank_1_never_comes" in stack_0
    assert "in _sleep_for_ever" in stack_1
    assert fragile.run(2, _sum_of_ranks, 1.0) == [1.0, 1.0]


def test_a_rank_that_dies_is_named_with_its_signal(fragile: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2 failed first\nthe process died: SIGKILL"):
        fragile.run(2, _kill_rank_1)
    assert fragile.run(2, _sum_of_ranks, 1.0) == [1.0, 1.0]


def test_a_rank_that_dies_is_named_although_its_peer_reports_first(fragile: RankPool) -> None:
    """The connections of a process are closed while it ends. At that moment it is not dead yet."""
    with pytest.raises(RankFailure, match=r"rank 1 of 2 failed first\nthe process died: SIGKILL"):
        fragile.run(2, _die_after_the_peer_has_reported)


def test_a_world_larger_than_the_pool_is_refused(fragile: RankPool) -> None:
    with pytest.raises(ValueError, match="1 to 2 ranks, not 3"):
        fragile.run(3, _process_and_launch)
