"""Spikes are found, skipped and named; all layouts skip the same steps, also after a resume."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspeed.config.run import SpikeConfig
from megaspeed.training.spikes import Divergence, Recent, deviations_of_spike, with_step
from tests.parallel.references import TEXT, References, train_and_compare
from tests.support.rank_pool import RankPool
from tests.support.tiny import MOE, MUON, tiny_corpus
from tests.training.recorded import train
from tests.zero.one_rank import OFFLOAD, small_run

# In the first 12 steps, these limits skip some steps and take others after them.
SKIP = {"window": 4, "deviations": 2.5}
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "ZeRO-0": ((2, 1, 2), {"zero_optimization": {"stage": 0}}),
    "ZeRO-1, offloaded": ((1, 2, 2), {"zero_optimization": {"stage": 1, **OFFLOAD}}),
    "ZeRO-2, Muon": ((1, 4, 1), {"zero_optimization": {"stage": 2}, "optimizer": MUON}),
    "ZeRO-3": ((2, 2, 2), {"zero_optimization": {"stage": 3}}),
    "ZeRO-3, experts": (
        (1, 4, 1),
        {
            "model": {**MOE, "router_bias_rate": 0.01},
            "parallel": {"expert": 2},
            "zero_optimization": {"stage": 3},
        },
    ),
}


def test_a_spike_lies_far_above_the_mean_of_the_steps_before() -> None:
    limits = SpikeConfig(window=4, deviations=3.0)
    recent = ((9.0, 9.0), (1.0, 10.0), (2.0, 10.0), (3.0, 11.0), (4.0, 13.0))  # 9 is too old
    losses, norms = zip(*recent[1:], strict=True)
    loss_limit = statistics.mean(losses) + 3 * statistics.stdev(losses)
    norm_limit = statistics.mean(norms) + 3 * statistics.stdev(norms)
    assert deviations_of_spike(limits, recent, loss_limit - 1e-9, norm_limit - 1e-9) is None
    by_loss = deviations_of_spike(limits, recent, 2.5 + 4 * statistics.stdev(losses), 11.0)
    by_norm = deviations_of_spike(limits, recent, 2.5, 11.0 + 5 * statistics.stdev(norms))
    assert [by_loss, by_norm] == pytest.approx([4.0, 5.0])
    assert deviations_of_spike(limits, recent, -100.0, -100.0) is None, "far below is no spike"


@pytest.mark.parametrize(
    "recent",
    [(), ((1.0, 1.0),) * 3, ((1.0, 1.0),) * 8],
    ids=["no step", "less than half a window", "no deviation"],
)
def test_without_enough_different_steps_nothing_is_a_spike(recent: Recent) -> None:
    limits = SpikeConfig(window=8)
    assert deviations_of_spike(limits, recent, 50.0, 50.0) is None
    assert deviations_of_spike(limits, recent, math.nan, 50.0) is None


def test_a_lasting_change_of_the_level_is_accepted_after_a_few_steps() -> None:
    limits, skipped = SpikeConfig(), 0
    recent: Recent = ()
    for step in range(128):
        recent = with_step(limits, recent, 3.0 + 0.01 * (step % 2), 1.0)
    while deviations_of_spike(limits, recent, 8.0, 1.0) is not None:
        skipped += 1
        recent = with_step(limits, recent, 8.0, 1.0)
    assert skipped == math.ceil(128 / (1 + 6**2)) == 4
    assert len(recent) == 128
    assert with_step(limits, recent, math.inf, 1.0) is recent


def test_a_loss_that_rises_and_stays_is_reported_once_with_the_likely_cause() -> None:
    falls = [5.0 - 0.02 * step + 0.01 * (step % 3) for step in range(200)]
    rises = [1.0 + 0.02 * step for step in range(300)]
    course = Divergence()
    sentences = [course.sentence_after(step, loss) for step, loss in enumerate(falls + rises, 1)]
    (found,) = (sentence for sentence in sentences if sentence is not None)
    assert "learning rate that is too high" in found and "up to step 2" in found
    assert sentences.index(found) > 200
    random = torch.Generator().manual_seed(1)
    noise = torch.randn(2000, generator=random).tolist()
    steady = Divergence()
    levels = (3.0 + 2.0 / (1 + step) + 0.3 * each for step, each in enumerate(noise))
    assert not any(steady.sentence_after(step, loss) for step, loss in enumerate(levels, 1))
    jump = Divergence()
    assert not any(jump.sentence_after(n, 9.0 if n == 150 else 3.0 + n % 2) for n in range(1, 290))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_skips_the_steps_that_one_process_skips(
    layout: tuple[int, int, int], changes: dict[str, Any], pool: RankPool, references: References
) -> None:
    pp, dp, tp = layout
    run = small_run(TEXT, pp=pp, dp=dp, tp=tp, training={"skip_spikes": SKIP}, **changes)
    comparison = train_and_compare(pool, references, run, 12)
    assert comparison.equal, comparison.largest
    reference = references.of(run, 12)
    first = reference.skipped.index(True)
    assert False in reference.skipped[first:], "a step after a skipped one is taken"


def test_a_resumed_run_remembers_the_steps_before_and_skips_the_same(
    pool: RankPool, tmp_path: Path
) -> None:
    training = {"skip_spikes": SKIP, "steps": 12, "save_interval": 7, "run_dir": str(tmp_path)}
    run = small_run(TEXT, dp=2, training=training, zero_optimization={"stage": 2})
    corpus = tiny_corpus(run, tmp_path)
    complete = pool.run(2, train, run, corpus)[0]
    spikes = [step.spike is not None for step in complete.steps]
    assert spikes == [step.skipped for step in complete.steps] and any(spikes[7:])
    saved = complete.saves[0].checkpoint
    assert complete.saves[0].step == 7
    other = small_run(TEXT, pp=2, training=training)
    resumed = pool.run(2, train, other, corpus, None, saved)[0]
    assert [step.skipped for step in resumed.steps] == spikes[7:]
    for step, before in zip(resumed.steps, complete.steps[7:], strict=True):
        assert step.loss == pytest.approx(before.loss, rel=1e-5)
        assert step.learning_rate == before.learning_rate
