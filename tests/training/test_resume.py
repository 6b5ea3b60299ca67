"""Where a run starts: from what checkpoint, or why it does not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.resume import ResumeOptions, Start, check_resume, find_start
from tests.checkpoint.written import change_index, write_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
RANKS = 2
AUTO, NEVER = ResumeOptions(), ResumeOptions(source="never")


def run_in(folder: Path, **changes: Any) -> Run:
    training = {"steps": 300, "run_dir": str(folder)}
    return tiny_run(TEXT, dp=RANKS, training=training, **changes)


def fresh(options: ResumeOptions = AUTO) -> ResumeOptions:
    return ResumeOptions(source=options.source, fresh=True)


def at(folder: Path) -> ResumeOptions:
    return ResumeOptions(source=str(folder))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with whole checkpoints of steps 100 and 200."""
    run = run_in(tmp_path / "run")
    for step in (100, 200):
        write_checkpoint(CheckpointFolder(run.run_dir / "checkpoints"), step)
    return run


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """Another run's folder, with a checkpoint of step 50."""
    write_checkpoint(CheckpointFolder(tmp_path / "another" / "checkpoints"), 50)
    return tmp_path / "another"


def checkpoint(run: Run, step: int) -> Path:
    return run.run_dir / "checkpoints" / f"step-{step:08d}"


def damage(checkpoint: Path) -> None:
    """One bit of one tensor."""
    (file,) = checkpoint.glob("__0_*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def start_of(launch: LaunchEnvironment, options: ResumeOptions, run: Run) -> Start | str:
    """What this rank finds, or says."""
    grid = Grid(pp=1, dp=RANKS, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=30) as context:
        try:
            start = find_start(options, run, context)
            # Other configuration of the written checkpoint is another test's matter.
            return dataclasses.replace(start, changes=())
        except CheckpointError as error:
            return str(error)


def found(pool: RankPool, options: ResumeOptions, run: Run) -> Any:
    """What all ranks find alike, once nothing was refused before they met."""
    check_resume(options, run)
    first, *others = pool.run(RANKS, start_of, options, run)
    assert all(other == first for other in others)
    return first


def test_what_is_named_may_lie_in_ones_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ResumeOptions(source="~/run").path == tmp_path / "run"
    assert AUTO.path is NEVER.path is None


@pytest.mark.parametrize("options", [AUTO, NEVER, fresh(), fresh(NEVER)], ids=str)
def test_a_folder_without_checkpoints_starts_at_step_0(
    options: ResumeOptions, pool: RankPool, tmp_path: Path
) -> None:
    assert found(pool, options, run_in(tmp_path)) == Start()


def test_auto_continues_from_the_newest(pool: RankPool, run: Run) -> None:
    expected = Start(checkpoint=checkpoint(run, 200), step=200, in_place=True)
    assert found(pool, AUTO, run) == expected


def test_auto_passes_over_what_is_broken_and_says_why(pool: RankPool, run: Run) -> None:
    damage(checkpoint(run, 200))
    start = found(pool, AUTO, run)
    assert (start.checkpoint, start.step, start.in_place) == (checkpoint(run, 100), 100, True)
    ((passed_over, why),) = start.skipped
    assert passed_over == checkpoint(run, 200)
    assert "__0_0.distcp has changed since it was written" in why


def test_auto_passes_over_an_index_that_was_sealed_with_a_mistake(pool: RankPool, run: Run) -> None:
    def point_at_another(index: Metadata) -> None:
        places = sorted(index.storage_data, key=lambda place: str(place.fqn))
        index.storage_data[places[0]] = index.storage_data[places[1]]

    change_index(checkpoint(run, 200), point_at_another)
    start = found(pool, AUTO, run)
    assert start.checkpoint == checkpoint(run, 100)
    assert "states the same place for two boxes" in start.skipped[0][1]


def test_auto_refuses_where_no_checkpoint_is_whole_and_names_each(pool: RankPool, run: Run) -> None:
    damage(checkpoint(run, 200))
    (checkpoint(run, 100) / "manifest.json").unlink()
    said = found(pool, AUTO, run)
    assert f"{checkpoint(run, 200)}: __0_0.distcp has changed since it was written" in said
    assert f"{checkpoint(run, 100)}: manifest.json is missing" in said
    assert "--fresh" in said and "--resume DIR" in said


@pytest.mark.parametrize("options", [fresh(), fresh(NEVER)], ids=str)
def test_fresh_starts_at_step_0_whatever_is_there(
    options: ResumeOptions, pool: RankPool, run: Run
) -> None:
    damage(checkpoint(run, 200))
    assert found(pool, options, run) == Start()
    assert checkpoint(run, 100).is_dir(), "it is moved when the run has begun, not before"


def test_never_refuses_to_start_over_checkpoints(run: Run) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_resume(NEVER, run)
    said = str(caught.value)
    assert f"2 checkpoints, the newest {checkpoint(run, 200)}" in said
    assert "--fresh" in said and "another training.run_dir" in said


@pytest.mark.parametrize("options", [fresh(), ResumeOptions(source="never"), at(Path("other"))])
def test_what_every_joining_node_would_repeat_is_refused(
    options: ResumeOptions, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then torchrun starts the ranks again, and they cannot know that this is no new launch."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with pytest.raises(CheckpointError, match="discard the steps of this launch when a node joins"):
        check_resume(options, run)
    check_resume(AUTO, run)


def test_what_a_killed_save_left_is_no_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    writing = CheckpointFolder(tmp_path / "checkpoints").begin(100)
    for options in (AUTO, NEVER):
        assert found(pool, options, run) == Start()
    assert not writing.exists()


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step-00000200"])
def test_the_runs_own_folder_continues_by_any_name(named: str, pool: RankPool, run: Run) -> None:
    start = found(pool, at(run.run_dir / named), run)
    assert (start.step, start.in_place) == (200, True)


def test_the_runs_own_folder_continues_through_a_link(
    pool: RankPool, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(run.run_dir)
    start = found(pool, at(tmp_path / "link" / "checkpoints" / "step-00000100"), run)
    assert (start.step, start.in_place) == (100, True)


def test_an_older_checkpoint_of_the_run_is_taken_where_it_is_named(
    pool: RankPool, run: Run
) -> None:
    expected = Start(checkpoint=checkpoint(run, 100), step=100, in_place=True)
    assert found(pool, at(checkpoint(run, 100)), run) == expected


def test_another_runs_checkpoint_starts_a_folder_of_its_own(
    pool: RankPool, another: Path, tmp_path: Path
) -> None:
    taken = another / "checkpoints" / "step-00000050"
    start = found(pool, at(another), run_in(tmp_path / "new"))
    assert start == Start(checkpoint=taken, step=50, in_place=False)


def test_another_runs_checkpoint_is_not_laid_over_this_run(
    pool: RankPool, run: Run, another: Path
) -> None:
    with pytest.raises(CheckpointError, match="would start over a run that has 2 checkpoints"):
        check_resume(at(another), run)
    start = found(pool, fresh(at(another)), run)
    assert (start.step, start.in_place) == (50, False)


def test_fresh_takes_the_runs_own_checkpoint_into_a_new_folder(pool: RankPool, run: Run) -> None:
    start = found(pool, fresh(at(run.run_dir)), run)
    assert start == Start(checkpoint=checkpoint(run, 200), step=200, in_place=False)


def test_a_folder_that_has_no_checkpoint_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for named in ("empty", "nowhere", "."):
        with pytest.raises(CheckpointError, match=str(tmp_path / named)):
            check_resume(at(tmp_path / named), run)


def test_a_broken_checkpoint_that_is_named_is_refused(pool: RankPool, run: Run) -> None:
    damage(checkpoint(run, 200))
    assert "has changed since it was written" in found(pool, at(checkpoint(run, 200)), run)


@pytest.mark.parametrize(("steps", "is_end"), [(199, True), (200, True), (201, False)])
def test_a_run_ends_at_its_last_step(steps: int, is_end: bool) -> None:
    run = tiny_run(TEXT, training={"steps": steps})
    assert Start(checkpoint=Path("step-00000200"), step=200).is_end_of(run) is is_end
    assert not Start().is_end_of(run)
