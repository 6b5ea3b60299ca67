"""Which ranks the others wait for if a run makes no progress.

    each rank     stacks of its threads, and what it waits for  -> its log file
                  the same in short                             -> the store
    one rank      reads the states of all ranks                 -> one line on the console

A rank that waits for others is not the cause. The cause is a rank that does not answer, or else a
rank that waits for no other. If all ranks wait, they wait in different calls.
"""

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megaspeed.topology.activity import SECONDS_OF_A_STANDSTILL
from megaspeed.topology.meeting import ranks_named

# Whether ranks respond and make progress, from the beats that they write to the store.
#
#     each rank, every second     beat: [number, activity, progress, patience]  -> the store
#     rank 0                      reads the beats of all ranks
#     other ranks                 read the beats of rank 0
#
# A rank that no longer responds does not write its next beat. The progress of a rank counts what it
# has begun, and its patience states how many hang timeouts its present phase may take.


class Survey:
    """Reads the beats of some ranks again and again.

    A run hangs if one of these ranks has not written a beat for the timeout, or if none of them
    has made progress for the timeout times the largest patience.

    Args:
        ranks: whose beats are read.
        sees_all: whether these are all ranks. Otherwise their progress is not judged, because
            they may wait for another rank that makes progress.
        period: seconds between two beats of a rank, and between two calls of this object.
    """

    def __init__(self, ranks: range, *, sees_all: bool, period: float) -> None:
        self._ranks = ranks
        self._sees_all = sees_all
        self._period = period
        self._asked = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}  # the beat's number, and since when
        self._progress: dict[int, int] = {}
        self._moved = time.monotonic()

    def seconds_of_a_hang(self, store: dist.Store, timeout: float) -> float | None:
        """How long the run has made no progress; None if it does not hang. Does not wait."""
        if time.monotonic() - self._asked > self._period + SECONDS_OF_A_STANDSTILL:
            self._heard.clear()
            self._moved = time.monotonic()
        self._asked = time.monotonic()
        beats = store.multi_get([f"beat {rank}" for rank in self._ranks])
        now, patience = time.monotonic(), 1.0
        for rank, beat in zip(self._ranks, beats, strict=True):
            number, _, progress, own_patience = json.loads(beat)
            if self._heard.get(rank, (-1, now))[0] != number:
                self._heard[rank] = (number, now)
            if self._progress.get(rank) != progress:
                self._progress[rank], self._moved = progress, now
            patience = max(patience, own_patience)
        late = [rank for rank in self._ranks if now - self._heard[rank][1] > timeout]
        if any(not store.check([f"ended {rank}"]) for rank in late):
            return timeout
        hangs = self._sees_all and now - self._moved > timeout * patience
        return now - self._moved if hangs else None


_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The dump functions of gloo and, in builds with it, of NCCL; torch's stubs omit both."""

_MOST_CALLS_NAMED = 4


@dataclass(frozen=True)
class RankState:
    """What one rank reported after a hang was detected.

    Attributes:
        doing: its phase and piece of work.
        calls: the collectives and messages that it waits for, the oldest first.
    """

    doing: str
    calls: tuple[str, ...]

    def to_json(self) -> str:
        """For the store."""
        return json.dumps([self.doing, self.calls])

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankState":
        """The inverse of ``to_json``."""
        doing, calls = json.loads(text)
        return cls(doing, tuple(calls))


def states_of_ranks(store: dist.Store, world_size: int) -> dict[int, RankState | None]:
    """What each rank has written to the store; None if it has not answered yet."""
    return {
        rank: RankState.from_json(store.get(f"state {rank}"))
        if store.check([f"state {rank}"])
        else None
        for rank in range(world_size)
    }


def pending_collectives() -> list[str]:
    """The collectives that this rank has called and that are not done, the oldest first.

    From torch's flight recorder. It records every collective, and NCCL's point-to-point messages,
    if TORCH_FR_BUFFER_SIZE is set when torch first uses it.
    """
    entries: list[dict[str, Any]] = []
    for dump in _RECORDERS:
        with contextlib.suppress(Exception):  # an incomplete diagnosis is better than none
            trace = json.loads(getattr(c10d, dump)(includeCollectives=True, onlyActive=False))
            entries += trace.get("entries", ())
    members = _members_by_group()
    calls = [_describe(entry, members) for entry in entries if not entry["retired"]]
    return list(dict.fromkeys(calls))


def explain_hang(states: dict[int, RankState | None], seconds: float) -> str:
    """One line that names the missing ranks, and one for each kind of call that others wait in.

    Args:
        states: the state of each rank; None if it did not answer.
        seconds: how long there was no progress.
    """
    silent = [rank for rank, state in states.items() if state is None]
    waiting_for_none = [r for r, state in states.items() if state is not None and not state.calls]
    if silent:
        verdict = (
            f"{ranks_named(silent)} did not answer: the process was stopped, its system "
            "is out of memory, or its machine or network has failed"
        )
    elif len(waiting_for_none) == len(states) > 1:
        verdict = "all ranks answered, but no pending call is known; see their stacks"
    elif waiting_for_none:
        places = {state.doing for r in waiting_for_none if (state := states[r]) is not None}
        verdict = (
            f"{ranks_named(waiting_for_none)} did not arrive where the others wait "
            f"({'; '.join(sorted(places))})"
        )
    else:
        verdict = "all ranks wait, but in different calls"
    lines = [f"no progress for {seconds:.0f} s: {verdict}"]
    waiting: dict[tuple[str, str], list[int]] = {}
    for rank, state in states.items():
        if state is not None and state.calls:
            waiting.setdefault((state.doing, state.calls[0]), []).append(rank)
    for (doing, call), ranks in list(waiting.items())[:_MOST_CALLS_NAMED]:
        lines.append(f"  {ranks_named(ranks)}: {doing}, waiting in {call}")
    if len(waiting) > _MOST_CALLS_NAMED:
        lines.append(f"  and {len(waiting) - _MOST_CALLS_NAMED} more kinds of calls")
    return "\n".join(lines)


def _members_by_group() -> dict[str, list[int]]:
    """Global ranks of each process group of this rank, by torch's name for the group."""
    members: dict[str, list[int]] = {}
    with contextlib.suppress(Exception):  # no group exists yet, or the groups are being destroyed
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
            members[str(dist.distributed_c10d._world.pg_names[group])] = sorted(ranks)
    return members


def _describe(entry: dict[str, Any], members: dict[str, list[int]]) -> str:
    name, description = entry["process_group"]
    group = "world" if description == "default_pg" else description
    ranks = members.get(name)
    of = f" of {ranks_named(ranks)}" if ranks else ""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(str(tuple(size)) for size in entry["input_sizes"][:3])
    return f"{entry['profiling_name']} of {sizes}, number {number} in the {group} group{of}"
