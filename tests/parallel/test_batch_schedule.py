"""A batch that changes during the run: every layout trains the steps of one process."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.measurement.verification.verify import whole_batch
from tests.parallel.references import TEXT, References, train_and_compare
from tests.support.rank_pool import RankPool
from tests.support.tiny import MOE, MUON, tiny_corpus, tiny_run
from tests.training.recorded import train

SCHEDULE = "0:12 2:24 3:36 5:12"
LAYOUTS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    # 1 to 3 micro-batches of 3 samples on each data rank
    "ZeRO-2, one micro-batch": ((1, 4, 1, 1), {"zero_optimization": {"stage": 2}}),
    "ZeRO-0, GPipe": ((2, 2, 1, 1), {"parallel": {"schedule": "gpipe"}, "optimizer": MUON}),
    "ZeRO-1, once a step": ((1, 2, 1, 2), {"zero_optimization": {"stage": 1}}),
    "ZeRO-3, chunks": (
        (2, 2, 1, 1),
        {
            "model": {"num_hidden_layers": 5},
            "parallel": {"virtual_stages": 2},
            "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": 1,
        },
    ),
    "ZeRO-3, context": ((1, 2, 2, 1), {"zero_optimization": {"stage": 3}}),
    "experts": (
        (1, 4, 1, 1),
        {
            "model": {**MOE, "router_aux_loss_coef": 0.01, "router_bias_rate": 0.01},
            "parallel": {"expert": 2},
            "zero_optimization": {"stage": 2},
        },
    ),
}


def scheduled(layout: tuple[int, int, int, int], changes: dict[str, Any], schedule: str) -> Run:
    pp, dp, cp, tp = layout
    keys = {"train_micro_batch_size_per_gpu": 12 // dp // (1 if dp == 4 else 2), **changes}
    keys |= {"train_batch_size": None, "gradient_accumulation_steps": None}
    return tiny_run(TEXT, pp=pp, dp=dp, cp=cp, tp=tp, train_batch_size_schedule=schedule, **keys)


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_the_batches_of_one_process(
    layout: tuple[int, int, int, int],
    changes: dict[str, Any],
    pool: RankPool,
    references: References,
) -> None:
    run = scheduled(layout, changes, SCHEDULE)
    assert run.batch.train_batch_size == 36
    corpus = tiny_corpus(run, references.cache)
    samples = [
        [int(sample) for part in whole_batch(run, corpus, step) for sample in part.samples]
        for step in range(6)
    ]
    assert [len(each) for each in samples] == [12, 12, 24, 36, 36, 12]
    read = [sample for each in samples for sample in each]
    assert read == list(range(132)), "no sample is left out or read twice"
    comparison = train_and_compare(pool, references, run, 6)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest


def test_a_run_that_resumes_within_a_phase_continues_with_its_batches(
    pool: RankPool, tmp_path: Path
) -> None:
    """A sample has 16 tokens, so 576 tokens are trained after step 3, and 1,344 after step 5."""
    training = {"steps": None, "tokens": 2_400, "save_interval": 4, "run_dir": str(tmp_path)}
    changes = {"training": training, "zero_optimization": {"stage": 2}}
    run = scheduled((1, 2, 1, 1), changes, "0:12 0.5K:24 1.3K:36")
    corpus = tiny_corpus(run, tmp_path)
    complete = pool.run(2, train, run, corpus)[0]
    batches = [step.train_batch_size for step in complete.steps]
    assert batches == [12, 12, 12, 24, 24, 36, 36]
    assert [step.tokens for step in complete.steps][-1] == 16 * sum(batches) == 2_496
    assert run.steps == 7
    saved = complete.saves[0].checkpoint
    assert complete.saves[0].step == 4
    other = scheduled((2, 1, 1, 1), changes, "0:12 0.5K:24 1.3K:36")
    resumed = pool.run(2, train, other, corpus, None, saved)[0]
    assert [step.train_batch_size for step in resumed.steps] == batches[4:]
    for step, before in zip(resumed.steps, complete.steps[4:], strict=True):
        assert step.tokens == before.tokens
        assert step.loss == pytest.approx(before.loss, rel=1e-5)
