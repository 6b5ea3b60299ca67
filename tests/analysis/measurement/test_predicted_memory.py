"""Memory predicted from the configuration is memory held by real ranks.

States: within 2 %. The highest moment of a step: within 10 %.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.stage_memory import predict_memory
from megaspeed.analysis.measurement.measured_step import RankMeasurement, measure_step
from megaspeed.config import Run
from megaspeed.data import PreparedCorpus
from megaspeed.topology import LaunchEnvironment
from tests.parallel.tiny import LLAMA, merge, tiny_corpus, tiny_run
from tests.rank_pool import RankPool
from tests.zero.one_rank import LEARNING_RATE, one_rank

WIDE = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 1003}
LONG = {"model": {**WIDE, "max_position_embeddings": 64}, "data": {"sequence_length": 64}}
# Few tokens and many parameters: the highest moment is in the backward pass or in the reduction.
FEW_TOKENS: dict[str, Any] = {
    "model": {**WIDE, "hidden_size": 128, "vocab_size": 301},
    "train_batch_size": 8,
}
BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
UNTIED = {"model": {"tie_word_embeddings": False}}
RECOMPUTED = {"parallel": {"activation_checkpointing": "full"}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(f"line {i} has {i * i % 97} words and more" for i in range(4000)))
    return file


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def one_measured_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> RankMeasurement:
    """A first step makes the optimizer's states, a second one is measured."""
    with one_rank(launch, run, corpus) as rank:
        rank.train_step(0)
        load = functools.partial(rank.loader.micro_batch, run.batch.train_batch_size)
        return measure_step(rank.worker, load, LEARNING_RATE)[1]


def measured_by_stage(pool: RankPool, run: Run, cache: Path) -> list[list[RankMeasurement]]:
    """For each pipeline stage, the measurements of its ranks."""
    ranks = pool.run(run.degrees.world_size, one_measured_step, run, tiny_corpus(run, cache))
    return [[m for m in ranks if m.pipeline_stage == stage] for stage in range(run.degrees.pp)]


def states_only(memory: MemoryBytes) -> tuple[int, int, int]:
    return memory.parameters, memory.gradients, memory.optimizer_states


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pp", "dp", "tp"), [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (2, 3, 1)]
)
def test_states_of_every_zero_stage(
    pool: RankPool, text: Path, cache: Path, pp: int, dp: int, tp: int
) -> None:
    """Every ZeRO stage, tied and untied, fp32 and bf16, on every rank of every layout; layers and
    vocabulary are split unevenly.
    """
    variants: list[dict[str, Any]] = [{}, {**UNTIED, **FP32_SUMS}, {**BF16}, {**UNTIED}]
    if (pp + dp + tp) % 2:  # the other half of the combinations at the layouts between
        variants.reverse()
    for zero_stage, variant in enumerate(variants):
        run = tiny_run(
            text,
            pp=pp,
            dp=dp,
            tp=tp,
            zero_optimization={"stage": zero_stage},
            **{"train_batch_size": 48, **variant},
        )
        for stage, ranks in enumerate(measured_by_stage(pool, run, cache)):
            predicted = predict_memory(run, stage, device_type="cpu").states
            for rank in ranks:
                assert states_only(rank.states) == pytest.approx(states_only(predicted), rel=0.02)


PEAKS: dict[str, tuple[tuple[int, int, int], list[dict[str, Any]]]] = {
    "many tokens": (
        (1, 2, 1),
        [{**LONG, "zero_optimization": {"stage": stage}} for stage in range(4)],
    ),
    "few tokens": (
        (1, 2, 1),
        [
            *({**FEW_TOKENS, "zero_optimization": {"stage": stage}} for stage in range(4)),
            {**FEW_TOKENS, **FP32_SUMS, "zero_optimization": {"stage": 1}},
            {**FEW_TOKENS, **BF16, "zero_optimization": {"stage": 2}},
            {**FEW_TOKENS, **FP32_SUMS, "zero_optimization": {"stage": 3}},
        ],
    ),
    "recomputation, large vocabulary, dropout": (
        (1, 2, 1),
        [
            merge(LONG, {**RECOMPUTED, "zero_optimization": {"stage": 1}}),
            merge(LONG, {**RECOMPUTED, "zero_optimization": {"stage": 3}}),
            merge(LONG, {"model": {"vocab_size": 8000, "tie_word_embeddings": False}}),
            merge(LONG, {"model": {"residual_dropout": 0.1, "embedding_dropout": 0.1}}),
        ],
    ),
    "a pipeline": (
        (2, 2, 1),
        [
            {**LONG, "zero_optimization": {"stage": 1}},
            {**LONG, **FP32_SUMS, "zero_optimization": {"stage": 3}},
            merge(LONG, {"parallel": {"schedule": "gpipe"}, "zero_optimization": {"stage": 2}}),
            merge(LONG, RECOMPUTED),
        ],
    ),
    "a long pipeline": ((4, 1, 1), [{**LONG}, {**LONG, **BF16}]),
    "tensor ranks": (
        (1, 1, 2),
        [
            {**LONG},
            merge(LONG, {"parallel": {"sequence_parallel": True}, **FP32_SUMS}),
            merge(
                LONG, {"model": {**LLAMA, **LONG["model"]}, "parallel": {"sequence_parallel": True}}
            ),
        ],
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_step(pool: RankPool, text: Path, cache: Path, name: str) -> None:
    (pp, dp, tp), variants = PEAKS[name]
    wrong = []
    for variant in variants:
        run = tiny_run(text, pp=pp, dp=dp, tp=tp, **variant)
        for stage, ranks in enumerate(measured_by_stage(pool, run, cache)):
            predicted = predict_memory(run, stage, device_type="cpu")
            measured = max((rank.peak for rank in ranks), key=lambda peak: peak.total)
            if predicted.peak.total != pytest.approx(measured.total, rel=0.1):
                wrong.append(f"{variant} stage {stage}: {predicted} but measured {measured}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("pp", "dp"), [(1, 3), (2, 3)])
def test_each_zero_stage_divides_what_it_promises_by_dp(
    pool: RankPool, text: Path, cache: Path, pp: int, dp: int
) -> None:
    """Optimizer states from ZeRO-1 on, gradients from 2 on, parameters from 3 on; peaks fall.

    Eight blocks a pipeline stage: ZeRO-3 has two of them gathered at a time.
    """
    model = {**FEW_TOKENS["model"], "hidden_size": 64, "num_hidden_layers": 8 * pp}
    measured = []
    for zero_stage in range(4):
        zero = {"stage": zero_stage}
        run = tiny_run(text, pp=pp, dp=dp, model=model, train_batch_size=12, zero_optimization=zero)
        measured.append([ranks[0] for ranks in measured_by_stage(pool, run, cache)])
    for stage in range(pp):
        zero0, zero1, zero2, zero3 = (run[stage] for run in measured)
        share = pytest.approx(1 / dp, rel=0.01)
        assert zero1.states.optimizer_states / zero0.states.optimizer_states == share
        assert zero2.states.gradients / zero1.states.gradients == share
        assert zero3.states.parameters / zero2.states.parameters == share
        for lower, higher in ((zero0, zero1), (zero1, zero2), (zero2, zero3)):
            assert higher.peak.total < lower.peak.total
        assert zero1.states.parameters == pytest.approx(zero0.states.parameters, rel=0.001)
        assert zero1.states.gradients == zero0.states.gradients
