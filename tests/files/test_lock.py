"""Only one process at a time holds a lock, and the file names it."""

import errno
import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaspeed.files.durable import Locked, lock
from tests.support.machine import limit

HOLDER = f"process {os.getpid()} on {socket.gethostname()}"


def test_the_file_names_the_holder_and_is_empty_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.write_text("a host with a long name 4194304\n")
    with lock(file):
        assert file.read_text() == f"{socket.gethostname()} {os.getpid()}\n"
        with pytest.raises(Locked, match=HOLDER) as refused, lock(file):
            raise AssertionError("the block does not run")
    assert refused.value.holder == HOLDER
    assert file.read_text() == ""
    with lock(file):
        pass


def test_a_thread_may_enter_a_reentrant_lock_again(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with lock(file, reentrant=True, wait_seconds=math.inf):
        with lock(file, reentrant=True, wait_seconds=math.inf):
            pass
        assert file.read_text() != ""
        with pytest.raises(Locked), lock(file):
            raise AssertionError("the block does not run")


KILLED = """
import os, signal, sys, time
from pathlib import Path
from megaspeed.files.durable import lock

with lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lock_of_a_killed_process_is_free_and_a_waiting_process_gets_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "lock"
    command = [sys.executable, "-c", KILLED, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(Locked) as refused, lock(file, wait_seconds=0.2):
            raise AssertionError("the block does not run")
        kill = threading.Timer(1.0, other.stdin.close)
        start = time.monotonic()
        kill.start()
        with lock(file, wait_seconds=limit(60)):
            assert time.monotonic() - start > 0.9
        kill.join()
    assert refused.value.holder == f"process {other.pid} on {socket.gethostname()}"


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with lock(tmp_path / "optional", required=False), lock(tmp_path / "optional", required=False):
        pass
    with lock(tmp_path / "marker"), pytest.raises(Locked), lock(tmp_path / "marker"):
        raise AssertionError("the block does not run")
    with lock(tmp_path / "marker"):
        pass


def test_the_lock_of_another_process_at_the_same_path_keeps_its_holder(tmp_path: Path) -> None:
    """In an earlier version, the first process emptied the file that it found when it ended."""
    file = tmp_path / "lock"
    with lock(file):
        file.rename(tmp_path / "renamed")
        file.write_text("another 4711\n")
    assert file.read_text() == "another 4711\n"


def test_a_lock_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError), lock(tmp_path / "file" / "lock", required=False):
        raise AssertionError("the block does not run")
