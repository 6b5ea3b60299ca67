"""What a rank reports when it fails, its log file, and which rank reports.

    [gpu17, rank 5 (pp 1, dp 0, tp 1), step 12, Backward(micro_batch=3)] RuntimeError: ...
    Traceback (most recent call last):
      ...

A rank writes this report while the exception propagates, before it waits for anything: other ranks
may wait for this rank, and objects that close after the exception may wait for other ranks.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO

import torch.distributed as dist

from megaspeed.supervision.process_end import EXIT_FAILED, EXIT_HANG
from megaspeed.topology.activity import DURING
from megaspeed.topology.grid import Grid
from megaspeed.topology.store import print_error

_REPORTED = "_megaspeed_reported"
SECONDS_FOR_OTHER_REPORTS = 4.0
"""A rank that lost a connection waits this long for a report from the rank that knows the cause."""
_SECONDS_FOR_THE_WATCH = 10.0
"""If the store was lost, too, the watch reports it. The main thread waits this long for the watch,
which also waits for other reports first."""
_SECONDS_TO_WRITE_STACKS = 2.0

_LOST_PEER = re.compile(
    "by peer|Broken pipe|Socket closed|NCCL|ncclRemoteError|remote process|Connection refused",
)
"""Matches the errors that gloo and NCCL raise if another rank has ended."""


def place_of(grid: Grid, rank: int, doing: str = "", host: str | None = None) -> str:
    """Such as "[gpu17, rank 5 (pp 1, dp 0, tp 1), step 12]". ``host`` is this host if omitted."""
    where = grid.name_of(rank) if rank < grid.world_size else f"rank {rank} (spare)"
    return f"[{', '.join(part for part in (host or socket.gethostname(), where, doing) if part)}]"


def describe_failure(error: Exception, grid: Grid, rank: int) -> str:
    """The failure report of a rank: a header line, then the traceback."""
    notes: list[str] = getattr(error, "__notes__", [])
    # The innermost phase was noted first.
    phases = [note.removeprefix(DURING) for note in reversed(notes) if note.startswith(DURING)]
    lines = str(error).strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error))
    return f"{place_of(grid, rank, ', '.join(phases))} {type(error).__name__}: {lines[0]}\n{trace}"


def write_error_file(error_file: str | None, text: str) -> None:
    """Write the file in which torchrun looks for the reason why a rank has ended."""
    if error_file is None or Path(error_file).exists():
        return
    extra: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[0], "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(error_file).write_text(json.dumps({"message": message}))


def processes_killed_for_memory() -> int:
    """How many processes the kernel has killed on this host because memory ran out."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


class RankLog:
    """``logs/rank-00005.log`` in the run folder: details that the console does not show.

    It contains failure reports, the stacks of a hang, Python's log records and warnings. Until the
    file is opened, the text is kept in memory, so a run that is refused leaves no file. Any thread
    may write.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / "logs" / f"rank-{rank:05d}.log"
        self._file: TextIO | None = None
        self._handler: logging.Handler | None = None
        self._buffered: list[str] = []
        self._handles_quit = False

    @property
    def path(self) -> Path | None:
        """The path of the file; None before it is opened."""
        return None if self._file is None else self._path

    def open(self) -> None:
        """Open the file for appending and write the text kept in memory. From now on, Python's log
        records are written, too.

        If the folder cannot be written to, the text stays in memory; the run reports the problem.
        """
        if self._file is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Each line is written at once, because the rank may be killed at any time.
            self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
        except OSError:
            return
        if self._handles_quit:
            self._register()
        self._handler = logging.StreamHandler(self._file)
        form = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._handler.setFormatter(form)
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(True)
        self.write("".join(self._buffered))
        self._buffered.clear()

    def write(self, text: str) -> None:
        """Write text, or keep it in memory until the file is open. Ignores a full disk."""
        if self._file is None:
            self._buffered.append(text)
            return
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)

    def write_stacks(self, activity: object, calls: Sequence[str] = ()) -> None:
        """Open the file and write the stacks of all threads, unless its disk does not respond."""

        def write() -> None:
            self.open()
            for call in calls:
                self.note(f"  waiting in {call}")
            self.note(f"stacks of all threads, in {activity}:")
            stream = self._file or sys.__stderr__ or sys.stderr
            faulthandler.dump_traceback(stream, all_threads=True)

        # A disk that does not respond blocks every write, so a thread of its own waits for it.
        writer = threading.Thread(target=write, name="watch: stacks", daemon=True)
        writer.start()
        writer.join(_SECONDS_TO_WRITE_STACKS)

    def handle_quit(self) -> None:
        """From now on, SIGQUIT (Ctrl-\\) writes the stacks of all threads and ends this process
        with exit code 3, even if a call holds Python's GIL. Until the file is open, the stacks are
        written to standard error.
        """
        self._handles_quit = True
        # faulthandler then calls the handler that was set before. A handler is called with the
        # signal's number, so libc's _exit ends the process with 3, which is EXIT_HANG.
        assert signal.SIGQUIT == EXIT_HANG
        faulthandler.unregister(signal.SIGQUIT)  # else it would keep the handler from before
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGQUIT, ctypes.cast(libc._exit, ctypes.c_void_p))
        self._register()

    def _register(self) -> None:
        stream = self._file or sys.__stderr__ or sys.stderr
        faulthandler.register(signal.SIGQUIT, stream, all_threads=True, chain=True)

    def note(self, line: str) -> None:
        """Write a line with the time."""
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._handles_quit:
            faulthandler.unregister(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            logging.captureWarnings(False)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class Failures:
    """The failure that ends the run, and the report of an exception of this rank.

    The first rank that detects a failure claims it in the store, and only that rank writes to the
    console. Any thread may call the methods.
    """

    def __init__(
        self,
        store: dist.Store,
        grid: Grid,
        rank: int,
        log: RankLog,
        period: float,
        own_steps: Callable[[], int],
    ) -> None:
        self._own_steps = own_steps
        self._store = store
        self._grid = grid
        self._rank = rank
        self._log = log
        self._period = period
        self.known = threading.Event()
        """Whether this rank knows that a rank has failed."""
        self.is_hang = False
        self.by: int | None = None
        """The rank that has claimed the failure."""
        self.must_report = False
        """Whether this rank was the first to raise an expected exception, which it reports."""

    def claim(self, *, is_hang: bool = False) -> bool:
        """Claim that this rank was the first to detect a failure. Returns False if it was not."""
        if self.known.is_set():
            return False
        own = json.dumps([self._rank, is_hang])
        try:
            first = self._store.compare_set("failure", "", own).decode() == own
            self.read(self._store)
        except RuntimeError:  # the store is gone, so this rank reports its own failure
            return True
        return first

    def read(self, store: dist.Store) -> None:
        """Read from ``store`` whether a rank has failed. Raises RuntimeError if it is gone."""
        if not self.known.is_set() and store.check(["failure"]):
            self.by, self.is_hang = json.loads(store.get("failure"))
            self.known.set()

    @property
    def exit_code(self) -> int:
        """The exit code after a failure; the first failure decides it."""
        return EXIT_HANG if self.is_hang else EXIT_FAILED

    def host_of(self, rank: int) -> str:
        """The name of the machine that ``rank`` runs on. Raises RuntimeError without a store."""
        return str(json.loads(self._store.get(f"rank {rank}"))["host"])

    def last_known_place(self, rank: int) -> str:
        """Where ``rank`` was at its last heartbeat, or in the last step that this rank completed,
        in which it took part. Raises RuntimeError without a store.
        """
        _, phase, *_, steps = json.loads(self._store.get(f"heartbeat {rank}"))
        if steps < self._own_steps() and rank < self._grid.world_size:
            phase = f"step {self._own_steps()} or later"
        return place_of(self._grid, rank, f"last known phase: {phase}", self.host_of(rank))

    @contextmanager
    def reported(self, *, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Reports an exception that leaves this block, unless another rank caused it. Nested blocks
        report it once.

        Args:
            expected: exceptions that the caller reports itself. Other ranks are informed.
        """
        try:
            yield
        except Exception as error:
            if hasattr(error, _REPORTED):
                raise
            setattr(error, _REPORTED, True)
            if isinstance(error, expected):
                self._wait_for_other_reports(error)
                self.must_report = self.claim()
            else:
                self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        text = describe_failure(error, self._grid, self._rank)
        # A lost connection is an effect: the rank that has failed reports the cause.
        silent = self._wait_for_other_reports(error)
        if self.claim():
            for rank in silent:
                print_error(f"{self.last_known_place(rank)} does not respond")
            print_error(text.rstrip("\n"))
            write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE"), text)
        # Last, because this call blocks if the disk of the run folder does not respond.
        self._log.open()
        self._log.write(text)

    def _wait_for_other_reports(self, error: Exception) -> list[int]:
        """Wait for another rank to report why a connection was lost. If none does, return the ranks
        that no longer respond.
        """
        world = self._grid.world_size
        if not _LOST_PEER.search(str(error)) or world == 1:
            return []
        if self.known.wait(SECONDS_FOR_OTHER_REPORTS):
            return []
        try:
            keys = [f"heartbeat {rank}" for rank in range(world)]
            before = self._store.multi_get(keys)
            if self.known.wait(3 * self._period):
                return []
            pairs = enumerate(zip(before, self._store.multi_get(keys), strict=True))
            silent = [rank for rank, (old, new) in pairs if old == new and rank != self._rank]
            return [rank for rank in silent if not self._store.check([f"ended {rank}"])]
        except RuntimeError:
            # The store is gone, too. The first thread reports it, and ends the process.
            time.sleep(_SECONDS_FOR_THE_WATCH)
            return []
