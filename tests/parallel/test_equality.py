"""Any layout trains the same model as one process of plain torch (docs/architecture.md).

The reference has no engine, no pipeline and no sharding. The test trains ten AdamW steps (every
layout once) or four, with clipping active, in fp32. The loss must agree within 1e-6, the gradient
norm within 1e-5, and every parameter's gradient of step 1 within 1e-5 of its norm. The initial
weights must be bitwise equal.
"""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.comparison import TOLERANCES, Tolerance
from megaspeed.measurement.verification.verify import ParallelRun, train_rank
from megaspeed.tensor_parallel import shards
from megaspeed.topology.launch import LaunchEnvironment
from tests.parallel.covering import (
    LAYOUTS,
    Row,
    axes_in_use,
    covering_rows,
    pairs_of,
    possible_pairs,
)
from tests.parallel.references import (
    FEW_STEPS,
    TEXT,
    References,
    train_and_compare,
    train_rank_in_fp16,
)
from tests.parallel.runs_of_rows import run_of
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA
from tests.zero.one_rank import small_run

STEPS = 10
ROWS = covering_rows()


def is_first_at_its_layout(row: Row) -> bool:
    return next(other for other in ROWS if other["layout"] == row["layout"]) is row


def test_the_fp32_tolerances_are_the_promised_ones() -> None:
    assert TOLERANCES["fp32"] == Tolerance(loss=1e-6, grad_norm=1e-5, gradient=1e-5)


def test_every_possible_pair_of_settings_is_covered() -> None:
    assert possible_pairs() - set().union(*(pairs_of(row) for row in ROWS)) == set()
    assert len({row["layout"] for row in ROWS}) == len(LAYOUTS) == 17
    assert sum(map(is_first_at_its_layout, ROWS)) == 17
    assert len({(axes_in_use(row["layout"]), row["zero_stage"]) for row in ROWS}) == 8 * 4


def name_of(row: Row) -> str:
    (pp, dp, tp), rest = row["layout"], list(row.items())[2:]
    values = [str(value) for _, value in rest]
    return f"pp{pp}-dp{dp}-tp{tp}-zero{row['zero_stage']}-{'-'.join(values)}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_layout_equals_one_process(
    row: Row, pool: RankPool, references: References, documents: Path
) -> None:
    run = run_of(row, documents)
    assert run.config.model.vocab_size % 2 == 1, "an odd vocabulary, so that it is padded"
    assert run.grid.pp == 1 or run.config.model.num_hidden_layers % 2, "stages of unequal length"
    assert run.batch.micro_batch_size > 1
    steps = STEPS if is_first_at_its_layout(row) else FEW_STEPS
    comparison = train_and_compare(pool, references, run, steps)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest
    assert all(norm.reference > run.config.gradient_clipping for norm in comparison.grad_norms), (
        "clipping must be active"
    )


FAMILIES = {
    "mistral": {"architecture": "mistral", "sliding_window": 6},
    "qwen2": {"architecture": "qwen2", "num_key_value_heads": 1},
    "qwen3": {"architecture": "qwen3", "head_dim": 12},
    "starcoder2": {"architecture": "starcoder2", "num_key_value_heads": 1},
    "olmo2": {"architecture": "olmo2", "num_key_value_heads": 1},
    "gpt_neox": {"architecture": "gpt_neox", "partial_rotary_factor": 0.5},
    "granite, one block without rotation": {
        "architecture": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
        "no_rope_layer_interval": 2,
    },
    "stablelm": {"architecture": "stablelm", "partial_rotary_factor": 0.5, "qkv_bias": True},
    "gpt2 of other features": {"architecture": "gpt2", "qk_norm": True, "mlp_bias": False},
}
FAMILY_LAYOUTS: dict[tuple[int, int, int], dict[str, Any]] = {
    (1, 1, 1): {"data": {"reset_at_documents": True}},
    (2, 2, 1): {"zero_optimization": {"stage": 3}, "parallel": {"schedule": "1f1b"}},
    (1, 2, 2): {
        "zero_optimization": {"stage": 1},
        "parallel": {"sequence_parallel": True, "activation_checkpointing": "selective"},
        "data": {"reset_at_documents": True},
    },
    (2, 2, 2): {
        "zero_optimization": {"stage": 2},
        "parallel": {"activation_checkpointing": "full", "recomputed_blocks": 1},
    },
}


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_is_one_process_at_every_layout(
    family: dict[str, Any],
    layout: tuple[int, int, int],
    pool: RankPool,
    references: References,
    documents: Path,
) -> None:
    pp, dp, tp = layout
    model = {**LLAMA, "num_hidden_layers": 3, **family}
    run = small_run(documents, pp=pp, dp=dp, tp=tp, model=model, **FAMILY_LAYOUTS[layout])
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest


@pytest.mark.parametrize(
    ("pp", "dp", "zero_stage", "extra"), [(4, 1, 1, 3), (3, 2, 3, 2), (3, 2, 2, 1)]
)
def test_more_micro_batches_in_flight_change_nothing(
    pp: int, dp: int, zero_stage: int, extra: int, pool: RankPool, references: References
) -> None:
    run = small_run(
        TEXT,
        pp=pp,
        dp=dp,
        model={**LLAMA, "num_hidden_layers": 5},
        gradient_accumulation_steps=8,
        train_batch_size=8 * dp,
        parallel={"extra_in_flight": extra},
        zero_optimization={"stage": zero_stage},
    )
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest


@pytest.mark.parametrize(
    ("zero_stage", "gradient_reduction"),
    [
        (0, "per_step"),
        (1, "per_micro_batch"),
        (2, "per_step"),
        (3, "per_step"),
        (3, "per_micro_batch"),
    ],
)
def test_bf16_stays_within_its_bound(
    zero_stage: int, gradient_reduction: str, pool: RankPool, references: References
) -> None:
    run = small_run(
        TEXT,
        pp=2,
        dp=2,
        tp=2 if gradient_reduction == "per_step" else 1,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        parallel={"gradient_reduction": gradient_reduction},
        zero_optimization={"stage": zero_stage},
    )
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.equal, comparison.largest


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_fp16_with_a_constant_loss_scale_stays_within_its_bound(
    zero_stage: int, pool: RankPool, references: References
) -> None:
    fp16 = {"enabled": True, "loss_scale": 1024}
    zero = {"stage": zero_stage}
    layout = {"pp": 2, "dp": 2, "tp": 2}
    run = small_run(TEXT, **layout, device_type="cuda", fp16=fp16, zero_optimization=zero)
    comparison = train_and_compare(pool, references, run, FEW_STEPS, train_rank_in_fp16)
    assert comparison.equal, comparison.largest


def train_rank_in_chunks(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    """Train with the logits of only a few tokens in memory at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_LOGITS_OF_A_CHUNK", 1000)
        return train_rank(launch, run, corpus, steps)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_logits_in_chunks_change_nothing(
    layout: tuple[int, int, int], pool: RankPool, references: References
) -> None:
    pp, dp, tp = layout
    run = small_run(
        TEXT,
        pp=pp,
        dp=dp,
        tp=tp,
        parallel={
            "schedule": "gpipe",
            "sequence_parallel": tp > 1,
            "gradient_reduction": "per_micro_batch" if dp > 1 else "per_step",
        },
        zero_optimization={"stage": 0 if dp == 1 else 2 + (tp > 1)},
    )
    columns = shards.vocabulary_rows_per_rank(run.config.model.vocab_size, tp)
    tokens = run.batch.micro_batch_size * run.config.data.sequence_length
    assert tokens * columns > 3 * 1000, "more than three chunks"
    comparison = train_and_compare(pool, references, run, FEW_STEPS, train_rank_in_chunks)
    assert comparison.equal, comparison.largest


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_messages_of_the_default_sizes_hold_the_complete_model(
    zero_stage: int, layout: tuple[int, int, int], pool: RankPool, references: References
) -> None:
    """All matrices are in one bucket, all blocks in one gather. Other tests use small messages."""
    pp, dp, tp = layout
    defaults = {"reduce_bucket_size": None, "stage3_prefetch_bucket_size": None}
    run = small_run(
        TEXT,
        pp=pp,
        dp=dp,
        tp=tp,
        model={"tie_word_embeddings": False},
        parallel={"schedule": "gpipe", "gradient_reduction": "per_micro_batch"},
        zero_optimization={"stage": zero_stage, **defaults},
    )
    assert run.config.zero_optimization.reduce_bucket_size == 8 << 20
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.equal, comparison.largest


OPTIONS = [
    {"reduce_scatter": False},
    {"contiguous_gradients": False},
    {"use_multi_rank_bucket_allreduce": True},
    {"overlap_comm": True},
    {"reduce_bucket_size": 3000},
    {"offload_optimizer": {"device": "cpu"}},
]
STAGE_3_OPTIONS = [
    {"sub_group_size": 3000},
    {"stage3_param_persistence_threshold": 1000},
    {"stage3_prefetch_bucket_size": 0},
    {"stage3_max_live_parameters": 20_000},
    {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: "-".join(option))
def test_zero_option_changes_nothing(
    option: dict[str, object], pool: RankPool, references: References
) -> None:
    """DeepSpeed has one optimizer for stages 1 and 2, so each option is tested at one of them."""
    zero_stage = 1 + OPTIONS.index(option) % 2
    run = small_run(TEXT, pp=2, dp=2, zero_optimization={"stage": zero_stage, **option})
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.equal, comparison.largest


@pytest.mark.parametrize("dp", [1, 2])
def test_a_group_larger_than_a_sub_group_changes_nothing(
    dp: int, pool: RankPool, references: References
) -> None:
    """DeepSpeed splits it also if nothing is reduced, or if its gradients stay together."""
    run = small_run(TEXT, dp=dp, zero_optimization={"stage": 3, "sub_group_size": 3000})
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.equal, comparison.largest


@pytest.mark.parametrize(
    "option", [*OPTIONS, *STAGE_3_OPTIONS], ids=lambda option: "-".join(option)
)
def test_zero_3_option_changes_nothing(
    option: dict[str, object], pool: RankPool, references: References
) -> None:
    run = small_run(TEXT, pp=2, dp=2, zero_optimization={"stage": 3, **option})
    comparison = train_and_compare(pool, references, run, FEW_STEPS)
    assert comparison.equal, comparison.largest
