"""The command that a run prints if it ends before its last step. ``test_faults.py`` runs one."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from megaspeed.checkpoint.folders import checkpoint_name
from megaspeed.job.continuing import command_line, how_to_continue
from megaspeed.job.job import Job
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture
def ended(tmp_path: Path) -> SimpleNamespace:
    """Return a job of one process with a checkpoint of step 4 of 10."""
    (tmp_path / "checkpoints" / checkpoint_name(4)).mkdir(parents=True)
    run = tiny_run(TEXT, training={"steps": 10, "run_dir": str(tmp_path)})
    launch = LaunchEnvironment(0, 1, 0, 1, "single process")
    meeting = SimpleNamespace(launch=launch, between_attempts=None)
    return SimpleNamespace(run=run, launchers=[], meeting=meeting, opened=True)


def line(job: SimpleNamespace, code: int = 0, *words: str) -> str | None:
    return how_to_continue(cast(Job, job), code, words or ("megaspeed", "train", "--config", "F"))


@pytest.mark.parametrize(
    "starts_over",
    [(), ("--fresh",), ("--fre", "--resume", "never"), ("--resume=runs/a b",), ("--res", "x=y")],
)
def test_the_command_keeps_all_options_that_do_not_start_over(
    starts_over: tuple[str, ...], ended: SimpleNamespace
) -> None:
    command = ("megaspeed", "train", "--config", "my run.json")
    said = line(ended, 0, *command, *starts_over, "--set", "training.run_dir=runs/--fresh")
    expected = "megaspeed train --config 'my run.json' --set training.run_dir=runs/--fresh"
    assert said == f"To continue: {expected}"


def test_there_is_no_line_if_the_command_would_not_continue_the_run(
    ended: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert line(ended, 1) == line(ended) == "To continue: megaspeed train --config F"
    assert line(ended, 2) is None, "the input is wrong"
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
        assert line(ended, 1) is None and line(ended) is not None, "a failed run restarts by itself"
    ended.opened = False
    assert line(ended, 1) is None, "the checkpoints may be of an earlier run"
    ended.opened = True
    (tmp_path / "checkpoints" / checkpoint_name(10)).mkdir()
    assert line(ended) is None, "nothing is left to train"


def test_ranks_that_need_more_than_this_command_are_mentioned(ended: SimpleNamespace) -> None:
    ended.meeting.launch = LaunchEnvironment(0, 4, 0, 2, "RANK/WORLD_SIZE")
    ended.launchers, again = [1], "To continue, start all ranks again. This one was started with"
    assert line(ended, 0, "torchrun", "F") == f"{again}: torchrun F"
    ended.meeting.launch = LaunchEnvironment(0, 4, 0, 4, "SLURM_*")
    ended.launchers = []
    assert line(ended, 0, "python", "F") == f"{again}: python F"


def test_the_command_is_the_one_that_a_user_has_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line([psutil.Process().pid]) == psutil.Process().cmdline()
    torchrun = Path(sys.executable).with_name("torchrun")
    monkeypatch.setenv("PATH", str(torchrun.parent))
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(torchrun), "F"])
    assert command_line([]) == ["torchrun", "F"]
    monkeypatch.setenv("PATH", "")
    assert command_line([]) == [str(torchrun), "F"]
