"""If ranks have different inputs, each of them reports it before training."""

from pathlib import Path

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.job.job import check_agreement
from megaspeed.supervision.meeting import RanksDisagree
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
RANKS = 3

Input = tuple[Run, PreparedCorpus]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alike(cache: Path) -> Input:
    run = tiny_run(TEXT, dp=RANKS)
    return run, tiny_corpus(run, cache)


def complaint(launch: LaunchEnvironment, inputs: list[Input]) -> str | None:
    """Return this rank's error message, if each rank has its own input."""
    _, corpus = inputs[launch.rank]
    with ParallelContext.create(
        Grid(pp=1, dp=RANKS, tp=1), launch, timeout_seconds=limit(30)
    ) as context:
        try:
            check_agreement(corpus, context)
        except RanksDisagree as error:
            return str(error)
    return None


def only_complaint(pool: RankPool, inputs: list[Input]) -> str:
    everyones = pool.run(RANKS, complaint, inputs)
    assert everyones[0] is not None and set(everyones) == {everyones[0]}
    return everyones[0]


def test_the_same_input_is_agreed_on(pool: RankPool, alike: Input) -> None:
    assert pool.run(RANKS, complaint, [alike] * RANKS) == [None] * RANKS


def test_training_text_that_differs_in_one_letter_is_named(
    pool: RankPool, alike: Input, cache: Path, tmp_path: Path
) -> None:
    text = TEXT.read_text()
    changed = tmp_path / "LICENSE"
    changed.write_text(text.replace("Apache", "apache", 1))
    other = tiny_corpus(tiny_run(changed, dp=RANKS), cache)
    run, _ = alike
    said = only_complaint(pool, [alike, (run, other), (run, other)])
    assert "the training text (data.train) of ranks [1, 2] differs from rank 0's" in said
    assert "Give every node the same files" in said


def test_another_tokenizer_of_the_same_text_is_named(
    pool: RankPool, alike: Input, cache: Path
) -> None:
    smaller = tiny_corpus(tiny_run(TEXT, dp=RANKS, model={"vocab_size": 290}), cache)
    said = only_complaint(pool, [alike, alike, (alike[0], smaller)])
    assert "the tokenizer (data.tokenizer) of ranks [2] differs from rank 0's" in said
    assert "training text" not in said


def test_validation_text_that_differs_is_named(
    pool: RankPool, alike: Input, cache: Path, tmp_path: Path
) -> None:
    """Ranks with validation sets of different lengths would wait for each other in evaluation."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("Another text, of which another node has no copy. " * 20)
    data = {"validation": [str(held_out)]}
    other = tiny_corpus(tiny_run(TEXT, dp=RANKS, data=data), cache)
    said = only_complaint(pool, [alike, (alike[0], other), alike])
    assert "the validation text (data.validation) of ranks [1] differs from rank 0's" in said
    assert "training text" not in said
