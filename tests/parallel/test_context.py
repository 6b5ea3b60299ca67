"""Ranks that share sequences train like one process, at every ZeRO stage."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.verify import ParallelRun, train_rank
from megaspeed.measurement.watched_step import RankMeasurement
from megaspeed.model.documents import places_in
from megaspeed.model.micro_batch import NOT_COUNTED, MicroBatch
from megaspeed.model.sequence_part import SequencePart
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.traffic import axis_totals, predict_traffic
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.rank_model import context_axis
from tests.parallel.covering import CONTEXT, Row, pairs_of, possible_pairs, rows_of
from tests.parallel.references import FEW_STEPS, TEXT, References, train_and_compare
from tests.parallel.runs_of_rows import run_of
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, tiny_corpus, tiny_run
from tests.zero.one_rank import LEARNING_RATE, one_rank

ROWS = rows_of(CONTEXT)


def name_of(row: Row) -> str:
    return "-".join(map(str, (*row["layout"], *list(row.values())[1:])))


def test_every_possible_pair_of_settings_is_covered() -> None:
    assert possible_pairs(CONTEXT) == set().union(*map(pairs_of, ROWS))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_shared_sequences_equal_one_process(
    row: Row, pool: RankPool, references: References, documents: Path
) -> None:
    comparison = train_and_compare(pool, references, run_of(row, documents), FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest


# --- numbers of targets, compiled blocks ----------------------------------------------------------


def uncounted(batch: MicroBatch, part: SequencePart) -> MicroBatch:
    """Do not count the first 11 of 16 targets of each row: a rank may have none that count."""
    sequence = batch.targets.shape[1] * part.size
    places = places_in(part.ranges(sequence))
    targets = batch.targets.masked_fill(places < 11, NOT_COUNTED)
    return replace(batch, targets=targets)


def losses_and_norms(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> list[tuple[float, float]]:
    with one_rank(launch, run, corpus) as rank:
        part = context_axis(run, rank.context).tokens

        def load(step: int, micro_batch: int) -> MicroBatch:
            samples = step * run.batch.train_batch_size
            return uncounted(rank.loader.micro_batch(samples, micro_batch), part)

        steps = [rank.worker.train_step(partial(load, n), LEARNING_RATE) for n in range(3)]
        # Without a step, so that only the weights matter.
        loss = rank.worker.evaluate(partial(load, 5), 2, run.tokens_per_step)
        return [*((step.loss, step.grad_norm) for step in steps), (loss, 0.0)]


@pytest.mark.parametrize("method", ["ulysses", "all_gather"])
def test_ranks_may_have_different_numbers_of_targets(
    pool: RankPool, tmp_path: Path, method: str
) -> None:
    values: dict[str, Any] = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    values["zero_optimization"] = {"stage": 2}
    alone = tiny_run(TEXT, **values)
    shared = tiny_run(TEXT, cp=4, parallel={"context_method": method}, **values)
    corpus = tiny_corpus(alone, tmp_path)
    (expected,) = pool.run(1, losses_and_norms, alone, corpus)
    for found in pool.run(4, losses_and_norms, shared, corpus):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def train_traced(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    """Train with blocks that torch traces and divides into forward and backward, as it does before
    it generates code.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        return train_rank(launch, run, corpus, steps)


@pytest.mark.parametrize(
    ("method", "tp", "recomputation", "documents"),
    [
        ("ulysses", 1, "full_offloaded", False),
        ("all_gather", 2, "selective", True),
    ],
)
def test_compiled_blocks_share_sequences(
    pool: RankPool,
    references: References,
    method: str,
    tp: int,
    recomputation: str,
    documents: bool,
) -> None:
    run = tiny_run(
        TEXT,
        cp=2,
        tp=tp,
        train_batch_size=8,
        gradient_accumulation_steps=2,
        model={**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 2},
        data={"reset_at_documents": documents},
        parallel={"context_method": method, "activation_checkpointing": recomputation},
        training={"compile": True},
    )
    comparison = train_and_compare(pool, references, run, FEW_STEPS, train_traced)
    assert comparison.equal, comparison.largest


FEATURES: dict[str, Any] = {
    **LLAMA,
    "num_attention_heads": 8,
    "qk_norm": "all_heads",
    "norm_position": "after",
    "parallel_residual": True,
    "mlp": "exact_gelu",
    "partial_rotary_factor": 0.5,
    "no_rope_layer_interval": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}
"""What Olmo 2, GPT-NeoX, SmolLM3 and Granite have, together."""


@pytest.mark.parametrize(
    ("degrees", "parallel", "zero", "changes"),
    [
        (
            {"cp": 2, "tp": 2},
            {"context_method": "ulysses", "activation_checkpointing": "selective"},
            1,
            {"data": {"reset_at_documents": True}, "training": {"compile": True}},
        ),
        (
            {"dp": 2, "cp": 4},
            {"context_method": "ulysses", "activation_checkpointing": "full"},
            3,
            {"model": {"attention_dropout": 0.1, "residual_dropout": 0.1}},
        ),
        (
            {"pp": 2, "cp": 2, "tp": 2},
            {"context_method": "all_gather", "sequence_parallel": True},
            2,
            {"data": {"reset_at_documents": True}},
        ),
        # Four tensor ranks have two key/value heads.
        ({"tp": 4}, {"sequence_parallel": True, "activation_checkpointing": "selective"}, 1, {}),
        ({"dp": 2, "tp": 4}, {"activation_checkpointing": "selective"}, 2, {}),
    ],
)
def test_features_of_families_together(
    pool: RankPool,
    references: References,
    documents: Path,
    degrees: dict[str, Any],
    parallel: dict[str, Any],
    zero: int,
    changes: dict[str, Any],
) -> None:
    run = tiny_run(
        documents,
        **degrees,
        train_batch_size=8,
        gradient_accumulation_steps=2,
        parallel=parallel,
        zero_optimization={"stage": zero},
        **{**changes, "model": {**FEATURES, **changes.get("model", {})}},
    )
    train = train_traced if "training" in changes else train_rank
    comparison = train_and_compare(pool, references, run, FEW_STEPS, train)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest


# --- what a rank sends and holds ------------------------------------------------------------------


def measured_steps(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> RankMeasurement:
    with one_rank(launch, run, corpus) as rank:

        def load(step: int, index: int) -> MicroBatch:
            batch = rank.loader.micro_batch(step * run.batch.train_batch_size, index)
            if step > 0 or run.grid.pp > 1:  # messages have one shape
                return batch
            return replace(batch, tokens=batch.tokens[:, :64], targets=batch.targets[:, :64])

        return rank.measured_steps(load)


def measured(pool: RankPool, folder: Path, **changes: Any) -> tuple[Run, list[RankMeasurement]]:
    run = tiny_run(TEXT, **changes)
    return run, pool.run(run.grid.world_size, measured_steps, run, tiny_corpus(run, folder))


ON_ALL_AXES = {"pp": 2, "cp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("method", "degrees", "split", "recomputation"),
    [
        *(
            (method, {"cp": 4}, False, recomputation)
            for method in ("ulysses", "all_gather")
            for recomputation in ("none", "selective", "full", "full_offloaded")
        ),
        ("ulysses", ON_ALL_AXES, True, "none"),
        ("ulysses", ON_ALL_AXES, True, "full_offloaded"),
        ("all_gather", ON_ALL_AXES, False, "full"),
    ],
)
def test_traffic_and_memory_are_the_predicted_ones(
    pool: RankPool,
    tmp_path: Path,
    method: str,
    degrees: dict[str, int],
    split: bool,
    recomputation: str,
) -> None:
    length, layers, width, heads, shared = 256, 4, 64, 8, 2
    run, ranks = measured(
        pool,
        tmp_path,
        **degrees,
        train_batch_size=4,
        gradient_accumulation_steps=2,
        model={
            **LLAMA,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": shared,
            "max_position_embeddings": length,
            "qk_norm": {"full": True, "selective": "all_heads"}.get(recomputation, False),
        },
        data={"sequence_length": length},
        parallel={
            "context_method": method,
            "sequence_parallel": split,
            "activation_checkpointing": recomputation,
        },
        zero_optimization={"stage": 3},
    )
    grid = run.grid
    # Of a layer and micro-batch, in fp32: T own tokens, q and kv features, as they are copied.
    own, pair = 2 * length // grid.cp, 2 * width // heads
    q, kv = width // grid.tp, shared // grid.tp * pair
    if method == "ulysses":
        copied = max(shared // grid.tp, grid.cp) * pair
        passes = 3 if recomputation.startswith("full") else 2
        sent = passes * (grid.cp - 1) * own * (2 * q + copied) // grid.cp
    else:
        sent = 3 * (grid.cp - 1) * own * kv
    for number, rank in enumerate(ranks):
        stage = grid.coordinates_of(number).pp
        assert rank.traffic == predict_traffic(run, stage, "cpu")
        assert axis_totals(rank.traffic)["cp"] == 2 * layers // grid.pp * sent * 4
        predicted = StageMemory(run, stage, device_type="cpu").peak
        assert predicted.total == pytest.approx(rank.peak.total, rel=0.05)
        assert predicted.activations == pytest.approx(rank.peak.activations, rel=0.1)


@pytest.mark.parametrize("method", ["ulysses", "all_gather"])
def test_activations_are_divided(pool: RankPool, tmp_path: Path, method: str) -> None:
    values: dict[str, Any] = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "model": {
            **LLAMA,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 224,
            "max_position_embeddings": 1024,
        },
        "data": {"sequence_length": 1024},
    }
    _, (alone,) = measured(pool, tmp_path, **values)
    for cp in (2, 4):
        parallel = {"context_method": method}
        _, ranks = measured(pool, tmp_path, cp=cp, parallel=parallel, **values)
        for rank in ranks:
            divided = alone.peak.activations / cp
            assert rank.peak.activations == pytest.approx(divided, rel=0.1)


def test_a_sequence_of_8k_tokens_needs_less_than_0_4_of_the_memory(
    pool: RankPool, tmp_path: Path
) -> None:
    length, text = 8192, tmp_path / "text.txt"
    text.write_text(4 * TEXT.read_text())
    values: dict[str, Any] = {
        "train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "model": {
            **LLAMA,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "max_position_embeddings": length,
        },
        "data": {"sequence_length": length, "train": [str(text)]},
        "zero_optimization": {"stage": 3},
    }
    _, (alone,) = measured(pool, tmp_path, **values)
    run, ranks = measured(pool, tmp_path, cp=4, **values)
    for rank in ranks:
        predicted = StageMemory(run, 0, device_type="cpu").peak.total
        assert predicted == pytest.approx(rank.peak.total, rel=0.05)
        assert rank.peak.total < 0.4 * alone.peak.total
