"""The files that ranks write together, the part of each rank, and a disk that refuses to write."""

import dataclasses
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megaspeed.checkpoint import writing
from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.inspection import newest_complete
from megaspeed.checkpoint.tensors import HostCopy, Piece, expected_tensors
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.files.paths import free_bytes
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint.saved_runs import (
    SavedRun,
    Stretch,
    continue_from,
    only_checkpoint,
    save_and_continue,
    started,
)
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import OFFLOAD, OFFLOAD_ALL, small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
AFTER = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return tiny_corpus(small_run(TEXT), tmp_path_factory.mktemp("cache"))


def run_in(
    folder: Path, layout: tuple[int, int, int] = (1, 1, 1), stage: int = 1, **training: object
) -> Run:
    pp, dp, tp = layout
    return small_run(
        TEXT,
        pp=pp,
        dp=dp,
        tp=tp,
        zero_optimization={"stage": stage},
        training={"run_dir": str(folder), **training},
    )


@pytest.mark.parametrize(
    ("layout", "stage"), [((1, 1, 1), 0), ((2, 2, 1), 1), ((1, 2, 2), 2), ((1, 3, 1), 3)]
)
def test_the_same_layout_continues_to_the_last_bit(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, layout: tuple[int, int, int], stage: int
) -> None:
    """This is in fp32. Other processes than those that saved load the checkpoint."""
    run = run_in(tmp_path, layout, stage)
    ranks = run.grid.world_size
    uninterrupted = pool.run(ranks, save_and_continue, run, corpus, 3, AFTER)[0]
    checkpoint = only_checkpoint(tmp_path)
    (resumed,) = pool.run(ranks, continue_from, run, corpus, [checkpoint], AFTER)[0]
    assert len(uninterrupted.losses) == AFTER
    assert resumed.losses == uninterrupted.losses
    assert resumed.rates == uninterrupted.rates and resumed.samples == uninterrupted.samples


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"stage": 3, **OFFLOAD_ALL}, {"stage": 1}),
        ({"stage": 1}, {"stage": 3, **OFFLOAD_ALL}),
        ({"stage": 2, **OFFLOAD}, {"stage": 3, "stage3_param_persistence_threshold": 10**5}),
        ({"stage": 3, "sub_group_size": 20_000}, {"stage": 2, **OFFLOAD}),
    ],
    ids=["offloaded", "to-offload", "to-parameters-kept-whole", "sub-groups"],
)
def test_offloaded_and_kept_states_take_part(
    pool: RankPool,
    tmp_path: Path,
    corpus: PreparedCorpus,
    saved: dict[str, object],
    loaded: dict[str, object],
) -> None:
    training = {"run_dir": str(tmp_path)}
    first = small_run(TEXT, dp=2, zero_optimization=saved, training=training)
    second = small_run(TEXT, dp=2, zero_optimization=loaded, training=training)
    before = pool.run(2, save_and_continue, first, corpus, 3, AFTER)[0]
    (after,) = pool.run(2, continue_from, second, corpus, [only_checkpoint(tmp_path)], AFTER)[0]
    assert_same_state(before, after)
    assert after.losses == pytest.approx(before.losses, rel=1e-6)


def assert_same_state(one: Stretch, other: Stretch) -> None:
    for kind, tensors in one.state.items():
        for name, value in tensors.items():
            assert torch.equal(value, other.state[kind][name]), (kind, name)
    for name, value in one.computed.items():
        assert torch.equal(value, other.computed[name]), ("computed", name)


def test_torch_alone_reads_every_tensor(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    """torch's own reader and planner run in another process. The format is
    torch.distributed.checkpoint's.
    """
    run = run_in(tmp_path, (2, 2, 2), 3)
    saved = pool.run(8, save_and_continue, run, corpus, 2, 0)[0]
    expected = expected_tensors(run.config.model, "AdamW")
    tensors: dict[str, Tensor] = {name: torch.zeros(shape) for name, shape in expected.items()}
    dcp.load(tensors, checkpoint_id=only_checkpoint(tmp_path), no_dist=True)
    for kind, by_name in saved.state.items():
        for name, value in by_name.items():
            assert torch.equal(tensors[f"{kind}.{name}"], value), (kind, name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_rank_writes_its_share_and_all_write_every_element_once(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, stage: int
) -> None:
    run = run_in(tmp_path, (1, 2, 2), stage)
    pool.run(4, save_and_continue, run, corpus, 1, 0)
    checkpoint = only_checkpoint(tmp_path)
    index = dcp.FileSystemReader(checkpoint).read_metadata()
    written = [0] * 4
    for place, stored in index.storage_data.items():
        tensor = index.state_dict_metadata[place.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        (size,) = (chunk.sizes.numel() for chunk in tensor.chunks if chunk.offsets == place.offset)
        written[int(stored.relative_path.split("_")[2])] += size
    expected = expected_tensors(run.config.model, "AdamW").values()
    elements = sum(torch.Size(shape).numel() for shape in expected)
    assert sum(written) == elements
    # The first tensor rank writes replicated parameters. At ZeRO-0, data ranks share the work, too.
    assert max(written) < 0.3 * elements


@contextmanager
def disk_that_refuses(after_bytes: int) -> Iterator[None]:
    """Let the kernel refuse larger files of this process (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_and_wait(rank: SavedRun) -> SaveReport:
    """Save, and wait until the save has ended."""
    rank.checkpointing.save(rank.progress)
    while not (reports := rank.checkpointing.finished()):
        time.sleep(0.01)
    (report,) = reports
    return report


Outcome = tuple[SaveReport, list[str], float]
"""The report of a save, the content of the folder after it, and the loss of the step after it."""


def save_thrice(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> list[Outcome]:
    """Save three times. At the second save, the disk refuses the last rank's file."""
    outcomes = []
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        for number in (1, 2, 3):
            rank.train_step()
            refused = number == 2 and launch.rank == launch.world_size - 1
            with disk_that_refuses(5000) if refused else nullcontext():
                report = save_and_wait(rank)
            present = sorted(os.listdir(run.run_dir / "checkpoints"))
            outcomes.append((report, present, rank.train_step()))
    return outcomes


@pytest.mark.parametrize("in_background", [False, True], ids=["blocking", "async"])
def test_a_full_disk_of_one_rank_fails_the_save_and_not_the_run(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, in_background: bool
) -> None:
    run = run_in(tmp_path, (2, 2, 1), async_save=in_background)
    ranks = pool.run(4, save_thrice, run, corpus)
    for outcomes in ranks:
        first, second, third = (report for report, _, _ in outcomes)
        assert first.error is None and third.error is None
        assert second.error is not None and second.error.startswith("rank 3: ")
        assert "File too large" in second.error
        assert second.size_bytes == 0 and second.deleted == ()
        assert all(loss > 0 for _, _, loss in outcomes)
    present = [names for _, names, _ in ranks[0]]
    assert present[0] == present[1] == ["step-00000001"]
    assert present[2] == ["step-00000001", "step-00000005"]


def save_without_room(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[SaveReport, int]:
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        saver = rank.checkpointing._saver
        elements = free_bytes(saver.folder.root)
        expected = {"weights.large": (elements,)}
        rank.checkpointing._saver = dataclasses.replace(saver, expected=expected)
        return save_and_wait(rank), 4 * elements


def test_a_checkpoint_that_does_not_fit_is_refused_before_a_byte_is_written(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    run = run_in(tmp_path, (1, 2, 1))
    report, needed = pool.run(2, save_without_room, run, corpus)[0]
    assert report.error is not None
    assert report.error.startswith(f"a checkpoint takes {needed:,} bytes, but ")
    assert "make room, or lower training.keep_last (3)" in report.error
    assert not (tmp_path / "checkpoints").exists()


SECONDS_HELD = limit(0.3)

Asked = tuple[Stretch, SaveReport]
"""The state when a save was requested, and how the save ended."""


def save_twice_while_the_writer_is_held(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> list[Asked]:
    """Save twice. The first save has its copies, but writes nothing until the second has waited."""
    may_write = threading.Event()
    write_pieces = writing.write_pieces

    def write_late(*arguments: Any, **options: Any) -> writing.WrittenPieces:
        may_write.wait()
        return write_pieces(*arguments, **options)

    with started(launch, run) as context, mock.patch.object(writing, "write_pieces", write_late):
        rank = SavedRun.start(run, corpus, context)
        rank.train_step()
        rank.checkpointing.save(rank.progress)
        stretches = [rank.stretch(0)]
        for _ in range(2):
            rank.train_step()  # overwrites the state that the first save writes
        assert rank.checkpointing.finished() == []
        threading.Timer(SECONDS_HELD, may_write.set).start()
        rank.checkpointing.save(rank.progress)
        stretches.append(rank.stretch(0))
        rank.train_step()  # while the second save may still be in progress
        return list(zip(stretches, rank.checkpointing.close(), strict=True))


def test_a_background_save_has_the_state_of_when_it_was_asked_for(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    """Neither later steps nor the next save, which waits for this one, change what it writes."""
    run = run_in(tmp_path, (1, 2, 2), 2, async_save=True)
    ranks = pool.run(4, save_twice_while_the_writer_is_held, run, corpus)
    for saves in ranks:
        first, second = (report for _, report in saves)
        assert [(report.step, report.error) for report in (first, second)] == [(1, None), (3, None)]
        assert 0 < first.stall_seconds < first.seconds - SECONDS_HELD / 2
        assert SECONDS_HELD / 2 < second.stall_seconds < second.seconds
    checkpoints = [report.checkpoint for _, report in ranks[0]]
    again = pool.run(4, continue_from, run, corpus, checkpoints, 0)[0]
    for (asked, _), loaded in zip(ranks[0], again, strict=True):
        assert_same_state(asked, loaded)


def save_with_late_copies(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[Stretch, SaveReport, list[str]]:
    """Save with copies in host memory that are garbage until somebody waits for them, as with a
    GPU.

    Returns:
        The state when the save was requested, how it ended, and the threads that waited.
    """
    waited: list[str] = []
    take = HostCopy.take

    def take_late(
        host_copy: HostCopy, pieces: Iterable[Piece]
    ) -> tuple[list[Piece], Callable[[], None]]:
        copies, _ = take(host_copy, pieces)
        arriving = [copy.values.clone() for copy in copies]
        for copy in copies:
            copy.values.fill_(float("nan"))

        def wait() -> None:
            waited.append(threading.current_thread().name)
            for copy, values in zip(copies, arriving, strict=True):
                copy.values.copy_(values)

        return copies, wait

    with started(launch, run) as context, mock.patch.object(HostCopy, "take", take_late):
        rank = SavedRun.start(run, corpus, context)
        rank.train_step()
        rank.checkpointing.save(rank.progress)
        asked = rank.stretch(0)
        rank.train_step()
        (report,) = rank.checkpointing.close()
        return asked, report, waited


def test_the_saving_thread_waits_for_the_copies_and_the_training_does_not(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    run = run_in(tmp_path, (1, 2, 1), async_save=True)
    ranks = pool.run(2, save_with_late_copies, run, corpus)
    for _, report, waited in ranks:
        assert report.error is None and waited == ["checkpoint_0"]
    asked, report, _ = ranks[0]
    (loaded,) = pool.run(2, continue_from, run, corpus, [report.checkpoint], 0)[0]
    assert_same_state(asked, loaded)


def save_where_a_gpu_is_visible(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> SaveReport:
    """Save in the background from host memory, while every use of a GPU fails."""
    used = mock.Mock(side_effect=AssertionError("the save used the GPU"))
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "synchronize", used),
            mock.patch.object(torch.cuda, "current_stream", used),
            mock.patch.object(torch.cuda, "stream", used),
        ):
            return save_and_wait(rank)


def test_a_save_synchronises_no_gpu(pool: RankPool, tmp_path: Path, corpus: PreparedCorpus) -> None:
    """torch's own writer synchronises the training's stream, even if all pieces are on the host."""
    run = run_in(tmp_path, async_save=True)
    (report,) = pool.run(1, save_where_a_gpu_is_visible, run, corpus)
    assert report.error is None


Change = tuple[str, str, str]
"""("flushed", path, stamp then) or ("renamed", path before, path after)."""


def stamp(status: os.stat_result) -> str:
    """Return a value that identifies a file and its content, whatever its name is."""
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def changes_of_a_save(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[list[Change], dict[str, str]]:
    """Return the flushes and renames of one save in order, and the stamp of each file that it
    leaves.
    """
    changes: list[Change] = []
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        changes.append(("flushed", path, stamp(os.fstat(descriptor))))

    def recording(rename: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(before: Any, after: Any) -> None:
            rename(before, after)
            changes.append(("renamed", os.fspath(before), os.fspath(after)))

        return call

    with (
        started(launch, run) as context,
        mock.patch.object(os, "fsync", flush),
        mock.patch.object(os, "rename", recording(os.rename)),
        mock.patch.object(os, "replace", recording(os.replace)),
    ):
        rank = SavedRun.start(run, corpus, context)
        rank.train_step()
        changes.clear()
        report = save_and_wait(rank)
        assert report.error is None, report.error
        return changes, {file.name: stamp(file.stat()) for file in report.checkpoint.iterdir()}


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    """If a machine loses power, a file that was not flushed before a rename may be
    lost after it.
    """
    ((changes, files),) = pool.run(1, changes_of_a_save, run_in(tmp_path), corpus)
    root = str(tmp_path / "checkpoints")
    checkpoint = f"{root}/step-00000001"
    writing = f"{checkpoint}.writing"
    named = changes.index(("renamed", writing, checkpoint))

    def flushes(path: str) -> list[int]:
        return [i for i, change in enumerate(changes) if change[:2] == ("flushed", path)]

    content = {then for kind, _, then in changes[:named] if kind == "flushed"}
    assert {".metadata", "__0_0.distcp", "manifest.json", "run_state.json"} <= files.keys()
    assert [name for name, last in files.items() if last not in content] == []
    last_inside = max(i for i, change in enumerate(changes) if change[1].startswith(f"{writing}/"))
    assert any(last_inside < i < named for i in flushes(writing))
    assert any(named < i for i in flushes(root))


def search(launch: LaunchEnvironment, run: Run) -> tuple[Path | None, tuple[tuple[Path, str], ...]]:
    with started(launch, run) as context:
        folder = CheckpointFolder(run.run_dir / "checkpoints")
        return newest_complete(folder.newest_first(), context.checkpoint_group)


def test_damaged_checkpoints_are_skipped_and_named(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    """Every rank reads a part of the files, and all find the same checkpoint."""
    run = run_in(tmp_path, (1, 2, 1), keep_last=5)
    pool.run(2, save_thrice, run, corpus)  # the second of the three saves fails
    folder = CheckpointFolder(tmp_path / "checkpoints")
    newest, oldest = folder.newest_first()
    flip_a_bit(newest / "__1_0.distcp")
    for step, name in ((6, "__0_0.distcp"), (7, "__1_0.distcp"), (8, "run_state.json")):
        shutil.copytree(oldest, folder.path(step))
        file = folder.path(step) / name
        file.write_bytes(file.read_bytes()[:-1])
    shutil.copytree(oldest, folder.path(9))
    (folder.path(9) / "manifest.json").unlink()
    found = pool.run(2, search, run)
    assert found[0] == found[1]
    complete, skipped = found[0]
    assert complete == oldest
    reasons = {checkpoint.name: why for checkpoint, why in skipped}
    assert list(reasons) == [f"step-0000000{step}" for step in (9, 8, 7, 6, 5)]
    assert "manifest.json is missing" in reasons["step-00000009"]
    assert "run_state.json has " in reasons["step-00000008"]
    assert "__1_0.distcp has " in reasons["step-00000007"]
    assert "__0_0.distcp has " in reasons["step-00000006"]
    assert "__1_0.distcp has changed since it was written" in reasons["step-00000005"]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
