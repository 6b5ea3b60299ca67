"""A run's folder is found unusable before the run, and an earlier run in it is kept."""

import json
import os
from pathlib import Path

import pytest

from megaspeed.config import ConfigError, Run, parse_config, resolve_run
from megaspeed.topology import LaunchEnvironment
from megaspeed.training.run_folder import check_run_folder, open_run_folder
from tests.rank_pool import RankPool


def run_in(folder: Path) -> Run:
    config = parse_config(
        {
            "model": {"preset": "gpt2-nano"},
            "data": {"sequence_length": 16},
            "training": {"steps": 1, "run_dir": str(folder)},
            "train_batch_size": 1,
        }
    )
    return resolve_run(config, name="run", world_size=1, world_source="test")


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"training\.run_dir .* is a file; name another"):
            check_run_folder(run_in(folder))
    check_run_folder(run_in(tmp_path / "new" / "folder"))


def complaint_of_a_plain_user(launch: LaunchEnvironment, run: Run) -> str:
    """What a user who is not root is told; root may write anywhere."""
    if os.getuid() == 0:
        os.setuid(65534)
    with pytest.raises(ConfigError) as caught:
        check_run_folder(run)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o000, 0o500], ids=oct)
def test_a_folder_that_this_user_may_not_write_to_is_refused(
    pool: RankPool, tmp_path: Path, mode: int
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode)
    (said,) = pool.run(1, complaint_of_a_plain_user, run_in(locked / "below" / "run"))
    assert "cannot be written to" in said and "name another folder" in said


def test_the_resolved_configuration_is_written(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    assert open_run_folder(run) is None
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == run.as_json()


def test_the_files_of_earlier_runs_are_moved_and_not_lost(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for number in (1, 2):
        open_run_folder(run)
        (tmp_path / "metrics.jsonl").write_text(f"run {number}")
    assert open_run_folder(run) == tmp_path / "earlier-2"
    assert (tmp_path / "earlier-1" / "metrics.jsonl").read_text() == "run 1"
    assert (tmp_path / "earlier-2" / "metrics.jsonl").read_text() == "run 2"
    assert not (tmp_path / "metrics.jsonl").exists()
