"""Functions that run on ranks of this machine: their results, and how a failure ends all ranks."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaspeed.measurement.local_ranks import RanksFailed, run_on_ranks
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit

# The pool starts the process that all ranks are forked from.
pytestmark = [pytest.mark.usefixtures("pool"), pytest.mark.timeout(300)]


def squared(launch: LaunchEnvironment, number: int) -> int:
    os.write(1, f"rank {launch.rank} of {launch.world_size}\n".encode())
    return number**2 + launch.rank


def fail_on_rank_1(launch: LaunchEnvironment) -> None:
    if launch.rank == 1:
        raise ValueError("the first line\nand the second")
    time.sleep(10**6)


def be_killed_on_rank_1(launch: LaunchEnvironment) -> None:
    if launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise ConnectionError("rank 1 has ended")


def never_end(launch: LaunchEnvironment) -> None:
    time.sleep(10**6)


def allocate_119_tib(launch: LaunchEnvironment) -> None:
    torch.empty(119 * 2**40, dtype=torch.uint8)


def test_results_are_in_the_order_of_ranks_and_output_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    results = run_on_ranks(
        squared, 3, world_size=2, device_type="cpu", log=log, timeout_seconds=1e9
    )
    assert results == [9, 10]
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(log.read_text().splitlines())


def test_the_rank_that_failed_is_named_and_no_other_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RanksFailed, match=r"^ValueError: the first line \(rank 1\)$"):
        run_on_ranks(fail_on_rank_1, world_size=2, device_type="cpu", log=log)
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize(
    ("function", "seconds", "reason"),
    [
        (be_killed_on_rank_1, limit(300), "a rank was killed by SIGKILL; the system"),
        (
            allocate_119_tib,
            limit(300),
            r"out of memory: RuntimeError: .*DefaultCPUAllocator: can't all",
        ),
        (never_end, 0.001, "not finished after 0.001 s; raise --timeout"),
    ],
)
def test_the_cause_is_named_although_others_failed_because_of_it(
    function: Callable[..., None], seconds: float, reason: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with pytest.raises(RanksFailed, match=f"^{reason}"):
        run_on_ranks(function, world_size=2, device_type="cpu", log=log, timeout_seconds=seconds)
    # Ranks that are stopped at once may not have created the log.
    shown = log.read_text() if log.exists() else ""
    assert ("Traceback" in shown) == (seconds > 1), "the log shows the place of the error"
