"""The folder of a run is checked before the run, is locked, and loses no files of earlier runs."""

import json
import math
import os
import shutil
import socket
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from filelock import FileLock

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.job import run_folder
from megaspeed.job.run_folder import (
    LOCK,
    RunFolderLost,
    check_run_folder,
    check_shared_folder,
    continue_run_folder,
    run_lock,
    start_run_folder,
)
from megaspeed.supervision.meeting import RanksDisagree
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankFailure, RankPool


def run_in(folder: Path, steps: int = 1) -> Run:
    config = parse_config(
        {
            "model": {"preset": "gpt2-nano"},
            "data": {"sequence_length": 16},
            "training": {"steps": steps, "run_dir": str(folder)},
            "train_batch_size": 1,
        }
    )
    return resolve_run(config, World(1, "test"), name="run")


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"training\.run_dir .* is a file; name another"):
            check_run_folder(run_in(folder))
    check_run_folder(run_in(tmp_path / "new" / "folder"))


def test_config_json_never_has_a_number_that_json_lacks(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    params = run.config.optimizer.params.model_copy(update={"lr": math.inf})
    optimizer = run.config.optimizer.model_copy(update={"params": params})
    infinite = replace(run, config=run.config.model_copy(update={"optimizer": optimizer}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        start_run_folder(infinite, "cpu")
    assert not (tmp_path / "config.json").exists()


def complaint_of_a_plain_user(launch: LaunchEnvironment, run: Run) -> str:
    """Return the message for a user who is not root, because root may write anywhere."""
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
    assert start_run_folder(run, "cpu") is None
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == run.as_json()


def checkpoint(folder: Path, step: int) -> Path:
    """Create a stand-in for a checkpoint. Only its name counts here."""
    made = folder / "checkpoints" / f"step-{step:08d}"
    made.mkdir(parents=True)
    (made / "of").write_text(folder.name)
    return made


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_run_that_starts_anew_moves_what_is_there_and_loses_nothing(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for number in (1, 2):
        start_run_folder(run, "cpu")
        (tmp_path / "metrics.jsonl").write_text(f"run {number}")
        checkpoint(tmp_path, number)
    (tmp_path / "notes.txt").write_text("of the user")
    assert start_run_folder(run, "cpu") == tmp_path / "earlier-2"
    for number in (1, 2):
        earlier = tmp_path / f"earlier-{number}"
        assert names(earlier) == {"config.json", "metrics.jsonl", "starts.jsonl", "checkpoints"}
        assert (earlier / "metrics.jsonl").read_text() == f"run {number}"
        assert names(earlier / "checkpoints") == {f"step-0000000{number}"}
    assert names(tmp_path) == {
        "config.json",
        "starts.jsonl",
        "notes.txt",
        "earlier-1",
        "earlier-2",
    }


def record(step: int, **values: float) -> str:
    return json.dumps({"step": step, "loss": 0.1 * step, **values}) + "\n"


def test_a_run_that_continues_from_its_last_step_leaves_all_as_it_is(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    start_run_folder(run, "cpu")
    lines = record(1) + record(2) + json.dumps({"step": 2, "validation_loss": 3.0}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(lines)
    kept = checkpoint(tmp_path, 2)
    assert continue_run_folder(run, 2, "cpu") is None
    assert (tmp_path / "metrics.jsonl").read_text() == lines and kept.is_dir()
    assert names(tmp_path) == {"config.json", "metrics.jsonl", "starts.jsonl", "checkpoints"}


def test_the_configuration_of_a_run_that_continues_is_its_new_one(tmp_path: Path) -> None:
    start_run_folder(run_in(tmp_path), "cpu")
    changed = run_in(tmp_path, steps=50)
    continue_run_folder(changed, 1, "cpu")
    assert json.loads((tmp_path / "config.json").read_text()) == changed.as_json()


def test_what_came_after_the_step_is_moved_and_cut(tmp_path: Path) -> None:
    """The run was killed while it wrote record 5. The checkpoint of step 4 is broken."""
    run = run_in(tmp_path)
    start_run_folder(run, "cpu")
    lines = [record(step) for step in range(1, 5)]
    torn = record(5)[:-9]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + torn)
    for step in (1, 2, 4):
        checkpoint(tmp_path, step)
    earlier = tmp_path / "earlier-1"
    assert continue_run_folder(run, 2, "cpu") == earlier
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert (earlier / "metrics.jsonl").read_text() == "".join(lines) + torn
    assert names(tmp_path / "checkpoints") == {"step-00000001", "step-00000002"}
    assert names(earlier / "checkpoints") == {"step-00000004"}


def test_a_torn_line_alone_is_cut_too(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    start_run_folder(run, "cpu")
    (tmp_path / "metrics.jsonl").write_text(record(1) + '{"step": 1, "valid')
    assert continue_run_folder(run, 7, "cpu") == tmp_path / "earlier-1"
    assert (tmp_path / "metrics.jsonl").read_text() == record(1)


def test_every_start_leaves_a_line_with_its_step_and_layout(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    start_run_folder(run, "cpu")
    for step in (5, 3):  # the second resumption is from an earlier step; the first line stays
        continue_run_folder(run, step, "cpu")
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start.pop("step") for start in starts] == [0, 5, 3]
    for start in starts:
        assert datetime.fromisoformat(start.pop("time")).tzinfo is not None
        layout = {"pp": 1, "dp": 1, "tp": 1, "replicate": 1, "cp": 1, "ep": None}
        layout["zero_stage"] = 0
        assert start == {**layout, "device": "cpu"}


def test_what_services_wrote_is_moved_with_the_run(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for service in ("tensorboard", "wandb"):
        (tmp_path / service).mkdir()
    assert start_run_folder(run, "cpu") == tmp_path / "earlier-1"
    assert names(tmp_path / "earlier-1") == {"tensorboard", "wandb"}


def use(launch: LaunchEnvironment, run_dir: Path, wait_seconds: float = 0.0) -> str | None:
    """Return the error message on this rank of two."""
    with ParallelContext.create(
        Grid(pp=1, dp=2, tp=1), launch, timeout_seconds=limit(30)
    ) as context:
        try:
            with run_lock(run_dir, context, wait_seconds=wait_seconds):
                return None
        except CheckpointError as error:
            return str(error)


def use_beside_itself(launch: LaunchEnvironment, run_dir: Path) -> tuple[str, str, str | None]:
    """Return the lock file's content, the expected content, and the message of a second run."""
    with (
        ParallelContext.create(
            Grid(pp=1, dp=1, tp=1), launch, timeout_seconds=limit(30)
        ) as context,
        run_lock(run_dir, context),
    ):
        written = (run_dir / LOCK).read_text()
        try:
            with run_lock(run_dir, context):
                problems = None
        except CheckpointError as error:
            problems = str(error)
    return written, f"{socket.gethostname()} {os.getpid()}\n", problems


def test_the_lock_names_the_process_to_signal(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("a host with a long name 4194304\n")
    ((written, expected, problems),) = pool.run(1, use_beside_itself, tmp_path)
    host, process = expected.split()
    assert written == expected
    assert problems is not None
    assert problems.startswith(
        f"another run (its rank 0 is process {process} on {host}) is writing to"
    )


def test_one_run_at_a_time(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, use, tmp_path) == [None, None]
    with FileLock(tmp_path / LOCK):
        problems = pool.run(2, use, tmp_path)
    assert (
        problems
        == [
            f"another run is writing to {tmp_path}; wait until it has ended, or set another "
            "training.run_dir"
        ]
        * 2
    )
    assert pool.run(2, use, tmp_path) == [None, None]


def test_a_restart_waits_for_the_lock_of_a_dead_host(pool: RankPool, tmp_path: Path) -> None:
    """A network file system releases the lock a minute later. An earlier version refused the
    restart as wrong input.
    """
    lock = FileLock(tmp_path / LOCK, thread_local=False)
    lock.acquire()
    later = threading.Timer(2.0, lock.release)
    later.start()
    assert pool.run(2, use, tmp_path, limit(30)) == [None, None]
    later.join()


def lose_it(launch: LaunchEnvironment, run_dir: Path, how: str) -> str:
    """Return the message of the check before a write, after the folder has changed."""
    with (
        ParallelContext.create(
            Grid(pp=1, dp=1, tp=1), launch, timeout_seconds=limit(30)
        ) as context,
        run_lock(run_dir, context) as check,
    ):
        check()
        if how in ("renamed", "replaced"):
            run_dir.rename(run_dir.with_name("other"))
        if how == "removed":
            shutil.rmtree(run_dir)
        if how == "unlinked":
            (run_dir / LOCK).unlink()
        if how == "replaced":
            run_dir.mkdir()
            (run_dir / LOCK).touch()
        with pytest.raises(RunFolderLost) as lost:
            check()
    return str(lost.value)


@pytest.mark.parametrize("how", ["renamed", "replaced", "unlinked", "removed"])
def test_a_folder_that_is_lost_is_reported(pool: RankPool, tmp_path: Path, how: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (said,) = pool.run(1, lose_it, run_dir, how)
    assert f"the run folder {run_dir} was removed or renamed, or has lost its file .lock" in said


def die_with_it(launch: LaunchEnvironment, run_dir: Path) -> None:
    grid = Grid(pp=1, dp=1, tp=1)
    context = ParallelContext.create(grid, launch, timeout_seconds=limit(30))
    with run_lock(run_dir, context):
        os._exit(9)


def test_the_lock_of_a_run_that_died_is_free(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code 9"):
        pool.run(1, die_with_it, tmp_path)
    assert pool.run(2, use, tmp_path) == [None, None]


RANKS = 4
RUN_DIR = Path("runs/tiny")


def complaint(launch: LaunchEnvironment, disks: list[Path]) -> str | None:
    """Return this rank's message. Each rank has a disk of its own or shares one."""
    os.chdir(disks[launch.rank])
    run_folder._SECONDS_TO_BE_SEEN = 0.3
    grid = Grid(pp=1, dp=RANKS, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        try:
            check_shared_folder(RUN_DIR, context)
        except RanksDisagree as error:
            return str(error)
    return None


def test_a_folder_that_all_see_is_made_and_left_empty(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(RANKS, complaint, [tmp_path] * RANKS) == [None] * RANKS
    assert list((tmp_path / RUN_DIR).iterdir()) == []


def test_ranks_with_a_disk_of_their_own_are_named(pool: RankPool, tmp_path: Path) -> None:
    """Ranks 2 and 3 are on a second node. Its own disk has a folder of the same name."""
    first, second = nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        (node / RUN_DIR).mkdir(parents=True)
    everyones = pool.run(RANKS, complaint, [first, first, second, second])
    said = everyones[0]
    assert said is not None and everyones == [said] * RANKS
    assert "ranks [2, 3] do not see what rank 0 writes to runs/tiny" in said
    assert "training.run_dir must be on a file system that all nodes share" in said
    assert all(list((node / RUN_DIR).iterdir()) == [] for node in nodes)
