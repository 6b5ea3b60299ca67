"""A run that ends with an error during a save completes that save, and ends.

In an earlier version, the error closed the process groups. Then each rank of the background save
acted as the only rank, and all of them wrote into the same files.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megaspeed.checkpoint import writing
from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.inspection import inspect
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.supervision.answers import gather
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training import checkpointing
from tests.checkpoint.saved_runs import SavedRun, only_checkpoint, started
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
_SECONDS_HELD = limit(0.5)


def run_in(folder: Path) -> Run:
    return small_run(
        TEXT,
        pp=2,
        model={"tie_word_embeddings": False},
        training={"run_dir": str(folder), "async_save": True},
    )


def fail_during_a_save(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, failing: list[int]
) -> str | None:
    """Raise an error during a save. The save writes nothing before the error."""
    write_pieces, released = writing.write_pieces, threading.Event()

    def held_back(*args: Any, **options: Any) -> writing.WrittenPieces:
        released.wait()
        return write_pieces(*args, **options)

    writing.write_pieces = held_back
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        try:
            with rank.checkpointing:
                rank.train_step()
                rank.checkpointing.save(rank.progress)
                threading.Timer(_SECONDS_HELD, released.set).start()
                if launch.rank in failing:
                    raise OSError("the disk with the training text has gone")
        except OSError as error:
            return str(error)
    return None


@pytest.mark.parametrize("failing", [[0, 1], [1], [0]], ids=str)
def test_a_save_in_progress_is_completed(
    pool: RankPool, tmp_path: Path, failing: list[int]
) -> None:
    run = run_in(tmp_path)
    corpus = tiny_corpus(run, tmp_path / "cache")
    ended = pool.run(2, fail_during_a_save, run, corpus, failing)
    assert [rank for rank, error in enumerate(ended) if error is not None] == failing
    assert inspect(only_checkpoint(tmp_path)).problems == ()


def fail_with_a_save_that_never_ends(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> float:
    """Return the seconds from the exception until the run's objects are closed."""
    writing.write_pieces = lambda *_, **__: threading.Event().wait()  # type: ignore[assignment]
    checkpointing._SECONDS_FOR_A_SAVE_AFTER_AN_EXCEPTION = 0.5
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        with pytest.raises(ValueError, match="another rank never answers"), rank.checkpointing:
            rank.train_step()
            rank.checkpointing.save(rank.progress)
            failed = time.monotonic()
            raise ValueError("another rank never answers")
        return time.monotonic() - failed


def test_after_an_exception_a_save_that_never_ends_is_abandoned(
    pool: RankPool, tmp_path: Path
) -> None:
    run = run_in(tmp_path)
    corpus = tiny_corpus(run, tmp_path / "cache")
    for seconds in pool.run(2, fail_with_a_save_that_never_ends, run, corpus):
        assert 0.5 <= seconds < limit(10)


def save_without_groups(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> str:
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        pieces = list(rank.checkpointing._pieces("AdamW", owned=True))
    try:
        gather(
            context.checkpoint_group,
            lambda: writing.write_pieces(run.run_dir, pieces),
            CheckpointError,
        )
    except CheckpointError as error:
        return str(error)
    return "written"


def test_a_save_without_process_groups_is_refused(pool: RankPool, tmp_path: Path) -> None:
    run = run_in(tmp_path)
    messages = pool.run(2, save_without_groups, run, tiny_corpus(run, tmp_path / "cache"))
    assert messages == ["the process groups have ended"] * 2
