"""A run hangs if a rank writes no heartbeats or if no rank makes progress. Clocks may jump."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megaspeed.supervision import hang as module
from megaspeed.supervision.failure import Failures, RankLog
from megaspeed.supervision.hang import Survey, pending_collectives
from megaspeed.topology.activity import START_UP_TIMEOUTS, Activity
from megaspeed.topology.grid import Grid

TIMEOUT = 12.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def write_heartbeats(
    store: dist.Store, *beats: tuple[int, int], timeouts: Sequence[float] = (1.0, 1.0)
) -> None:
    """Write the heartbeat of each rank: (its number, the progress)."""
    for rank, (number, progress) in enumerate(beats):
        store.set(f"heartbeat {rank}", json.dumps([number, "step 1", progress, timeouts[rank], 0]))


@pytest.mark.parametrize("period", [1.0, 5.0, 17.0])
def test_a_rank_without_beats_is_found_at_every_period(clock: Clock, period: float) -> None:
    """From 4,096 ranks on, the period is 5 s. An earlier version took each period for a hang."""
    store = dist.HashStore()
    survey, found = Survey(range(2), sees_all=True, period=period), None
    for turn in range(200):
        write_heartbeats(store, (turn, turn), (0, 0))
        found = survey.seconds_of_a_hang(store, TIMEOUT)
        if found is not None:
            break
        clock.now += period
    assert found == TIMEOUT and TIMEOUT < clock.now <= TIMEOUT + 2 * period


@pytest.mark.parametrize("timeouts", [(4.0, 4.0), (4.0, 1.0), (1.0, 4.0)])
def test_no_progress_is_a_hang_only_after_the_longest_timeout_of_a_phase(
    clock: Clock, timeouts: tuple[float, float]
) -> None:
    """Rank 0 alone prepares the corpus, while all others wait for it in an ordinary phase."""
    store = dist.HashStore()
    survey = Survey(range(2), sees_all=True, period=1.0)
    hangs = []
    for turn in range(60):
        write_heartbeats(store, (turn, 7), (turn, 7), timeouts=timeouts)
        hangs.append(survey.seconds_of_a_hang(store, TIMEOUT))
        clock.now += 1.0
    assert hangs[:49] == [None] * 49 and hangs[49] == 49.0


def test_one_rank_does_not_judge_the_progress_of_another(clock: Clock) -> None:
    store = dist.HashStore()
    survey = Survey(range(1), sees_all=False, period=1.0)
    for turn in range(60):
        write_heartbeats(store, (turn, 7))
        assert survey.seconds_of_a_hang(store, TIMEOUT) is None
        clock.now += 1.0


def test_a_process_that_was_stopped_forgets_what_it_saw_before(clock: Clock) -> None:
    store = dist.HashStore()
    survey = Survey(range(2), sees_all=True, period=1.0)
    write_heartbeats(store, (1, 1), (1, 1))
    assert survey.seconds_of_a_hang(store, TIMEOUT) is None
    clock.now += 3600.0
    assert survey.seconds_of_a_hang(store, TIMEOUT) is None


@pytest.mark.parametrize(
    ("heartbeat", "own_steps", "phase"),
    [
        ([0, "start-up", 0, 1.0, 0], 0, "start-up"),
        ([0, "start-up", 0, 1.0, 0], 10, "step 10 or later"),
        ([7, "saving after step 9", 90, 24.0, 9], 9, "saving after step 9"),
        ([7, "step 11, Forward()", 90, 1.0, 10], 9, "step 11, Forward()"),
    ],
)
def test_a_rank_is_as_far_as_its_heartbeat_or_a_common_step(
    tmp_path: Path, heartbeat: list[object], own_steps: int, phase: str
) -> None:
    """An earlier version reported "start-up" for a rank that died ten quick steps later."""
    store, grid = dist.HashStore(), Grid(pp=1, dp=2, tp=1)
    store.set("rank 1", json.dumps({"host": "node1"}))
    store.set("heartbeat 1", json.dumps(heartbeat))
    failures = Failures(store, grid, 0, RankLog(tmp_path, 0), 1.0, own_steps=lambda: own_steps)
    place = f"[node1, rank 1 (pp 0, dp 1, tp 0), last known phase: {phase}]"
    assert failures.last_known_place(1) == place


def test_a_phase_has_its_own_timeout_and_the_one_around_it_keeps_its_own() -> None:
    activity = Activity()
    with activity.during("step 12"):
        with activity.during("saving", timeouts=24.0):
            assert activity.timeouts == 24.0
        assert activity.timeouts == 1.0 and str(activity) == "step 12"
    assert activity.timeouts == START_UP_TIMEOUTS


def test_between_two_phases_the_last_step_is_named() -> None:
    activity = Activity()
    assert str(activity) == "start-up"
    activity.steps = 12
    assert str(activity) == "after step 12"


@pytest.mark.parametrize("third_ends", [True, False])
def test_only_a_rank_that_has_ended_is_not_missed(clock: Clock, third_ends: bool) -> None:
    store = dist.HashStore()
    store.set("ended 1", "")
    if third_ends:
        store.set("ended 2", "")
    survey = Survey(range(3), sees_all=True, period=1.0)
    hangs = []
    for turn in range(30):
        write_heartbeats(store, (turn, turn), (0, 0), (0, 0), timeouts=(1.0, 1.0, 1.0))
        hangs.append(survey.seconds_of_a_hang(store, TIMEOUT))
        clock.now += 1.0
    assert hangs.count(None) == (30 if third_ends else TIMEOUT + 1)


def recorded(name: str, number: int, retired: bool = False, **changes: Any) -> dict[str, Any]:
    """Return an entry of torch 2.13's flight recorder, without the keys that nothing reads."""
    return {
        "process_group": ["7", "pp"],
        "profiling_name": f"nccl:{name}",
        "is_p2p": True,
        "p2p_seq_id": number,
        "collective_seq_id": 0,
        "input_sizes": [] if name == "coalesced" else [[4, 1024, 2048]],
        "retired": retired,
        **changes,
    }


def test_messages_of_a_batch_that_is_done_are_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 records each message of a batch and then the batch, but retires only the batch.

    So after a thousand steps, every message of the pipeline would count as pending. The first
    message of the run would be reported as the cause of a hang.
    """
    other: dict[str, Any] = {"process_group": ["8", "dp"], "is_p2p": False, "collective_seq_id": 1}
    entries = [
        recorded("send 0->1", 1),
        recorded("recv 0<-1", 1),
        recorded("coalesced", 1, retired=True),
        recorded("all_reduce", 1, retired=False, **other),
        recorded("all_gather", 2, **{**other, "collective_seq_id": 2}),
        recorded("ALLGATHER_coalesced", 2, retired=True, **{**other, "collective_seq_id": 2}),
        recorded("send 0->1", 2),
        recorded("coalesced", 2),
        recorded("coalesced", 2, retired=True, process_group=["9", "tp"]),  # of another group
        recorded("recv 0<-1", 3),
        recorded("send 0->1", 3, retired=True),  # does not retire the other message
    ]
    answer = json.dumps({"entries": entries})
    silent = json.dumps({"entries": []})
    for name, text in zip(module._RECORDERS, (answer, silent), strict=True):
        monkeypatch.setattr(c10d, name, lambda text=text, **_: text, raising=False)
    size = "(4, 1024, 2048)"
    assert pending_collectives() == [
        f"nccl:all_reduce of {size}, number 1 in the dp group",
        f"nccl:send 0->1 of {size}, number 2 in the pp group",
        "nccl:coalesced of , number 2 in the pp group",
        f"nccl:recv 0<-1 of {size}, number 3 in the pp group",
    ]
