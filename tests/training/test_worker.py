"""The worker of a rank executes each instruction of a step under its own name."""

from pathlib import Path

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.pipeline.p2p import Links
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import one_rank, small_run

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def failed_in(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> tuple[list[str], str]:
    """Return the notes of an exception in the last wait for messages of a step, and what the rank
    did meanwhile.
    """

    def fail(links: Links) -> None:
        raise RuntimeError("a neighbour is gone")

    with one_rank(launch, run, corpus) as rank:
        executor = rank.worker.compute_gradients(lambda m: rank.loader.micro_batch(0, m))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Links, "finish", fail)
            with pytest.raises(RuntimeError, match="a neighbour is gone") as failed:
                rank.worker.update_weights(executor, 1e-3)
        doing = str(rank.context.activity)
        rank.worker.update_weights(executor, 1e-3)
        return failed.value.__notes__, doing


def test_a_step_waits_for_its_last_messages_in_the_optimizer_step(
    pool: RankPool, cache: Path
) -> None:
    """A version waited before, so a report of a hang named an instruction that had ended."""
    run = small_run(TEXT, pp=2, model={"tie_word_embeddings": False})
    for notes, doing in pool.run(2, failed_in, run, tiny_corpus(run, cache)):
        assert notes == ["during OptimizerStep()"]
        assert doing.endswith("OptimizerStep()")
