"""No rank gathers the model: a save and a load each add at most the rank's share to its memory.

On a CPU, the state is in the same memory. Together they take twice the share.
"""

import math
from pathlib import Path

import pytest

from megaspeed.checkpoint.tensors import expected_tensors
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint.saved_runs import SavedRun, only_checkpoint, save_only, started
from tests.support.memory import added
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
MODEL = {"hidden_size": 256, "num_hidden_layers": 14, "vocab_size": 4000}
RANKS = 4
# Memory that a process allocates only once: its index, its plan, the allocator's pages.
SLACK_BYTES = 14 << 20


def large_run(folder: Path, in_background: bool = False, **changes: object) -> Run:
    training = {"run_dir": str(folder), "async_save": in_background}
    return small_run(TEXT, model=MODEL, training=training, **changes)


def save_and_load(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, other: Path
) -> dict[str, int]:
    """Return the memory that a save adds, and a load of a checkpoint that one rank wrote alone."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        rank.train_step()
        reports: list[SaveReport] = []

        def save() -> None:
            rank.checkpointing.save(rank.progress)
            reports.extend(rank.checkpointing.close())

        saved = added(save)
        assert [report.error for report in reports] == [None]
        load = added(lambda: rank.checkpointing.load(other))
        return {"save": saved, "load": load}


@pytest.fixture(scope="module")
def written_by_one(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of one rank that saved the complete model alone."""
    folder = tmp_path_factory.mktemp("alone")
    run = large_run(folder)
    pool.run(1, save_only, run, tiny_corpus(run, folder / "cache"))
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
@pytest.mark.parametrize(("stage", "in_background"), [(1, False), (3, False), (1, True)])
def test_a_save_and_a_load_add_no_more_than_the_share(
    pool: RankPool, tmp_path: Path, written_by_one: Path, stage: int, in_background: bool
) -> None:
    zero = {"stage": stage}
    run = large_run(tmp_path, in_background, dp=RANKS, zero_optimization=zero)
    corpus = tiny_corpus(run, written_by_one / "cache")
    all_bytes = 4 * sum(map(math.prod, expected_tensors(run.config.model, "AdamW").values()))
    share = all_bytes // RANKS
    assert share > 2 * SLACK_BYTES, "the model is too small to show anything"
    checkpoint = only_checkpoint(written_by_one)
    for figures in pool.run(RANKS, save_and_load, run, corpus, checkpoint):
        for what, more in figures.items():
            assert more <= share + SLACK_BYTES, f"{what} added {more:,} bytes to {share:,}"
