"""Predicted traffic equals what ranks really send in a step, to the byte."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.parameters import elements_of, local_parameters
from megaspeed.measurement.watched_step import TrafficLog
from megaspeed.model.experts import Received, Routing
from megaspeed.model.parameters import HEAD_WEIGHT, parameters_of
from megaspeed.pipeline.partition import chunks_of_stages, layers_of_stages
from megaspeed.planning.costs.traffic import Traffic, predict_traffic
from megaspeed.tensor_parallel.experts import AllToAll
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16, BF16_IN_FP32, LLAMA, MOE, MUON, merge, tiny_corpus
from tests.zero.one_rank import OFFLOAD, one_rank, small_run

TEXT = Path(__file__).parents[3] / "LICENSE"

FP32_BYTES = 4
Layout = tuple[int, int, int]

UNTIED = {"tie_word_embeddings": False}
SHARED_HEADS = {"num_key_value_heads": 1}


def sent_in_second_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[int, Traffic]:
    """Return (this rank's pipeline stage, the bytes that it sends)."""
    with one_rank(launch, run, corpus) as rank:
        rank.train_step(0)
        with TrafficLog(rank.context) as log:
            rank.train_step(1)
        return rank.context.pp_rank, log.traffic


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run_at(layout: Layout, changes: Mapping[str, Any]) -> Run:
    pp, dp, tp = layout
    return small_run(TEXT, pp=pp, dp=dp, tp=tp, **changes)


def most_sent(pool: RankPool, cache: Path, run: Run) -> list[dict[Any, int]]:
    """For each pipeline stage, return the most bytes of any rank by axis and collective."""
    stages: list[dict[Any, int]] = [{} for _ in range(run.grid.pp)]
    corpus = tiny_corpus(run, cache)
    for stage, traffic in pool.run(run.grid.world_size, sent_in_second_step, run, corpus):
        for key, sent in traffic.items():
            stages[stage][key] = max(sent, stages[stage].get(key, 0))
    return stages


def assert_predicted(pool: RankPool, cache: Path, run: Run) -> None:
    sent = most_sent(pool, cache, run)
    assert sent == [predict_traffic(run, stage, "cpu") for stage in range(run.grid.pp)]


# --- data axis ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_reduction", ["per_step", "per_micro_batch"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_zero_stage_and_reduction(
    pool: RankPool, cache: Path, zero_stage: int, gradient_reduction: str
) -> None:
    run = run_at(
        (2, 2, 1),
        {
            "zero_optimization": {"stage": zero_stage},
            "parallel": {"gradient_reduction": gradient_reduction},
            "model": {} if gradient_reduction == "per_step" else UNTIED,
        },
    )
    assert_predicted(pool, cache, run)


DATA_AXIS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "three data ranks, which divide nothing": (
        (2, 3, 1),
        {"zero_optimization": {"stage": 2}},
    ),
    "bf16 gradients added up in fp32": (
        (2, 2, 1),
        {"zero_optimization": {"stage": 1}, **BF16_IN_FP32},
    ),
    "fp32 gradients that travel in bf16": (
        (1, 2, 1),
        {"zero_optimization": {"stage": 2}, "communication_data_type": "bf16"},
    ),
    "three uneven pipeline stages, llama": (
        (3, 2, 1),
        {"zero_optimization": {"stage": 1}, "model": {**LLAMA, "num_hidden_layers": 4}},
    ),
    "bf16 gradients, which are fp32 once they are offloaded": (
        (2, 2, 1),
        {"zero_optimization": {"stage": 2, **OFFLOAD}, **BF16},
    ),
    "each bucket all-reduced": (
        (1, 2, 1),
        {"zero_optimization": {"stage": 1, "use_multi_rank_bucket_allreduce": True}},
    ),
    "no reduce-scatter": (
        (1, 2, 1),
        {"zero_optimization": {"stage": 2, "reduce_scatter": False, "reduce_bucket_size": 3000}},
    ),
}

# With an auxiliary loss, ranks that share sequences sum the counts of tokens. A recomputed block
# does not sum them again.
BALANCED = {**MOE, "router_aux_loss_coef": 0.01, "router_bias_rate": 0.001}
for _method in ("ulysses", "all_gather"):
    DATA_AXIS[f"experts, {_method}"] = (
        (2, 2, 1),
        {
            "cp": 2,
            "model": BALANCED,
            "parallel": {"context_method": _method, "activation_checkpointing": "full"},
            "zero_optimization": {"stage": 3},
        },
    )
DATA_AXIS["experts without an auxiliary loss"] = ((1, 1, 1), {"cp": 2, "model": MOE})


@pytest.mark.parametrize(("layout", "changes"), DATA_AXIS.values(), ids=DATA_AXIS)
def test_data_axis(pool: RankPool, cache: Path, layout: Layout, changes: dict[str, Any]) -> None:
    assert_predicted(pool, cache, run_at(layout, changes))


ORTHOGONALIZED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "replicas share matrices": ((1, 3, 1), {}),
    "replicas and tensor ranks": ((1, 2, 2), {"model": LLAMA}),
    "shards": ((2, 2, 1), {"zero_optimization": {"stage": 2}, **BF16}),
    "shards and tensor ranks": ((1, 2, 2), {"zero_optimization": {"stage": 3}, "model": LLAMA}),
    "a pipeline": ((2, 2, 2), {"zero_optimization": {"stage": 1}}),
    "shards and replicas": (
        (1, 4, 1),
        {"zero_optimization": {"stage": 3}, "parallel": {"replicate": 2}},
    ),
    "shared heads": ((1, 1, 4), {"model": {**LLAMA, **SHARED_HEADS}}),
    "experts": ((2, 2, 1), {"zero_optimization": {"stage": 2}, "model": MOE}),
}


@pytest.mark.parametrize(("layout", "changes"), ORTHOGONALIZED.values(), ids=ORTHOGONALIZED)
def test_muon(pool: RankPool, cache: Path, layout: Layout, changes: dict[str, Any]) -> None:
    """Ranks own unequal matrices. The prediction is for the rank that sends most."""
    assert_predicted(pool, cache, run_at(layout, {**changes, "optimizer": MUON}))


# --- expert axis ----------------------------------------------------------------------------------

Rows = list[tuple[int, int]]


def sent_with_experts(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[int, Rows, Traffic]:
    """Return (pipeline stage, rows sent to and received from other ranks for each block, bytes)."""
    begin, rows = AllToAll.begin, Rows()

    def counting(exchange: AllToAll, routing: Routing) -> Callable[[], Received]:
        finish, rank = begin(exchange, routing), exchange._axis.rank

        def counted() -> Received:
            received = finish()
            counts = received.sent_rows, received.received_rows
            sent, arrived = (sum(count) - count[rank] for count in counts)
            rows.append((sent, arrived))
            return received

        return counted

    with one_rank(launch, run, corpus) as rank, pytest.MonkeyPatch.context() as patch:
        rank.train_step(0)
        patch.setattr(AllToAll, "begin", counting)
        with TrafficLog(rank.context) as log:
            rank.train_step(1)
        count = run.config.model.num_hidden_layers // run.grid.pp
        of_blocks = [
            (sum(s for s, _ in own), sum(r for _, r in own))
            for own in (rows[index::count] for index in range(count))
        ]
        return rank.context.pp_rank, of_blocks, log.traffic


FULL = {"activation_checkpointing": "full"}
EXCHANGED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "all_to_all, two of three blocks recomputed, ZeRO-3": (
        (1, 4, 1),
        {
            "parallel": {"expert": 2, **FULL, "recomputed_blocks": 2},
            "model": BALANCED,
            "zero_optimization": {"stage": 3},
        },
    ),
    "all_to_all, replicas, bf16": (
        (1, 4, 1),
        {"parallel": {"expert": 2, "replicate": 2}, "zero_optimization": {"stage": 2}, **BF16},
    ),
    "all_to_all, a pipeline, the tensor ranks share experts": (
        (2, 2, 2),
        {"parallel": {"expert": 2}, "zero_optimization": {"stage": 1}, "model": BALANCED},
    ),
    "all_gather, tensor ranks, recomputed": (
        (1, 2, 2),
        {"parallel": {"expert": 4, **FULL}, "model": BALANCED, "zero_optimization": {"stage": 2}},
    ),
    "all_gather, norms after, recomputed": (
        (1, 2, 1),
        {"parallel": {"expert": 2, **FULL}, "model": {"norm_position": "after"}},
    ),
    "all_gather, context ranks": (
        (1, 2, 1),
        {"cp": 2, "parallel": {"expert": 2}, "model": BALANCED, "zero_optimization": {"stage": 3}},
    ),
    "copies of all experts on tensor ranks": (
        (1, 2, 2),
        {"zero_optimization": {"stage": 2}, "model": BALANCED},
    ),
    "Muon, all_to_all": (
        (1, 4, 1),
        {"parallel": {"expert": 2}, "optimizer": MUON, "zero_optimization": {"stage": 1}},
    ),
    "Muon, tensor ranks": ((1, 2, 2), {"parallel": {"expert": 2}, "optimizer": MUON}),
}


@pytest.mark.parametrize(("layout", "changes"), EXCHANGED.values(), ids=EXCHANGED)
def test_experts(
    pool: RankPool,
    cache: Path,
    request: pytest.FixtureRequest,
    layout: Layout,
    changes: dict[str, Any],
) -> None:
    """With all_to_all, the prediction is for the rows that the ranks exchanged."""
    name, parallel = request.node.callspec.id, changes.get("parallel", {})
    exchange = "all_to_all" if "all_to_all" in name else "all_gather"
    if "expert" in parallel:
        changes = {**changes, "parallel": {**parallel, "expert_exchange": exchange}}
    run = run_at(layout, {**changes, "model": {**MOE, **changes.get("model", {})}})
    has_rows = run.expert_exchange == "all_to_all"
    others: list[dict[Any, int]] = [{} for _ in range(run.grid.pp)]
    for stage, rows, traffic in pool.run(
        run.grid.world_size, sent_with_experts, run, tiny_corpus(run, cache)
    ):
        assert any(sent != received for sent, received in rows) == has_rows
        predicted = predict_traffic(run, stage, "cpu", rows if has_rows else None)
        assert of_experts(predicted) == of_experts(traffic)
        for key, sent in traffic.items() - of_experts(traffic).items():
            others[stage][key] = max(sent, others[stage].get(key, 0))
    for stage, sent_by_busiest in enumerate(others):
        predicted = predict_traffic(run, stage, "cpu")
        assert sent_by_busiest == dict(predicted.items() - of_experts(predicted).items())


def of_experts(traffic: Traffic) -> Traffic:
    return {key: sent for key, sent in traffic.items() if key[0] == "ep"}


def test_balanced_loads_send_equally_many_rows_worked_by_hand() -> None:
    """Three blocks and 2 micro-batches of 96 tokens, each with 2 experts: 192 rows, of which 96 go
    to the other rank. In fp32, a row has 32 features and 4 columns with its weight. The numbers of
    rows for the other rank's 4 experts are int64.
    """
    parallel = {"expert": 2, "expert_exchange": "all_to_all"}
    sent = predict_traffic(run_at((1, 2, 1), {"model": MOE, "parallel": parallel}), 0)
    counts = 6 * 4 * 8
    assert sent["ep", "all_to_all"] == 6 * 96 * 2 * (32 + 4 + 32) * FP32_BYTES + counts


@pytest.mark.parametrize(("all_reduces", "times"), [(False, 2), (True, 3)])
def test_zero1_with_a_pipeline_moves_its_parameters_twice(
    pool: RankPool, cache: Path, all_reduces: bool, times: int
) -> None:
    """It is twice by Rajbhandari et al. 2020, section 7.2.1, and three times by DeepSpeed's
    default.
    """
    dp = 4
    zero = {"stage": 1}
    if all_reduces:
        zero["use_multi_rank_bucket_allreduce"] = True
    run = run_at((2, dp, 1), {"zero_optimization": zero, "train_batch_size": 16})
    for stage, sent in enumerate(most_sent(pool, cache, run)):
        parameters = local_parameters(run, stage)
        whole = elements_of(parameters) * FP32_BYTES
        flat = sum(bucket.elements for bucket in data_axis_of(run, stage, "cpu").buckets)
        padding = flat * FP32_BYTES - whole
        moved = sum(size for (axis, _), size in sent.items() if axis == "dp")
        assert moved == times * (dp - 1) * whole // dp + (dp - 1) * padding // dp
        assert padding < 0.01 * whole


INT8: dict[str, Any] = {"type": "int8", "block": 64}
POWER_SGD: dict[str, Any] = {"type": "powersgd", "rank": 3, "start_step": 1}
COMPRESSED: dict[str, tuple[Layout, Any, dict[str, Any]]] = {
    **{
        f"{how['type']}, ZeRO-{stage}": ((1, 3, 1), how, {"zero_optimization": {"stage": stage}})
        for how in (INT8, POWER_SGD)
        for stage in range(4)
    },
    "bf16": ((1, 2, 1), "bf16", {"zero_optimization": {"stage": 2}}),
    "int8, all axes": ((2, 2, 2), INT8, {"zero_optimization": {"stage": 1}}),
    "PowerSGD, all axes, ZeRO-3": (
        (2, 2, 2),
        POWER_SGD,
        {"zero_optimization": {"stage": 3}, "parallel": {"sequence_parallel": True}},
    ),
    "PowerSGD of rank 15 sends half of the matrices as they are": (
        (1, 2, 2),
        {**POWER_SGD, "rank": 15},
        {"zero_optimization": {"stage": 1}},
    ),
    "small buckets": (
        (1, 2, 1),
        INT8,
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 3000}},
    ),
    "small messages": (
        (1, 2, 1),
        INT8,
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 3000}},
    ),
    "offloaded": (
        (1, 2, 1),
        INT8,
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
            **BF16_IN_FP32,
        },
    ),
}


@pytest.mark.parametrize(("layout", "how", "changes"), COMPRESSED.values(), ids=COMPRESSED)
def test_compressed_gradients(
    pool: RankPool, cache: Path, layout: Layout, how: Any, changes: dict[str, Any]
) -> None:
    changes = merge(changes, {"parallel": {"gradient_compression": how}})
    assert_predicted(pool, cache, run_at(layout, changes))


GPT2_SMALL = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
}


def gradients_sent(stage: int, how: Any) -> int:
    """Return the bytes that a rank of GPT-2 with 8 data ranks sends for its gradients."""
    run = run_at(
        (1, 8, 1),
        {
            "model": GPT2_SMALL,
            "train_batch_size": 16,
            "zero_optimization": {"stage": stage},
            "parallel": {"gradient_compression": how, "gradient_reduction": "per_step"},
        },
    )
    of_parameters = ("all_gather",) if stage else ()
    sent = predict_traffic(run, 0).items()
    return sum(size for (axis, kind), size in sent if axis == "dp" and kind not in of_parameters)


@pytest.mark.parametrize("stage", range(4))
def test_int8_sends_at_most_27_percent_of_fp32(stage: int) -> None:
    share = gradients_sent(stage, {"type": "int8"}) / gradients_sent(stage, "none")
    assert 0.25 < share < 0.27


@pytest.mark.parametrize("stage", range(4))
def test_powersgd_sends_two_thin_matrices(stage: int) -> None:
    """GPT-2 has embeddings of 50,257 and 1,024 rows, and 4 matrices in each of 12 blocks."""
    width, rank = 768, 4
    thin = (50257 + width) + (1024 + width) + 12 * (4 + 2 + 5 + 5) * width
    vectors = 12 * (2 * 2 + 3 + 1 + 4 + 1) * width + 2 * width
    rounds = 2 if stage == 0 else 1
    expected = FP32_BYTES * 7 * (2 * rank * thin + rounds * vectors) / 8
    sent = gradients_sent(stage, {"type": "powersgd", "rank": rank})
    assert sent == pytest.approx(expected, rel=1e-4)


# --- ZeRO-3's parameters --------------------------------------------------------------------------


NOTHING_AHEAD = {"stage3_prefetch_bucket_size": 0}


def test_zero3_gathers_twice_a_micro_batch(pool: RankPool, cache: Path) -> None:
    """Gathers move 2 x the parameters, gradients 1 x (Rajbhandari et al. 2020, section 7.2.2).

    Here this is for each micro-batch. A backward gathers neither the embedding nor the weight of
    the head, and the gradients of norms and biases are reduced once a step.
    """
    run = run_at((1, 2, 1), {"zero_optimization": {"stage": 3, **NOTHING_AHEAD}, "model": UNTIED})
    micro_batches = run.batch.gradient_accumulation_steps
    for stage, sent in enumerate(most_sent(pool, cache, run)):
        parameters = local_parameters(run, stage)
        # Every parameter has an even number of elements.
        half = elements_of(parameters) * FP32_BYTES // 2
        unused = ("embedding.", HEAD_WEIGHT)
        saved = elements_of(p for p in parameters if p.name.startswith(unused)) * FP32_BYTES // 2
        assert sent["dp", "all_gather"] == micro_batches * (2 * half - saved)
        vectors = elements_of(p for p in parameters if len(p.shape) == 1) * FP32_BYTES // 2
        assert sent["dp", "all_to_all"] == micro_batches * (half - vectors) + vectors


KEPT = {"stage": 3, "stage3_param_persistence_threshold": 320}
RECOMPUTED = {"parallel": {"activation_checkpointing": "full"}}
ZERO_3: dict[str, tuple[Layout, dict[str, Any]]] = {
    "small ones kept, one stage": ((1, 2, 1), {"zero_optimization": KEPT}),
    "gpipe": ((2, 2, 1), {"zero_optimization": KEPT, "parallel": {"schedule": "gpipe"}}),
    "1f1b, three uneven stages": (
        (3, 2, 1),
        {
            "zero_optimization": KEPT,
            "model": {"num_hidden_layers": 4},
            "gradient_accumulation_steps": 4,
        },
    ),
    "blocks together, 1f1b": (
        (2, 2, 1),
        {
            "zero_optimization": {**KEPT, "stage3_prefetch_bucket_size": 30_000},
            "model": {"num_hidden_layers": 8},
            "gradient_accumulation_steps": 4,
        },
    ),
    "all blocks together": (
        (1, 2, 1),
        {"zero_optimization": {**KEPT, "stage3_prefetch_bucket_size": 10**6}},
    ),
    "nothing ahead": ((2, 2, 1), {"zero_optimization": {"stage": 3, **NOTHING_AHEAD}}),
    "recomputation": ((1, 2, 1), {"zero_optimization": KEPT, **RECOMPUTED}),
    "recomputation, dropout, gpipe": (
        (2, 2, 1),
        {
            "zero_optimization": {"stage": 3},
            "parallel": {**RECOMPUTED["parallel"], "schedule": "gpipe"},
            "model": {"residual_dropout": 0.1, "attention_dropout": 0.1},
        },
    ),
    "three data ranks, llama, bf16": (
        (1, 3, 1),
        {"zero_optimization": KEPT, "model": LLAMA, **BF16_IN_FP32},
    ),
    "per step, two tensor ranks, sequence parallel": (
        (1, 2, 2),
        {
            "zero_optimization": {"stage": 3},
            "parallel": {"gradient_reduction": "per_step", "sequence_parallel": True},
        },
    ),
    "no reduce-scatter, a bound on what stays whole": (
        (1, 2, 1),
        {
            "zero_optimization": {
                **KEPT,
                "stage3_model_persistence_threshold": 1000,
                "reduce_scatter": False,
                "reduce_bucket_size": 5000,
            }
        },
    ),
    "all of it stays whole": (
        (1, 2, 1),
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10**6}},
    ),
    "offloaded": (
        (2, 2, 1),
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "offload_param": {"device": "cpu", "pin_memory": False},
            }
        },
    ),
}


@pytest.mark.parametrize(("layout", "changes"), ZERO_3.values(), ids=ZERO_3)
def test_zero3(pool: RankPool, cache: Path, layout: Layout, changes: dict[str, Any]) -> None:
    assert_predicted(pool, cache, run_at(layout, changes))


# --- chunks of pipeline stages --------------------------------------------------------------------

# (pp, dp, tp), chunks, micro-batches, groups, ZeRO stage, keys of ``parallel``
CHUNKED: list[tuple[Layout, int, int, int, int, dict[str, Any]]] = [
    ((2, 2, 1), 2, 5, 2, 3, {}),
    ((2, 2, 1), 3, 4, 1, 3, {}),
    ((2, 2, 1), 3, 7, 3, 3, {"gradient_reduction": "per_micro_batch"}),
    ((3, 2, 1), 2, 7, 2, 2, {}),
    ((4, 2, 1), 2, 5, 1, 2, {"gradient_reduction": "per_micro_batch"}),
    ((2, 2, 2), 2, 4, 2, 1, {"sequence_parallel": True}),
    ((2, 4, 1), 2, 4, 2, 3, {"replicate": 2}),
    ((2, 2, 1), 2, 5, 2, 3, {"gradient_reduction": "per_step"}),
    ((2, 2, 1), 2, 5, 1, 1, {"gradient_reduction": "per_step"}),
    ((3, 2, 1), 2, 7, 2, 3, {}),
    ((4, 2, 1), 2, 5, 1, 3, {}),
    ((2, 1, 2), 2, 5, 1, 0, {"activation_checkpointing": "full", "recomputed_blocks": 2}),
]


def chunked(
    layout: Layout, chunks: int, micro_batches: int, groups: int, stage: int, parallel: Any
) -> Run:
    return run_at(
        layout,
        {
            "gradient_accumulation_steps": micro_batches,
            "train_batch_size": micro_batches * layout[1],
            # The vocabulary needs no padding.
            "model": {"num_hidden_layers": layout[0] * chunks + 1, "vocab_size": 384, **UNTIED},
            "parallel": {
                "virtual_stages": chunks,
                "micro_batch_groups": groups,
                **parallel,
            },
            "zero_optimization": {"stage": stage},
        },
    )


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_chunks(pool: RankPool, cache: Path, case: Any) -> None:
    assert_predicted(pool, cache, chunked(*case))


@pytest.mark.parametrize(
    ("groups", "gathers"),
    [
        # of each stage, (chunk, whether for a forward): how many times
        (1, [{(0, True): 1, (1, True): 1, (0, False): 1}] * 2),
        (
            2,
            [
                # F0.0 F1.0 F2.0 | F0.1 F1.1 F2.1 B0.1 ... B2.1 F3.1 ... F4.1 | B3.1 B4.1 and so on:
                # chunk 1 is gathered once for the first three of its four visits.
                {(0, True): 2, (1, True): 1, (0, False): 2, (1, False): 1},
                {(0, True): 2, (1, True): 2, (0, False): 1},
            ],
        ),
    ],
)
def test_zero3_gathers_and_reduces_once_a_visit(
    pool: RankPool, cache: Path, groups: int, gathers: list[dict[tuple[int, bool], int]]
) -> None:
    """Two stages with two chunks, and five micro-batches.

    A matrix is reduced once for each group. The vectors of a rank are reduced once a step.
    """
    run = chunked((2, 2, 1), 2, 5, groups, 3, {})
    layers = {
        (stage, chunk): [*parameters_of(run.config.model, own).items()]
        for stage, chunks in enumerate(chunks_of_stages(run))
        for chunk, own in enumerate(chunks)
    }
    no_backward = {"embedding.tokens.weight", "embedding.positions.weight", HEAD_WEIGHT}
    for stage, sent in enumerate(most_sent(pool, cache, run)):
        # Every parameter has an even number of elements.
        gathered = sum(
            times * p.elements
            for (chunk, forward), times in gathers[stage].items()
            for name, p in layers[stage, chunk]
            if forward or name not in no_backward
        )
        reduced = sum(
            p.elements * (groups if len(p.shape) == 2 else 1)
            for chunk in range(2)
            for _, p in layers[stage, chunk]
        )
        assert sent["dp", "all_gather"] == gathered * FP32_BYTES // 2
        assert sent["dp", "all_to_all"] == reduced * FP32_BYTES // 2


# --- tensor and pipeline axes ---------------------------------------------------------------------

SEQUENCE = {"sequence_parallel": True}
QWEN3 = {**LLAMA, "architecture": "qwen3", "head_dim": 12, "attention_output_bias": True}
OLMO2 = {**LLAMA, "architecture": "olmo2"}
RECOMPUTE = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
MODEL_AXES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "gpt2": ((1, 1, 2), {}),
    "llama, sequence parallel": ((1, 1, 2), {"model": LLAMA, "parallel": SEQUENCE}),
    "recomputation": ((1, 1, 2), {"parallel": RECOMPUTE}),
    "recomputation with dropout": (
        (1, 1, 2),
        {"parallel": RECOMPUTE, "model": {"residual_dropout": 0.1}},
    ),
    "sequence parallel, recomputation with dropout": (
        (1, 1, 2),
        {"parallel": {**SEQUENCE, **RECOMPUTE}, "model": {"residual_dropout": 0.1}},
    ),
    "selective recomputation, sequence parallel": (
        (1, 1, 2),
        {"parallel": {**SEQUENCE, **SELECTIVE}, "model": {"attention_dropout": 0.1}},
    ),
    "recomputation of one block of each pipeline stage": (
        (2, 1, 2),
        {"parallel": {**RECOMPUTE, "recomputed_blocks": 1}},
    ),
    "norms of each head": ((1, 1, 2), {"model": QWEN3}),
    "norms of each head, sequence parallel, offloaded": (
        (2, 1, 2),
        {
            "model": QWEN3,
            "parallel": SEQUENCE,
            "zero_optimization": {"stage": 1, **OFFLOAD},
            **BF16,
        },
    ),
    "norms of all heads, recomputed": ((1, 1, 2), {"model": OLMO2, "parallel": RECOMPUTE}),
    "norms of all heads, shared, sequence parallel, bf16": (
        (1, 1, 4),
        {"model": {**OLMO2, **SHARED_HEADS}, "parallel": {**SEQUENCE, **SELECTIVE}, **BF16},
    ),
    "norms after the layers, recomputed, offloaded": (
        (1, 1, 2),
        {
            "model": {**OLMO2, "hidden_size": 16},
            "parallel": {**SEQUENCE, "activation_checkpointing": "full_offloaded"},
        },
    ),
    "parallel blocks": ((1, 1, 2), {"model": {**LLAMA, "parallel_residual": True}}),
    "shared heads": ((1, 1, 4), {"model": {**LLAMA, **SHARED_HEADS}}),
    "shared heads with biases": (
        (1, 1, 4),
        {"model": {**LLAMA, **SHARED_HEADS, "architecture": "qwen2"}},
    ),
    "shared heads, sequence parallel": (
        (1, 1, 4),
        {"model": {**LLAMA, **SHARED_HEADS}, "parallel": SEQUENCE},
    ),
    "with a pipeline, bf16": ((2, 1, 2), {"bf16": {"enabled": True}}),
    "with a pipeline, sequence parallel, gpipe": (
        (3, 1, 2),
        {"parallel": {**SEQUENCE, "schedule": "gpipe"}, "gradient_accumulation_steps": 4},
    ),
    "with everything": (
        (2, 2, 2),
        {
            "parallel": {**SEQUENCE, **RECOMPUTE},
            "zero_optimization": KEPT,
            **BF16_IN_FP32,
        },
    ),
}


@pytest.mark.parametrize(("layout", "changes"), MODEL_AXES.values(), ids=MODEL_AXES)
def test_model_axes(pool: RankPool, cache: Path, layout: Layout, changes: dict[str, Any]) -> None:
    assert_predicted(pool, cache, run_at(layout, changes))


def test_tensor_and_pipeline_traffic_worked_by_hand() -> None:
    """Embedding and two blocks are on one stage, the head on the other. There are 2 micro-batches
    of 12 x 16.
    """
    run = run_at((2, 1, 2), {"model": {**LLAMA, "num_hidden_layers": 2}})
    assert layers_of_stages(run) == [(0, 1, 2), (3,)]
    tokens = 12 * 16
    hidden = tokens * 32 * FP32_BYTES
    first, last = predict_traffic(run, 0), predict_traffic(run, 1)
    # On two ranks, an all-reduce sends its message once. There is 1 for the embedding, 4 for each
    # block, 1 for the head, and for the loss 3 numbers a token.
    assert first["tp", "all_reduce"] == 2 * 9 * hidden
    assert last["tp", "all_reduce"] == 2 * (hidden + 3 * tokens * FP32_BYTES)
    assert first["pp", "send"] == last["pp", "send"] == 2 * hidden
    # A report of 16 numbers of 8 bytes from each of four ranks.
    assert first["world", "all_reduce"] == 2 * 3 * (4 * 16 * 8) // 4


def test_a_tied_weights_gradient_worked_by_hand() -> None:
    """The weight is 301 x 32. On two tensor ranks it has 151 rows, padded to 152. At ZeRO-1, each
    of two data ranks has half of it.
    """
    for zero_stage, dp in ((0, 1), (1, 2)):
        run = run_at((2, dp, 2), {"zero_optimization": {"stage": zero_stage}})
        micro_batches = run.batch.gradient_accumulation_steps
        hidden = run.batch.micro_batch_size * 16 * 32 * FP32_BYTES
        for stage in (0, 1):
            # The rank sends to the other stage: hidden states or their gradients, and its part of
            # the tied gradient.
            tied = 152 * 32 * FP32_BYTES // dp
            assert predict_traffic(run, stage)["pp", "send"] == micro_batches * hidden + tied
