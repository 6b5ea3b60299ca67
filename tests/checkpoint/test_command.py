"""``megaspeed checkpoint``: its output, the damage that it finds, and its exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.cli import main
from tests.checkpoint.written import write_checkpoint
from tests.support.command import Ended

TENSORS = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Return a folder with checkpoints 100 and 200 of a run."""
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for step in (100, 200):
        write_checkpoint(folder, step)
    return folder


def test_show_describes_the_newest(
    folder: CheckpointFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Ended(capsys, tmp_path, "checkpoint", "show", tmp_path / "run")
    assert (shown.code, shown.err) == (0, "")
    first, *lines = shown.out.splitlines()
    assert first.startswith(f"{folder.path(200)}: 368.") and first.endswith(" kB, 3 files")
    assert lines == [
        "23,168 parameters, saved at pp 2 x dp 1 x tp 2, ZeRO-1, bf16",
        "step 200, 1 of them skipped: 3,200 samples, 51,200 tokens, loss 4.2500",
    ]
    figures = shown.figures
    assert figures["checkpoint"] == str(folder.path(200))
    assert (figures["parameters"], figures["files"]) == (23_168, 3)
    assert figures["run_state"]["layout"]["tp"] == 2
    assert figures["run_state"]["progress"]["samples"] == 3_200
    shown = Ended(capsys, tmp_path, "checkpoint", "show", folder.path(100))
    assert shown.figures["run_state"]["progress"]["step"] == 100


def test_show_skips_a_broken_checkpoint_and_reports_why(
    folder: CheckpointFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(folder.path(200) / TENSORS, 5)
    shown = Ended(capsys, tmp_path, "checkpoint", "show", folder.root)
    assert shown.code == 0 and shown.out.startswith(f"{folder.path(100)}: ")
    assert shown.err.startswith(f"step-00000200  BROKEN\n  {TENSORS} has 5 bytes, but ")
    shown = Ended(capsys, tmp_path, "checkpoint", "show", folder.path(200))
    assert (shown.code, shown.out, shown.figures) == (1, "", None)
    assert shown.err.endswith("has no complete checkpoint\n")


def test_verify_reports_complete_checkpoints(
    folder: CheckpointFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Ended(capsys, tmp_path, "checkpoint", "verify", tmp_path / "run")
    assert (shown.code, shown.err) == (0, "")
    newest, older = shown.out.splitlines()
    assert newest.startswith("step-00000200  complete (368.") and newest.endswith(" kB, 3 files)")
    assert older.startswith("step-00000100  complete (")
    assert shown.figures["whole"] and len(shown.figures["checkpoints"]) == 2


def test_verify_names_every_problem(
    folder: CheckpointFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path(200) / TENSORS).unlink()
    (folder.path(200) / ".metadata").write_bytes(os.urandom(1_000))
    folder.begin(300)  # a save in progress is no checkpoint yet
    shown = Ended(capsys, tmp_path, "checkpoint", "verify", folder.root)
    assert (shown.code, shown.err) == (1, "")
    lines = shown.out.splitlines()
    assert lines[0] == "step-00000200  BROKEN"
    # The manifest's order is by name.
    assert lines[1].startswith("  .metadata has 1,000 bytes, but ")
    assert lines[2] == f"  {TENSORS} does not exist"
    assert lines[3].startswith("step-00000100  complete (")
    assert len(lines) == 4
    newest, older = shown.figures["checkpoints"]
    assert (newest["whole"], len(newest["problems"])) == (False, 2)
    assert (older["whole"], older["files"]) == (True, 3)


def test_verify_of_one_checkpoint_reads_no_other(
    folder: CheckpointFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path(200) / TENSORS).unlink()
    folder.begin(300)
    shown = Ended(capsys, tmp_path, "checkpoint", "verify", folder.path(100))
    assert shown.code == 0 and len(shown.out.splitlines()) == 1


def test_a_run_without_a_checkpoint_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for action, what in (("show", "complete checkpoint"), ("verify", "checkpoint")):
        shown = Ended(capsys, tmp_path, "checkpoint", action, tmp_path / "run")
        assert (shown.code, shown.out) == (1, "")
        assert shown.err.startswith(f"{tmp_path / 'run'} has no {what}")


@pytest.mark.parametrize("action", ["show", "verify"])
def test_a_path_that_cannot_have_checkpoints_is_wrong_input(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        shown = Ended(capsys, tmp_path, "checkpoint", action, place)
        assert (shown.code, shown.out, shown.figures) == (2, "", None)
        assert str(place) in shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize("arguments", [[], ["show"], ["mend", "."], ["show", ".", "--config", "x"]])
def test_a_wrong_command_line_is_wrong_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["checkpoint", *arguments])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: megaspeed")


def test_neither_action_loads_deepspeed(folder: CheckpointFolder) -> None:
    code = (
        "import sys; from megaspeed.cli import main; "
        "codes = [main(['checkpoint', action, sys.argv[1]]) for action in ('show', 'verify')]; "
        "sys.exit(' '.join({'deepspeed', 'datasets'} & set(sys.modules)) or max(codes) or None)"
    )
    command = [sys.executable, "-c", code, str(folder.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
