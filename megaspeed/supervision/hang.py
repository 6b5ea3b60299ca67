"""Hangs: whether the run makes no progress, and which ranks the others wait for.

    each rank, every second   heartbeat [number, activity, progress, timeouts, steps]  -> store
    rank 0                    reads the heartbeats of all ranks
    other ranks               read the heartbeats of rank 0

A rank that no longer responds does not write its next heartbeat. ``progress`` counts what a rank
has begun; ``timeouts`` is the number of hang timeouts that its current phase may take. After a hang
was detected,

    each rank     writes its stacks and what it waits for       -> its log file
                  and its ``RankState``                         -> the store
    one rank      reads the states of all ranks                 -> the console

A rank that waits for others is not the cause. The cause is a rank that does not answer. If all
ranks answer, it is a rank that does not wait for others. If all ranks wait, they wait in different
calls.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megaspeed.topology.activity import SUSPENDED_SECONDS, Activity
from megaspeed.topology.store import ranks_named, wait_for_keys

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that dump the flight recorders of gloo and, if torch has it, of NCCL. torch's type
stubs omit both."""

_MOST_CALLS_NAMED = 4


class Survey:
    """Reads the heartbeats of some ranks again and again.

    A run hangs if one of these ranks has not written a heartbeat for the timeout, or if none of
    them has made progress for the timeout times the largest ``timeouts``.

    Args:
        ranks: whose heartbeats are read.
        sees_all: whether these are all ranks. Otherwise their progress is not judged, because
            they may wait for another rank that makes progress.
        period: seconds between two heartbeats of a rank, and between two calls of this object.
    """

    def __init__(self, ranks: range, *, sees_all: bool, period: float) -> None:
        self._ranks = ranks
        self._sees_all = sees_all
        self._period = period
        self._last_call = time.monotonic()
        self._heartbeats: dict[int, tuple[int, float]] = {}  # the latest number, and since when
        self._progress: dict[int, int] = {}
        self._last_progress = time.monotonic()

    def seconds_of_a_hang(self, store: dist.Store, timeout: float) -> float | None:
        """How long the run has made no progress; None if it does not hang. Does not wait."""
        # This process did not run, and perhaps others did not either, so all clocks start again.
        if time.monotonic() - self._last_call > self._period + SUSPENDED_SECONDS:
            self._heartbeats.clear()
            self._last_progress = time.monotonic()
        self._last_call = time.monotonic()
        heartbeats = store.multi_get([f"heartbeat {rank}" for rank in self._ranks])
        now, timeouts = time.monotonic(), 1.0
        for rank, heartbeat in zip(self._ranks, heartbeats, strict=True):
            number, _, progress, own_timeouts, _ = json.loads(heartbeat)
            if self._heartbeats.get(rank, (-1, now))[0] != number:
                self._heartbeats[rank] = (number, now)
            if self._progress.get(rank) != progress:
                self._progress[rank], self._last_progress = progress, now
            timeouts = max(timeouts, own_timeouts)
        late = [rank for rank in self._ranks if now - self._heartbeats[rank][1] > timeout]
        # A rank that has ended writes no heartbeat either.
        if any(not store.check([f"ended {rank}"]) for rank in late):
            return timeout
        seconds = now - self._last_progress
        return seconds if self._sees_all and seconds > timeout * timeouts else None


class RankState(NamedTuple):
    """What one rank reports after a hang was detected."""

    doing: str  # its phase and piece of work
    calls: list[str]  # the collectives and messages that it waits for, the oldest first


def write_heartbeat(store: dist.Store, rank: int, number: int, activity: Activity) -> None:
    """Write that this rank responds, and how far it has come."""
    heartbeat = [number, str(activity), activity.progress, activity.timeouts, activity.steps]
    store.set(f"heartbeat {rank}", json.dumps(heartbeat))


def wait_for_states(
    store: dist.Store, world_size: int, seconds: float
) -> dict[int, RankState | None]:
    """What each rank has written to the store within ``seconds``; None if it has not answered."""
    keys = [f"state {rank}" for rank in range(world_size)]
    wait_for_keys(store, keys, seconds)
    return {
        rank: RankState(*json.loads(store.get(key))) if store.check([key]) else None
        for rank, key in enumerate(keys)
    }


def pending_collectives() -> list[str]:
    """The collectives that this rank has called and that are not done, the oldest first.

    They are read from torch's flight recorder. It records every collective, and NCCL's
    point-to-point messages, if TORCH_FR_BUFFER_SIZE is set when torch first uses it.
    """
    entries: list[dict[str, Any]] = []
    for dump in _RECORDERS:
        with contextlib.suppress(Exception):  # an incomplete diagnosis is better than none
            trace = json.loads(getattr(c10d, dump)(includeCollectives=True, onlyActive=False))
            entries += _pending(trace.get("entries", ()))
    members: dict[str, list[int]] = {}  # torch's name of a group -> its global ranks
    with contextlib.suppress(Exception):  # no group exists yet, or the groups are being destroyed
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
            members[str(dist.distributed_c10d._world.pg_names[group])] = sorted(ranks)
    return list(dict.fromkeys(_describe(entry, members) for entry in entries))


def _pending(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of calls that are not done.

    Calls that NCCL starts together, such as the messages of a pipeline, are a batch. Each call has
    an entry, and then the batch has one with the same number. torch 2.13 marks only the entry of
    the batch as done ("retired"). Its name ends with "coalesced".
    """

    def batch(entry: dict[str, Any]) -> tuple[object, ...]:
        return (*entry["process_group"], entry["is_p2p"], _number(entry))

    retired = [one for one in entries if one["retired"]]
    done = {batch(one) for one in retired if one["profiling_name"].endswith("coalesced")}
    return [one for one in entries if not one["retired"] and batch(one) not in done]


def _number(entry: dict[str, Any]) -> int:
    return int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"])


def _describe(entry: dict[str, Any], members: dict[str, list[int]]) -> str:
    name, description = entry["process_group"]
    group = "world" if description == "default_pg" else description.replace("_", " ")
    ranks = members.get(name)
    of = f" of {ranks_named(ranks)}" if ranks else ""
    sizes = ", ".join(str(tuple(size)) for size in entry["input_sizes"][:3])
    return f"{entry['profiling_name']} of {sizes}, number {_number(entry)} in the {group} group{of}"


def explain_hang(states: dict[int, RankState | None], seconds: float) -> str:
    """One line that names the missing ranks, and one for each kind of call that others wait in."""
    answers = {rank: state for rank, state in states.items() if state is not None}
    silent = [rank for rank in states if rank not in answers]
    waiting_for_none = [rank for rank, state in answers.items() if not state.calls]
    if silent:
        verdict = (
            f"{ranks_named(silent)} did not answer: the process was stopped, its system "
            "is out of memory, or its machine or network has failed"
        )
    elif len(waiting_for_none) == len(states) > 1:
        verdict = "all ranks answered, but no pending call is known; see their stacks"
    elif waiting_for_none:
        places = sorted({answers[rank].doing for rank in waiting_for_none})
        verdict = (
            f"{ranks_named(waiting_for_none)} did not arrive where the others wait "
            f"({'; '.join(places)})"
        )
    else:
        verdict = "all ranks wait, but in different calls"
    lines = [f"no progress for {seconds:.0f} s: {verdict}"]
    waiting: dict[tuple[str, str], list[int]] = {}
    for rank, state in answers.items():
        if state.calls:
            waiting.setdefault((state.doing, state.calls[0]), []).append(rank)
    for (doing, call), ranks in list(waiting.items())[:_MOST_CALLS_NAMED]:
        lines.append(f"  {ranks_named(ranks)}: {doing}, waiting in {call}")
    if len(waiting) > _MOST_CALLS_NAMED:
        lines.append(f"  and {len(waiting) - _MOST_CALLS_NAMED} more kinds of calls")
    return "\n".join(lines)
