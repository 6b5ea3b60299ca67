"""Commands stopped by a signal leave no process and no temporary folder, and show no stack.

The tests start them as users do, because a fork server that all tests share would outlive them.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.support.machine import limit
from tests.support.tiny import GPT2

ROOT = Path(__file__).parents[1]
MARK = "MEGASPEED_TEST_MARK"
_SECONDS_AT_MOST = limit(100)

RANKS = """
from megaspeed.measurement.local_ranks import run_on_ranks
from tests.support.waiting_rank import wait_for_signal
run_on_ranks(wait_for_signal, world_size=2, device_type="cpu")
"""

INTERRUPTED = """
import os, signal, sys
moment, *arguments = sys.argv[1:]
def interrupt(happened):
    global moment
    if happened == moment:
        moment = None
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(lambda event, given: interrupt(given[0]) if event == "import" else None)
sys.setprofile(lambda frame, event, _: interrupt(frame.f_code.co_name))
from megaspeed.cli import main
sys.exit(main(arguments))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = {"train": [str(ROOT / "LICENSE")], "validation_fraction": 0.0, "sequence_length": 16}
    values = {"model": GPT2, "data": text, "training": {"steps": 10}, "train_batch_size": 12}
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({**values, "train_micro_batch_size_per_gpu": 2}))
    return file


class Command:
    """A command with its own temporary folder, and all of its processes."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self._mark = uuid4().hex
        own = {MARK: self._mark, "TMPDIR": str(self.temporary), "CUDA_VISIBLE_DEVICES": ""}
        own |= {"MEGASPEED_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        command, none = [sys.executable, *arguments], subprocess.DEVNULL
        environment = {**os.environ, **own}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=none, stdout=none, stderr=none
        )

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if self._is_own(each)]

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE
            return not ended and process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False

    def has_fork_server(self) -> bool:
        """Return whether a fork server runs. It first imports torch, which takes seconds."""
        for process in self.processes():
            try:
                if any("forkserver import main" in word for word in process.cmdline()):
                    return True
            except psutil.Error:
                continue
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(arguments, tmp_path))
        return started[-1]

    yield start
    for command in started:
        for process in command.processes():
            process.kill()
        command.process.wait()


def poll(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS_AT_MOST
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["server", "ranks"])
def test_ranks_end_if_the_process_that_started_them_is_killed(
    moment: str, start: Callable[..., Command]
) -> None:
    command = start("-c", RANKS)
    # The five are the command, the resource tracker, the fork server and two ranks.
    poll(command.has_fork_server if moment == "server" else lambda: len(command.processes()) == 5)
    command.process.kill()
    poll(lambda: not command.processes())


@pytest.mark.timeout(300)
def test_a_plan_that_is_terminated_leaves_no_process_and_no_folder(
    config: Path, start: Callable[..., Command]
) -> None:
    """The command starts a program, which starts a fork server, which forks the ranks."""
    options = ("--config", str(config), "--world-size", "2", "--device", "cpu")
    command = start("-m", "megaspeed.cli", "plan", *options)
    poll(command.has_fork_server)
    command.process.terminate()
    assert command.process.wait(_SECONDS_AT_MOST) == 128 + signal.SIGTERM
    poll(lambda: not command.processes())
    assert {file.name[:10] for file in command.temporary.iterdir()} <= {"torchinduc"}


def test_a_rank_ends_if_its_launcher_was_killed_before_the_rank_ran(
    config: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Command]
) -> None:
    monkeypatch.setenv("MEGASPEED_STARTER", str(2**22))  # no process has this number
    command = start("-m", "megaspeed.cli", "train", "--config", str(config))
    assert command.process.wait(_SECONDS_AT_MOST) == -signal.SIGTERM


@pytest.mark.parametrize("moment", ["argparse", "pydantic", "parse", "run"])
def test_ctrl_c_prints_one_line(moment: str, config: Path) -> None:
    """The moments are: during the first imports, during later imports, while options are read, and
    in the command.
    """
    check = ("check", "--config", str(config))
    command = [sys.executable, "-c", INTERRUPTED, moment, *check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    name = "megaspeed check" if moment == "run" else "megaspeed"
    assert done.stderr == f"{name}: stopped\n"
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ctrl_c_while_text_is_prepared_ends_at_once_and_leaves_no_run_folder(
    config: Path, tmp_path: Path
) -> None:
    """Rank 0 prepares the text and shows the bytes that are done. Other ranks print nothing."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{number:x}" for number in range(4_000_000)))
    terminal, end = pty.openpty()
    train = [sys.executable, "-m", "megaspeed.cli", "train", "--world-size", "2"]
    changes = [f'data.train=["{text}"]', f"training.run_dir={tmp_path}/runs/run"]
    process = subprocess.Popen(
        [*train, "--config", str(config), "--set", *changes],
        env={**os.environ, "MEGASPEED_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    shown = b""

    def has_shown(words: bytes) -> bool:
        nonlocal shown
        shown += os.read(terminal, 2**16)
        return words in shown

    poll(lambda: has_shown(b"tokenizing the text, 0.00 of 26.88 MB"))
    holder = int((tmp_path / "cache" / "write.lock").read_text().split()[1])
    assert psutil.Process(holder).environ()["RANK"] == "0"
    stopped = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(_SECONDS_AT_MOST) == 128 + signal.SIGINT
    assert time.monotonic() - stopped < limit(1)
    rest = os.read(terminal, 2**16)
    assert rest.count(b"SIGINT before training began: there is nothing to save") == 1
    assert b"another process" not in shown + rest
    assert not (tmp_path / "runs").exists()
