"""Whether ranks respond and make progress, from the beats that they write to the store.

    each rank, every second     beat: [number, activity, progress, patience]  -> the store
    rank 0                      reads the beats of all ranks
    other ranks                 read the beats of rank 0

A rank that no longer responds does not write its next beat. The progress of a rank counts what it
has begun, and its patience states how many hang timeouts its present phase may take.
"""

import json
import time

import torch.distributed as dist

from megaspeed.topology.activity import SECONDS_OF_A_STANDSTILL


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
