"""Compression saves its unsent gradients, and sends them even after a change of layout."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.checkpoint.inspection import inspect
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.verify import merge_shards
from megaspeed.model.parameters import logical_name
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint.saved_runs import SavedRun, only_checkpoint, started
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, merge, tiny_corpus
from tests.zero.one_rank import small_run

TEXT = Path(__file__).parents[2] / "LICENSE"
INT8: dict[str, Any] = {"type": "int8", "block": 32}
POWER_SGD: dict[str, Any] = {"type": "powersgd", "rank": 2, "start_step": 2}
STEPS = 2

Layout = tuple[int, ...]
"""pp, dp, tp, and the number of replicas if ZeRO has shards and replicas."""


@dataclass
class Seen:
    """The state of one rank before it continues, and its losses and weights afterwards."""

    feedback: list[tuple[str, Any, Tensor]]
    factors: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def look(rank: SavedRun) -> Seen:
    worker = rank.worker
    engine = worker.engine
    feedback = []
    for held in engine.gradients.feedback():
        complete = torch.zeros(worker.shards[held.name].local_shape)
        complete.view(-1)[held.start : held.start + held.values.numel()] = held.values
        feedback.append((held.name, worker.shards[held.name], complete))
    return Seen(feedback, {name: q.clone() for name, q in engine.gradients.factors()})


def trained(rank: SavedRun, seen: Seen) -> Seen:
    seen.losses = [rank.train_step() for _ in range(STEPS)]
    for fragment in rank.worker.engine.state_fragments():
        seen.weights[f"{fragment.name} {fragment.start}"] = fragment.weights.clone()
    return seen


def save(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> Seen:
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        for _ in range(3):
            rank.train_step()
        rank.checkpointing.save(rank.progress)
        (report,) = rank.checkpointing.close()
        assert report.error is None, report.error
        return trained(rank, look(rank))


def load(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, checkpoint: Path) -> Seen:
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        rank.progress = rank.checkpointing.load(checkpoint)
        return trained(rank, look(rank))


def feedback_after_a_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, checkpoint: Path
) -> tuple[bool, bool]:
    """Return whether this rank has feedback after it has loaded a checkpoint, and after one more
    step.
    """
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        rank.progress = rank.checkpointing.load(checkpoint)

        def has_feedback() -> bool:
            feedback = rank.worker.engine.gradients.feedback()
            return any(bool(held.values.any()) for held in feedback)

        loaded = has_feedback()
        rank.train_step()
        return loaded, has_feedback()


def run_at(layout: Layout, stage: int, folder: Path, how: Any, **changes: Any) -> Run:
    pp, dp, tp, *replicas = layout
    parallel = {"gradient_compression": how, "replicate": replicas[0] if replicas else 1}
    values = {
        "parallel": parallel,
        "zero_optimization": {"stage": stage},
        "training": {"run_dir": str(folder)},
    }
    return small_run(TEXT, pp=pp, dp=dp, tp=tp, **merge(values, changes))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    run = run_at((1, 1, 1), 0, Path("unused"), "none")
    return tiny_corpus(run, tmp_path_factory.mktemp("cache"))


def unsent(run: Run, ranks: list[Seen]) -> dict[str, Tensor]:
    """Return the unsent part of each logical parameter's gradient, as the mean over data ranks."""
    total: dict[str, Tensor] = {}
    for dp_rank in range(run.grid.dp):
        held = [
            part
            for rank, seen in enumerate(ranks)
            if run.grid.coordinates_of(rank).dp == dp_rank
            for part in seen.feedback
        ]
        for name, values in merge_shards(held).tensors.items():
            logical = logical_name(run.config.model, name)
            mean = values.double() / run.grid.dp
            total[logical] = total[logical] + mean if logical in total else mean
    return total


@pytest.mark.parametrize(
    ("layout", "stage", "how"),
    [
        ((1, 2, 1), 0, INT8),
        ((2, 2, 1), 1, INT8),
        ((1, 2, 2), 3, INT8),
        ((1, 4, 1, 2), 1, INT8),
        ((2, 4, 1, 2), 3, INT8),
        ((1, 2, 1), 0, POWER_SGD),
        ((1, 3, 1), 2, POWER_SGD),
        ((2, 2, 2), 1, POWER_SGD),
        ((1, 2, 1), 1, {**POWER_SGD, "error_feedback": False}),
    ],
)
def test_a_run_continues_bit_by_bit(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, layout: Layout, stage: int, how: Any
) -> None:
    run = run_at(layout, stage, tmp_path, how)
    size = run.grid.world_size
    before = pool.run(size, save, run, corpus)
    checkpoint = only_checkpoint(tmp_path)
    assert inspect(checkpoint).problems == ()
    after = pool.run(size, load, run, corpus, checkpoint)
    for one, other in zip(before, after, strict=True):
        assert one.losses == other.losses
        assert one.weights.keys() == other.weights.keys()
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
        assert any(bool(values.any()) for _, _, values in one.feedback) == how.get(
            "error_feedback", True
        )


@pytest.mark.parametrize(
    ("how", "saves", "loads"),
    [
        (INT8, (1, 2, 1), (1, 3, 1)),
        (INT8, (1, 3, 1), (1, 2, 2)),
        (INT8, (2, 2, 1), (1, 4, 1)),
        (INT8, (1, 2, 2), (2, 2, 1)),
        (INT8, (2, 2, 1), (3, 2, 1)),
        (INT8, (1, 4, 1, 2), (1, 2, 1)),
        (INT8, (2, 2, 1), (1, 4, 1, 2)),
        (INT8, (1, 4, 1, 2), (1, 6, 1, 2)),
        (POWER_SGD, (1, 4, 1, 2), (1, 4, 1)),
        (POWER_SGD, (1, 3, 1), (1, 2, 2)),
        (POWER_SGD, (2, 2, 1), (1, 4, 1)),
    ],
)
def test_what_was_not_sent_is_sent_at_another_layout(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, how: Any, saves: Layout, loads: Layout
) -> None:
    """Both methods save feedback in the same way, so fewer layouts are tested with PowerSGD."""
    # These are the same matrices at each layout. GPT-2's positions are compressed only without
    # tensor ranks.
    model = {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}
    changes = {"model": model}
    run = run_at(saves, 1, tmp_path, how, **changes)
    before = pool.run(run.grid.world_size, save, run, corpus)
    other = run_at(loads, 2, tmp_path, how, **changes)
    after = pool.run(other.grid.world_size, load, other, corpus, only_checkpoint(tmp_path))
    saved, loaded = unsent(run, before), unsent(other, after)
    assert saved.keys() == loaded.keys()
    for name, values in saved.items():
        assert bool(values.any())
        torch.testing.assert_close(loaded[name], values, rtol=1e-5, atol=1e-9)
    if saves[2] == loads[2] and len(saves) == len(loads) == 3:
        held = {
            (run.grid.coordinates_of(rank).tp, name): factor
            for rank, seen in enumerate(before)
            for name, factor in seen.factors.items()
        }
        for rank, seen in enumerate(after):
            for name, factor in seen.factors.items():
                before_it = held.get((other.grid.coordinates_of(rank).tp, name))
                assert before_it is None or torch.equal(factor, before_it)
    assert after[-1].losses == pytest.approx(before[-1].losses, rel=0.05)


@pytest.mark.parametrize("other", ["none", "bf16", POWER_SGD])
def test_a_run_continues_with_another_compression(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus, other: Any
) -> None:
    run = run_at((1, 2, 1), 1, tmp_path, INT8)
    before = pool.run(2, save, run, corpus)
    changed = run_at((1, 2, 1), 1, tmp_path, other)
    after = pool.run(2, load, changed, corpus, only_checkpoint(tmp_path))
    assert after[0].losses == pytest.approx(before[0].losses, rel=0.05)
    assert bool(after[0].feedback) == (other == POWER_SGD)


def test_feedback_is_sent_once_by_a_step_that_sends_everything(
    pool: RankPool, tmp_path: Path, corpus: PreparedCorpus
) -> None:
    """In an earlier version, PowerSGD sent the feedback of int8 again in every step before its
    first own step.
    """
    run = run_at((1, 2, 1), 1, tmp_path, INT8)
    pool.run(2, save, run, corpus)
    changed = run_at((1, 2, 1), 1, tmp_path, {**POWER_SGD, "start_step": 100})
    ranks = pool.run(2, feedback_after_a_step, changed, corpus, only_checkpoint(tmp_path))
    assert ranks == [(True, False), (True, False)]
