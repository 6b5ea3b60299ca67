"""The names of a checkpoint during a save, even if a process dies before its end."""

import os
from pathlib import Path

import pytest

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import (
    MANIFEST,
    CheckpointFolder,
    discard,
    file_problems,
    locate,
    read_manifest,
)
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint import dying
from tests.support.rank_pool import RankPool


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run" / "checkpoints")


def save(folder: CheckpointFolder, *steps: int, content: bytes = b"tensors") -> list[Path]:
    for step in steps:
        dying.save(folder, step, content)
    return [folder.path(step) for step in steps]


def names(folder: CheckpointFolder) -> set[str]:
    return {path.name for path in folder.root.iterdir()}


def test_a_save_has_another_name_until_it_is_committed(folder: CheckpointFolder) -> None:
    writing = folder.begin(100)
    assert names(folder) == {"step-00000100.writing"} and folder.newest_first() == []
    assert folder.commit(writing) == folder.path(100)
    assert names(folder) == {"step-00000100"}


def test_a_save_begins_with_an_empty_folder(folder: CheckpointFolder) -> None:
    (folder.begin(5) / "old").write_text("half")
    writing = folder.begin(5)
    assert list(writing.iterdir()) == []
    writing.rmdir()
    writing.write_text("a file of that name")
    assert list(folder.begin(5).iterdir()) == []


def test_a_save_that_failed_is_discarded_and_can_be_discarded_again(
    folder: CheckpointFolder,
) -> None:
    save(folder, 1)
    writing = folder.begin(2)
    (writing / "tensors").write_text("half")
    discard(writing)
    discard(writing)
    assert names(folder) == {"step-00000001"}


def test_saving_a_step_again_replaces_it(folder: CheckpointFolder) -> None:
    save(folder, 1, content=b"old")
    (checkpoint,) = save(folder, 1, content=b"new")
    assert (checkpoint / "tensors").read_bytes() == b"new"
    assert names(folder) == {"step-00000001"}


def test_a_save_that_cannot_get_its_name_leaves_the_earlier_one_in_place(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint,) = save(folder, 1, content=b"old")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise OSError("no permission")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no permission"):
        folder.commit(folder.begin(1))
    assert folder.newest_first() == [checkpoint]
    assert (checkpoint / "tensors").read_bytes() == b"old"


def test_checkpoints_are_ordered_by_number(folder: CheckpointFolder) -> None:
    """In the order of text, step-100000000 would come before step-99999999."""
    saved = save(folder, 9, 10, 99_999_999, 100_000_000)
    assert folder.newest_first() == saved[::-1]


def test_names_that_only_look_like_checkpoints_are_ignored(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    (checkpoint,) = save(folder, 7)
    for name in ("step-00000008.writing", "step-00000009.deleting", "best", "step-x", "step-12"):
        (folder.root / name).mkdir()
    (folder.root / "step-000000011").mkdir()  # nine digits, where eight are enough
    (folder.root / "step-00000020").write_text("a file")
    (folder.root / "step-00000021").symlink_to(folder.root / "step-00000020")
    (folder.root / "step-00000022").symlink_to(tmp_path / "nowhere")
    (folder.root / "step-٠٠٠٠٠٠٠٩").mkdir()  # digits, but not those of ASCII
    assert folder.newest_first() == [checkpoint]
    assert folder.prune(checkpoint, 1) == []
    cleared = folder.clear_leftovers()
    assert [path.name for path in cleared] == ["step-00000008.writing", "step-00000009.deleting"]
    assert {"best", "step-12", "step-00000020", "step-00000021"} <= names(folder)


def test_a_checkpoint_that_was_moved_and_linked_counts_and_only_its_link_is_pruned(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    first, second = save(folder, 1, 2)
    moved = first.rename(tmp_path / "moved")
    first.symlink_to(moved)
    assert folder.newest_first() == [second, first]
    assert folder.prune(second, 1) == [first]
    assert names(folder) == {"step-00000002"}
    assert (moved / "tensors").is_file()


def test_a_link_with_the_name_of_a_checkpoint_is_replaced_but_not_its_target(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("kept")
    folder.root.mkdir(parents=True)
    folder.path(3).symlink_to(tmp_path / "elsewhere")
    (folder.root / "step-00000003.writing").symlink_to(tmp_path / "elsewhere")
    save(folder, 3)
    assert not folder.path(3).is_symlink() and (folder.path(3) / "tensors").is_file()
    assert (tmp_path / "elsewhere" / "file").read_text() == "kept"


def test_the_newest_checkpoints_are_kept(folder: CheckpointFolder) -> None:
    saved = save(folder, 1, 2, 3, 4)
    assert folder.prune(saved[-1], 2) == [saved[1], saved[0]]
    assert folder.newest_first() == [saved[3], saved[2]]
    assert folder.prune(saved[-1], 2) == []


def test_milestones_are_kept_beside_the_newest_and_count_among_them(
    folder: CheckpointFolder,
) -> None:
    """Milestones 3 and 6 are kept, also if saves were at other intervals."""
    saved = save(folder, 1, 2, 3, 4, 6, 7)
    assert folder.prune(saved[-1], 2, 3) == [saved[3], saved[1], saved[0]]
    assert folder.newest_first() == [folder.path(step) for step in (7, 6, 3)]
    (newest,) = save(folder, 8)
    assert folder.prune(newest, 2, 3) == [] and folder.prune(newest, 1, 3) == [folder.path(7)]
    assert folder.prune(newest, 1) == [folder.path(6), folder.path(3)], "no milestones any more"


def test_the_last_saved_checkpoint_is_kept_although_broken_ones_have_higher_steps(
    folder: CheckpointFolder,
) -> None:
    """A run found 200 and 300 broken, resumed from 100 and saved 150."""
    save(folder, 100, 200, 300)
    for step in (200, 300):
        (folder.path(step) / "tensors").write_bytes(b"")
    save(folder, 150)
    assert folder.prune(folder.path(150), 1) == [folder.path(100)]
    assert folder.newest_first() == [folder.path(step) for step in (300, 200, 150)]


def prune_as_a_plain_user(
    launch: LaunchEnvironment, folder: CheckpointFolder, newest: str
) -> list[Path]:
    """Prune as a plain user, because root may remove everything. This user may not enter the
    folders above.
    """
    os.chdir(folder.root)
    if os.getuid() == 0:
        os.setuid(65534)
    return CheckpointFolder(Path()).prune(Path(newest), 1)


def test_a_checkpoint_that_cannot_be_removed_is_no_error(
    pool: RankPool, folder: CheckpointFolder
) -> None:
    saved = save(folder, 1, 2)
    folder.root.chmod(0o555)
    try:
        assert pool.run(1, prune_as_a_plain_user, folder, saved[1].name) == [[]]
    finally:
        folder.root.chmod(0o755)
    assert folder.newest_first() == saved[::-1]
    assert folder.prune(saved[1], 1) == saved[:1]


def test_the_remains_of_killed_saves_and_removals_are_removed(folder: CheckpointFolder) -> None:
    save(folder, 1)
    folder.begin(2)
    (folder.root / "step-00000000.deleting").mkdir()
    cleared = [path.name for path in folder.clear_leftovers()]
    assert cleared == ["step-00000000.deleting", "step-00000002.writing"]
    assert names(folder) == {"step-00000001"}


def test_an_interrupted_replacement_is_completed(folder: CheckpointFolder) -> None:
    save(folder, 1, content=b"old")
    folder.path(1).rename(folder.root / "step-00000001.deleting")
    other = CheckpointFolder(folder.root.parent / "other")
    save(other, 1, content=b"new")
    other.path(1).rename(folder.root / "step-00000001.writing")
    assert folder.newest_first() == []
    folder.clear_leftovers()
    assert (folder.path(1) / "tensors").read_bytes() == b"new"
    assert names(folder) == {"step-00000001"}


@pytest.mark.parametrize(
    ("first", "step", "keep_last"),
    [([], 1, 1), ([1], 2, 1), ([1, 2, 3], 4, 2), ([1], 1, 1), ([1, 2], 2, 1)],
    ids=["first", "next", "third", "only one replaced", "newest replaced"],
)
def test_wherever_a_process_dies_a_complete_checkpoint_is_found(
    tmp_path: Path, first: list[int], step: int, keep_last: int
) -> None:
    dying.die_everywhere(tmp_path, first, step, keep_last)
    deaths = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(deaths) >= 6
    for death in deaths:
        folder = CheckpointFolder(death)
        folder.clear_leftovers()
        assert folder.leftovers() == []
        found = folder.newest_first()
        assert found or not first, death.name
        for checkpoint in found:
            assert file_problems(checkpoint, read_manifest(checkpoint)) == {}
        assert names(folder) == {checkpoint.name for checkpoint in found}
    assert folder.newest_first()[0] == folder.path(step)
    assert len(folder.newest_first()) == min(keep_last, len({*first, step}))
    assert (folder.path(step) / "tensors").read_bytes() == b"second"


def test_a_user_may_name_a_checkpoint_its_folder_or_the_run(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(folder, 1, 2)
    assert locate(first) == [first]
    assert locate(folder.root) == locate(folder.root.parent) == [second, first]
    monkeypatch.chdir(folder.root)
    assert [path.resolve() for path in locate(Path("."))] == [second, first]
    monkeypatch.chdir(first)
    assert locate(Path(".")) == [Path(".")]


def test_a_checkpoint_is_found_under_another_name_and_a_broken_one_under_its_own(
    folder: CheckpointFolder,
) -> None:
    first, second = save(folder, 1, 2)
    renamed = first.rename(folder.root / "best")
    assert locate(renamed) == [renamed]
    (second / MANIFEST).unlink()
    assert locate(second) == locate(folder.root) == [second]


def test_links_that_a_user_names_are_followed(folder: CheckpointFolder, tmp_path: Path) -> None:
    (checkpoint,) = save(folder, 1)
    (tmp_path / "a checkpoint").symlink_to(checkpoint)
    (tmp_path / "checkpoints").symlink_to(folder.root)
    assert locate(tmp_path / "a checkpoint") == [tmp_path / "a checkpoint"]
    assert locate(tmp_path) == [tmp_path / "checkpoints" / checkpoint.name]


def test_a_folder_for_checkpoints_may_hold_none(folder: CheckpointFolder) -> None:
    folder.root.mkdir(parents=True)
    assert locate(folder.root) == locate(folder.root.parent) == []
    folder.begin(1)
    moved = folder.root.rename(folder.root.with_name("moved"))
    assert locate(moved) == []


@pytest.mark.parametrize("name", ["nothing", "file", "folder", "folder/step-00000001.writing"])
def test_any_other_path_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    if name.endswith(".writing"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError) as refusal:
        locate(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)
