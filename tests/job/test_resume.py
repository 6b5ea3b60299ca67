"""A run starts from the right checkpoint, or reports an error."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.run_state import Progress
from megaspeed.config.resolve import Run
from megaspeed.job.resume import Restarts, ResumeOptions, Start, check_resume, find_start
from megaspeed.supervision.meeting import Meeting
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment, read_launch_environment
from tests.checkpoint.written import change_index, write_checkpoint
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
RANKS = 2
AUTO, NEVER = ResumeOptions(), ResumeOptions(source="never")
FRESH, FRESH_NEVER = (dataclasses.replace(options, fresh=True) for options in (AUTO, NEVER))


@dataclasses.dataclass(frozen=True)
class Place:
    """A run with complete checkpoints of steps 100 and 200, and another run with one of step 50."""

    folder: Path

    @classmethod
    def made_in(cls, folder: Path) -> "Place":
        for run, steps in (("run", (100, 200)), ("another", (50,))):
            for step in steps:
                write_checkpoint(CheckpointFolder(folder / run / "checkpoints"), step)
        return cls(folder)

    def checkpoint(self, step: int) -> Path:
        run = "another" if step == 50 else "run"
        return self.folder / run / "checkpoints" / f"step-{step:08d}"

    def run(self, name: str = "run") -> Run:
        training = {"steps": 300, "run_dir": str(self.folder / name)}
        return tiny_run(TEXT, dp=RANKS, training=training)

    def at(self, path: str, *, fresh: bool = False) -> ResumeOptions:
        """Return the options that name a path in this folder."""
        return ResumeOptions(source=str(self.folder / path), fresh=fresh)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.made_in(tmp_path)


def damage(checkpoint: Path) -> None:
    """Flip one bit of one tensor."""
    (file,) = checkpoint.glob("__0_*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def start_of(launch: LaunchEnvironment, options: ResumeOptions, run: Run) -> Start | str:
    """Return the start that this rank finds, or its error message."""
    grid = Grid(pp=1, dp=RANKS, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        try:
            start = find_start(options, run, context)
            # The checkpoints here have another configuration. Another test compares configurations.
            return dataclasses.replace(start, changes=())
        except CheckpointError as error:
            return str(error)


def found(pool: RankPool, options: ResumeOptions, run: Run) -> Any:
    """Check the options, and return what all ranks find."""
    check_resume(options, run)
    first, *others = pool.run(RANKS, start_of, options, run)
    assert all(other == first for other in others)
    return first


def test_a_named_path_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ResumeOptions(source="~/run").path == tmp_path / "run"
    assert AUTO.path is NEVER.path is None


# Options, name of the run -> step of the checkpoint (0: none), whether the run keeps its folder.
STARTS: dict[str, tuple[Callable[[Place], ResumeOptions], str, int, bool]] = {
    "auto, nothing saved": (lambda place: AUTO, "new", 0, False),
    "never, nothing saved": (lambda place: NEVER, "new", 0, False),
    "auto": (lambda place: AUTO, "run", 200, True),
    "fresh": (lambda place: FRESH, "run", 0, False),
    "fresh, never": (lambda place: FRESH_NEVER, "run", 0, False),
    "own folder": (lambda place: place.at("run"), "run", 200, True),
    "own checkpoints": (lambda place: place.at("run/checkpoints"), "run", 200, True),
    "own checkpoint": (lambda place: place.at("run/checkpoints/step-00000200"), "run", 200, True),
    "own older one": (lambda place: place.at("run/checkpoints/step-00000100"), "run", 100, True),
    "through a link": (lambda place: place.at("link/checkpoints/step-00000100"), "run", 100, True),
    "another run's": (lambda place: place.at("another"), "new", 50, False),
    "another run's, fresh": (lambda place: place.at("another", fresh=True), "run", 50, False),
    "own folder, fresh": (lambda place: place.at("run", fresh=True), "run", 200, False),
}


@pytest.mark.parametrize(("options", "name", "step", "in_place"), STARTS.values(), ids=STARTS)
def test_where_a_run_starts(
    pool: RankPool,
    place: Place,
    options: Callable[[Place], ResumeOptions],
    name: str,
    step: int,
    in_place: bool,
) -> None:
    (place.folder / "link").symlink_to(place.folder / "run")
    start = found(pool, options(place), place.run(name))
    if step == 0:
        assert start.checkpoint is None
    else:
        assert start.checkpoint.samefile(place.checkpoint(step))
    assert (start.step, start.in_place, start.skipped) == (step, in_place, ())
    # Old files are moved only after the start was found.
    assert place.checkpoint(100).is_dir()


def exchange_places(index: Metadata) -> None:
    places = sorted(index.storage_data, key=lambda place: str(place.fqn))
    index.storage_data[places[0]] = index.storage_data[places[1]]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (damage, "__0_0.distcp has changed since it was written"),
        (
            lambda checkpoint: change_index(checkpoint, exchange_places),
            "states the same place for two boxes",
        ),
    ],
    ids=["a bit", "an index sealed with a mistake"],
)
def test_auto_skips_an_incomplete_checkpoint_and_reports_why(
    pool: RankPool, place: Place, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(place.checkpoint(200))
    start = found(pool, AUTO, place.run())
    assert (start.checkpoint, start.step, start.in_place) == (place.checkpoint(100), 100, True)
    ((skipped, reason),) = start.skipped
    assert skipped == place.checkpoint(200) and why in reason


def test_if_no_checkpoint_is_complete_each_is_reported(pool: RankPool, place: Place) -> None:
    damage(place.checkpoint(200))
    named = place.at("run/checkpoints/step-00000200")
    assert "has changed since it was written" in found(pool, named, place.run())
    (place.checkpoint(100) / "manifest.json").unlink()
    message = found(pool, AUTO, place.run())
    assert f"{place.checkpoint(200)}: __0_0.distcp has changed since it was written" in message
    assert f"{place.checkpoint(100)}: manifest.json is missing" in message
    assert "--fresh" in message and "--resume DIR" in message


# Options -> parts of the message.
REFUSED: dict[str, tuple[Callable[[Place], ResumeOptions], list[str]]] = {
    "never": (lambda place: NEVER, ["2 checkpoints, the newest ", "step-00000200", "--fresh"]),
    "another run's": (lambda place: place.at("another"), ["run that has 2 checkpoints"]),
    "empty": (lambda place: place.at("empty"), ["/empty"]),
    "no folder": (lambda place: place.at("nowhere"), ["/nowhere"]),
    "no run": (lambda place: place.at("."), ["no manifest.json, no step-... folder"]),
}


@pytest.mark.parametrize(("options", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_the_ranks_meet(
    place: Place, options: Callable[[Place], ResumeOptions], parts: list[str]
) -> None:
    (place.folder / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        check_resume(options(place), place.run())
    assert [part for part in parts if part not in str(caught.value)] == []


def test_the_remains_of_a_killed_save_are_removed(pool: RankPool, place: Place) -> None:
    run = place.run("new")
    writing = CheckpointFolder(run.run_dir / "checkpoints").begin(100)
    for options in (AUTO, NEVER):
        assert found(pool, options, run) == Start()
    assert not writing.exists()


@pytest.mark.parametrize(("steps", "is_end"), [(199, True), (200, True), (201, False)])
def test_a_run_ends_at_its_last_step(steps: int, is_end: bool) -> None:
    run = tiny_run(TEXT, training={"steps": steps})
    assert Start(checkpoint=Path("step-00000200"), step=200).is_end_of(run) is is_end
    assert not Start().is_end_of(run)


@pytest.mark.parametrize(
    ("tokens", "last"),
    # 200 samples of 16 tokens, then steps of 384 tokens
    [(3200, 200), (3201, 201), (3200 + 384, 201), (3200 + 385, 202), (100, 200)],
)
def test_tokens_that_are_trained_count_whatever_their_batch_was(tokens: int, last: int) -> None:
    run = tiny_run(TEXT, training={"steps": None, "tokens": tokens})
    trained = Progress(step=200, tokens=3200)
    assert trained.last_step(run.as_json()) == last
    assert Progress().last_step(run.as_json()) == run.steps == run.config.training.steps


def test_ranks_that_run_out_of_memory_together_back_off_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks compute the same size, so memory often runs out on several of them."""
    launch, kept = read_launch_environment({}), dist.HashStore()
    meetings = [Meeting(dist.HashStore(), launch, between_attempts=kept) for _ in range(2)]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for meeting in meetings:
        assert Restarts(meeting).back_off(4).startswith("all ranks start again")
    assert [Restarts(meeting).smaller_size for meeting in meetings] == [4, 4]
    assert Restarts(meetings[0]).back_off(2).startswith("to try the next smaller size")
    assert Restarts(meetings[0]).smaller_size == 4
    alone = Restarts(Meeting(dist.HashStore(), launch))
    assert alone.back_off(4).startswith("to try the next smaller size")
