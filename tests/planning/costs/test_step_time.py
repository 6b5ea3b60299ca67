"""The predicted time of a step: its products are the model's FLOPs, its terms add up, and it
respects physical limits.

``tests/test_benchmark_plan.py`` compares predictions with published runs.
"""

import dataclasses
import math
from typing import Any

import pytest

from megaspeed.config.model import ModelConfig
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.model.parameters import forward_flops_per_token
from megaspeed.planning.costs.network_time import SLOWDOWN_BY_OVERLAP, Network
from megaspeed.planning.costs.step_time import (
    GROUPED_PRODUCTS,
    Rates,
    StepTime,
    predict_step_time,
    product_seconds,
)
from megaspeed.planning.costs.workload import (
    Cluster,
    Measured,
    MuonWork,
    Product,
    Workload,
    attention_flops,
    block_parameters,
    block_products,
    head_product,
    workload_of,
)
from megaspeed.topology.devices import Device, device_named
from megaspeed.topology.grid import Axis, Grid
from tests.planning.tiny_runs import FOLDER, MIXTURES, from_file, tiny

LENGTH = 2048
MODELS: dict[str, dict[str, object]] = {
    "gpt": {"architecture": "gpt2", "preset": "gpt3-175b"},
    "llama": {"architecture": "llama", "num_key_value_heads": 8, "intermediate_size": 14336},
    "qwen": {"architecture": "qwen3", "num_key_value_heads": 16, "intermediate_size": 12288},
    "experts": MIXTURES["qwen3-30b-a3b"],
}


def model(name: str = "llama", **changes: object) -> ModelConfig:
    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": LENGTH,
    }
    return ModelConfig.model_validate(
        {**({} if name == "gpt" else shape), **MODELS[name], **changes}
    )


def workload(pp: int = 1, dp: int = 8, tp: int = 1, **changes: object) -> Workload:
    shape = changes.pop("model", None) or model()
    assert isinstance(shape, ModelConfig)
    replicate = changes.pop("replicate", 1 if changes.get("zero_stage") else dp)
    assert isinstance(replicate, int)
    work = Workload(
        model=shape,
        sequence_length=LENGTH,
        grid=Grid(pp=pp, dp=dp, tp=tp, replicate=replicate),
        micro_batch_size=1,
        micro_batches=8,
        blocks=(shape.num_hidden_layers // pp,) * pp,
    )
    return dataclasses.replace(work, **changes)  # type: ignore[arg-type]


def cluster(name: str = "h100-80gb", **changes: float) -> Cluster:
    device = dataclasses.replace(device_named(name), **changes)  # type: ignore[arg-type]
    return Cluster(device=device, network_bandwidth=device.network_bandwidth)


def processors(host: float = 1e-3) -> Cluster:
    """Return two ranks on a CPU of 0.1 TFLOP/s and 10 GB/s, as a micro-benchmark measures it."""
    measured = Measured(
        pointwise=3.0, optimizer=7e-9, latency=1e-3, message_bandwidth=1e9, host=host
    )
    device = Device(
        name="cpu", memory_bytes=1 << 34, peak_fp32=0.1, memory_bandwidth=10, processors=1
    )
    return Cluster(device=device, gpus_per_node=2, network_bandwidth=0.0, measured=measured)


SMALL = model(
    "gpt",
    preset=None,
    vocab_size=2000,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=6,
    max_position_embeddings=LENGTH,
)


def on_processors(**changes: object) -> Workload:
    layout: dict[str, object] = {"model": SMALL, "sequence_length": 256, "precision": "fp32"}
    return workload(**{"dp": 1, **layout, **changes})  # type: ignore[arg-type]


def predict(work: Workload) -> StepTime:
    return predict_step_time(work, cluster())


WORKLOADS = {
    "one rank": workload(dp=1),
    "zero 0": workload(dp=32),
    "zero 1, in buckets": workload(dp=32, zero_stage=1, bucket_bytes=25e6),
    "zero 1, overlapped": workload(dp=32, zero_stage=1, overlaps_dp=True, bucket_bytes=160e6),
    "zero 2": workload(dp=32, zero_stage=2, reductions=8),
    "zero 3": workload(dp=64, zero_stage=3, overlaps_dp=True, reductions=8),
    "zero 3, not overlapped": workload(dp=64, zero_stage=3, reductions=8),
    "tensor": workload(tp=8, dp=4),
    "tensor across nodes": workload(tp=16, dp=2),
    "sequence": workload(tp=8, dp=4, sequence_parallel=True),
    "pipeline": workload(pp=4, dp=2, tp=8),
    "uneven": workload(pp=4, dp=2, tp=8, blocks=(9, 8, 8, 7)),
    "full": workload(recomputation="full"),
    "fp32": workload(precision="fp32", attention=None),
    "no flash attention": workload(attention=None, recomputation="full"),
}


def test_unfused_attention_with_misaligned_heads_does_not_use_tensor_cores() -> None:
    """In BLOOM's search, 13824 / 128 = 108 takes 147 s a step, and 13824 / 96 = 144 takes 107 s."""

    def attention(heads: int) -> float:
        shape = model(hidden_size=13824, num_attention_heads=heads, num_key_value_heads=heads)
        a100 = device_named("a100-80gb")
        work = workload(dp=1, model=shape, attention=None)
        return predict_step_time(work, Cluster(device=a100, network_bandwidth=25)).attention

    assert attention(128) > 3 * attention(96)
    assert attention(108) < 1.2 * attention(96)  # padded to 128 elements each


@pytest.mark.parametrize(
    ("name", "tp"), [(name, tp) for name in MODELS for tp in (1, 4) if (name, tp) != ("experts", 4)]
)
def test_the_products_of_all_tensor_ranks_are_the_flops_of_the_model(name: str, tp: int) -> None:
    config = model(name)
    _, block, *_, head = forward_flops_per_token(config, LENGTH)
    tokens = 3 * LENGTH
    products = list(block_products(config, tokens, tp))
    flops = sum(product.flops for product in products)
    attention = attention_flops(config, LENGTH, tokens, tp)
    assert tp * (flops + attention) == block * tokens
    # The vocabulary is padded to the same number of rows on each rank.
    padded = tp * math.ceil(config.vocab_size / tp) / config.vocab_size
    assert tp * head_product(config, tokens, tp).flops == pytest.approx(padded * head * tokens)
    backward = sum(each.flops for product in products for each in product.backward)
    assert backward == 2 * flops


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_terms_are_not_negative_and_add_up(name: str) -> None:
    step = predict(WORKLOADS[name])
    assert all(seconds >= 0 for seconds in step.terms.values())
    assert step.total == pytest.approx(sum(step.terms.values()))
    work = WORKLOADS[name]
    last = (work.grid.pp == 1) * (step.layers.embedding.both + step.layers.head.both)
    blocks = max(work.blocks_of_stages)
    slowest = step.products + step.attention + step.pointwise + step.recomputation + step.tp
    own = work.micro_batches * (blocks * step.layers.block.both + last)
    assert slowest + step.head == pytest.approx(own, rel=0.15), "the head may be on that stage"


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(
    "figure",
    ["sustained_16", "peak_16", "peak_fp32", "memory_bandwidth", "link_bandwidth"],
)
def test_a_faster_device_is_never_slower(name: str, figure: str) -> None:
    work, base = WORKLOADS[name], cluster()
    faster = cluster(**{figure: 2 * getattr(base.device, figure)})
    # A shorter computation hides less of a collective, but both together take no longer.
    assert predict_step_time(work, faster).total <= predict_step_time(work, base).total


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_faster_network_is_never_slower(name: str) -> None:
    base = cluster()
    faster = dataclasses.replace(base, network_bandwidth=2 * base.network_bandwidth)
    before, after = (predict_step_time(WORKLOADS[name], each) for each in (base, faster))
    assert after.total <= before.total
    assert (after.total < before.total) == (WORKLOADS[name].grid.world_size > 8)


def test_a_pipeline_waits_as_long_as_its_schedule_says() -> None:
    """The wait is (P - 1) / (M + P - 1) of the time, if all stages are equal."""
    small = model(vocab_size=8)  # the head takes no time
    step = predict(workload(pp=4, dp=1, model=small, micro_batches=6))
    busy = step.products + step.attention + step.pointwise
    assert step.bubble / (busy + step.bubble) == pytest.approx(3 / (6 + 3), rel=0.01)


def test_the_slowest_stage_determines_an_uneven_pipeline() -> None:
    even, uneven = (predict(workload(pp=2, dp=1, blocks=blocks)) for blocks in ((16, 16), (20, 12)))
    assert uneven.products == pytest.approx(even.products * 20 / 16)


def test_more_recomputation_takes_more_time() -> None:
    times = [predict(workload(recomputation=each)).total for each in ("none", "selective", "full")]
    assert times == sorted(times) and len(set(times)) == 3
    full, half = (
        predict(workload(recomputation="full", recomputed_share=share)).recomputation
        for share in (1.0, 0.5)
    )
    block = predict(workload()).layers.block
    assert full == pytest.approx(8 * 32 * block.forward)
    assert half == pytest.approx(full / 2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_compressed_gradients_take_their_share_of_the_time_on_the_wire(stage: int) -> None:
    plain, compressed, empty = (
        predict(workload(zero_stage=stage, sent_share=share)).dp for share in (1.0, 0.25, 0.0)
    )
    assert compressed - empty == pytest.approx(0.25 * (plain - empty))


def test_a_run_states_the_share_of_its_compressed_gradients() -> None:
    how = 'parallel.gradient_compression={"type": "int8"}'
    run = tiny(how, "parallel.data=4", world_size=4).run
    assert 0.25 < workload_of(run).sent_share < 0.3


def test_a_head_size_that_flash_attention_does_not_take_is_four_times_as_slow() -> None:
    sizes = (128, 124)
    fast, slow = (predict(workload(model=model(head_dim=size))).attention / size for size in sizes)
    assert slow == pytest.approx(4 * fast)


def test_small_tensor_parallel_collectives_are_limited_by_latency() -> None:
    """Even for no bytes, a ring of 8 GPUs takes 7 hops of 3.4 us and a start of 8.4 us."""
    tiny_tokens = workload(tp=8, dp=1, sequence_parallel=True, sequence_length=8)
    assert predict(tiny_tokens).layers.block.forward_parts.tp > 4 * (7 * 3.4e-6 + 8.4e-6)


def test_with_sequence_parallelism_the_ends_gather_and_scatter() -> None:
    """See the table in ``costs/traffic.py``: for each micro-batch, and 3 numbers a token for the
    loss.
    """
    both = [Network(workload(tp=8, dp=1, sequence_parallel=s), cluster()) for s in (False, True)]
    (embedding, head), (split_embedding, split_head) = (each.tp_of_ends for each in both)
    message = 2048 * 4096 * 2
    summing, gathering, scattering = (
        both[0].collective("tp", kind, message)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    )
    assert embedding == pytest.approx(summing)
    assert split_embedding == pytest.approx(summing + gathering)
    assert split_head - head == pytest.approx(gathering + scattering - summing)


def test_each_tensor_rank_sends_only_its_part_of_split_hidden_states() -> None:
    plain, split = (
        predict(workload(pp=2, dp=1, tp=4, sequence_parallel=splits)).p2p
        for splits in (False, True)
    )
    assert split < plain


def test_gradients_are_reduced_as_often_as_the_run_does_it_and_the_last_bucket_is_waited_for() -> (
    None
):
    """Between layers that take a second each, all buckets except the last are hidden.

    After the step, the buckets are gathered beside the next forward, which waits for the first.
    """
    once, each_time, overlapped = (
        Network(workload(dp=32, zero_stage=1, bucket_bytes=160e6, **how), cluster())
        for how in ({}, {"reductions": 8}, {"overlaps_dp": True})
    )
    parameters = sum(elements for _, elements in once.work.held(0))
    buckets = math.ceil(4 * parameters / 160e6)
    first = once.collective("shard", "all_gather", 2 * parameters / buckets)
    gather = first + SLOWDOWN_BY_OVERLAP * (buckets - 1) * first
    reduction = once.dp(0, 1.0, 1.0) - gather
    assert each_time.dp(0, 1.0, 1.0) == pytest.approx(gather + 8 * reduction)
    last = reduction / buckets
    hidden = SLOWDOWN_BY_OVERLAP * (reduction - last)
    assert overlapped.dp(0, 1.0, 1.0) == pytest.approx(gather + last + hidden)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["int8", "powersgd"])
@pytest.mark.parametrize("replicate", [1, 2])
def test_the_first_layer_waits_for_all_compressed_matrices_unless_there_are_replicas(
    stage: int, how: str, replicate: int
) -> None:
    """Without replicas they are one bucket, so nothing hides its gather. The prediction once hid
    all but a fraction, as if it had as many buckets as without compression.
    """
    run = tiny(
        "zero_optimization.reduce_bucket_size=3000",
        f"zero_optimization.stage={stage}",
        f"parallel.replicate={replicate}",
        f"parallel.gradient_compression={how}",
        world_size=4,
    ).run
    axis, work = data_axis_of(run, 0, "cuda"), workload_of(run)
    matrices = {each.name for each in axis.parameters if len(each.shape) == 2}
    is_one = matrices <= {each.name for each in axis.gathers_after_step[0].parameters}
    beside, after = (
        Network(dataclasses.replace(work, overlaps_gathers=overlaps), cluster()).dp(0, 1.0, 1.0)
        for overlaps in (True, False)
    )
    assert is_one == (beside == after) == (replicate == 1)


def test_a_product_of_few_tiles_wastes_most_processors() -> None:
    rate, memory, processors = 1e15, 1e20, 132
    full = Product(256 * processors, 128, 1024)
    assert product_seconds(full, rate, memory, processors, 2) == pytest.approx(full.flops / rate)
    one = Product(256, 128, 1024)
    assert product_seconds(one, rate, memory, processors, 2) == pytest.approx(
        processors * one.flops / rate
    )
    moved = product_seconds(Product(4096, 4096, 1), 1e30, 1e12, processors, 2)
    assert moved == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / 1e12)


def test_the_matrices_of_all_experts_are_read_whatever_the_number_of_tokens() -> None:
    """With few tokens, a pass takes the time to read the matrices, with many the time of the FLOPs.
    The products of the router are in fp32.
    """
    rates = Rates(workload(), cluster())
    few, many = (Product(tokens, 768, 2048, matrices=128) for tokens in (128, 10**6))
    weights = 128 * 768 * 2048 * 2 / rates.memory
    assert rates.linear(few) == pytest.approx((weights, 2 * weights), rel=0.01)
    seconds = many.flops / rates.rate / GROUPED_PRODUCTS
    assert rates.linear(many) == pytest.approx((seconds, 2 * seconds))
    router = Product(10**6, 128, 2048)
    assert sum(rates.linear(router._replace(is_fp32=True))) > 1.5 * sum(rates.linear(router))


def test_a_resolved_run_gives_its_layout() -> None:
    overrides = ("parallel.pipeline=2", "parallel.tensor=2", "zero_optimization.stage=2")
    training = tiny(*overrides, world_size=8)
    work, run = workload_of(training.run), training.run
    assert work.grid == Grid(pp=2, dp=2, tp=2)
    assert (work.tokens, work.precision) == (
        run.batch.micro_batch_size * run.config.data.sequence_length,
        run.precision,
    )
    assert sum(work.blocks_of_stages) == run.config.model.num_hidden_layers
    assert work.reductions == work.micro_batches == run.batch.gradient_accumulation_steps


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_time_of_the_host_is_added_to_that_of_the_processors(
    layout: dict[str, int], zero_stage: int
) -> None:
    """Each layer of the slowest stage takes 1 ms for each micro-batch."""
    work = on_processors(**layout, zero_stage=zero_stage, overlaps_dp=zero_stage == 3)
    step = predict_step_time(work, processors())
    idle = predict_step_time(work, processors(host=0.0))
    layers = 4 if work.grid.pp == 2 else 8
    assert step.host == pytest.approx(8 * layers * 1e-3)
    assert idle.host == 0
    waits = layers * 1e-3 * (work.grid.pp - 1)  # it waits for the host of the other stage
    assert step.total - idle.total == pytest.approx(step.host + waits)
    assert predict(work).host == 0, "a GPU computes meanwhile"


def test_messages_of_processors_take_latency_and_bandwidth() -> None:
    """With two ranks, an all-reduce is two rounds of one hop. Each has half of the message."""
    work = on_processors(tp=2)
    one = 2 * (1e-3 + 256 * 384 * 4 / 2 / 1e9)
    block = predict_step_time(work, processors()).layers.block
    assert (block.forward_parts.tp, block.backward_parts.tp) == pytest.approx((2 * one,) * 2)
    sent = predict_step_time(on_processors(pp=2), processors()).p2p
    assert sent == pytest.approx(2 * (8 + 1) * (1e-3 + 256 * 384 * 4 / 1e9))


def test_processors_cannot_compute_while_they_communicate() -> None:
    times = {
        overlaps: predict_step_time(
            on_processors(dp=2, zero_stage=3, overlaps_dp=overlaps, reductions=8), processors()
        ).dp
        for overlaps in (True, False)
    }
    assert times[True] == times[False] > 6 * 8 * 3 * 1e-3


def test_the_fullest_owner_of_matrices_determines_the_time_of_muon() -> None:
    muon = 'optimizer={"type": "Muon", "params": {"per_head_muon": true, "ns_steps": 3}}'
    run = tiny(muon, "parallel.pipeline=2", "parallel.tensor=2", world_size=8).run
    for stage, (work,) in enumerate(workload_of(run).muon):
        plan = data_axis_of(run, stage, "cuda").orthogonalization
        assert plan is not None
        assert (work.steps, work.precision, work.rounds) == (3, run.muon_dtype, len(plan.rounds))
        cost = sum(count * n * m * min(n, m) for count, n, m in work.batches)
        assert cost == max(plan.costs)


def muon_work(**changes: Any) -> MuonWork:
    """Two square matrices of one owner in each of 4 blocks."""
    one = {"steps": 5, "precision": "bf16", "batches": ((1, 8192, 8192),) * 8, "rounds": 8}
    one |= {"elements": 8 * 8192**2, "members": 1, "groups": 1}
    return MuonWork(**{**one, **changes})


def muon_seconds(**changes: Any) -> float:
    """Nothing but the products takes time, and 1e12 operations take 1 s."""
    work = workload(blocks=(4,), zero_stage=1, muon=((muon_work(**changes),),))
    rates = cluster(sustained_16=1.0, peak_fp32=0.1, memory_bandwidth=1e12, processors=1)
    device = dataclasses.replace(rates.device, link_bandwidth=1e12)
    return Rates(work, dataclasses.replace(rates, device=device)).optimizer(0) * 0.98


def test_muon_takes_the_products_of_its_steps() -> None:
    step = (4 + 2) * 8192**3 / 1e12  # a step of one matrix: 4 n^2 m + 2 n^3
    assert muon_seconds() == pytest.approx(8 * 5 * step, rel=0.001)
    assert muon_seconds(steps=10) == pytest.approx(8 * 10 * step, rel=0.001)
    oblong = (4 + 2 / 4) * 8192 * 2048**2 / 1e12
    for shape in ((2048, 8192), (8192, 2048)):
        assert muon_seconds(batches=((1, *shape),)) == pytest.approx(5 * oblong, rel=0.1)


def test_muon_in_fp32_takes_the_rate_without_tensor_cores() -> None:
    assert muon_seconds(precision="fp32") == pytest.approx(10 * muon_seconds(), rel=0.001)


def test_the_exchanges_of_muon_run_beside_its_products() -> None:
    """Nothing hides one round of them. On processors, nothing hides any of them."""
    network = Network(workload(dp=2, zero_stage=1, blocks=(4,)), cluster())
    muon = muon_work(rounds=2, members=2, elements=2 * 4096**2)
    alone = 2 * network.collective("stage", "all_to_all", 2 * muon.elements / 2)
    hidden = network.orthogonalization(muon, 1.0)
    assert hidden == pytest.approx(alone * (1 + SLOWDOWN_BY_OVERLAP))
    assert network.orthogonalization(muon, 0.0) == pytest.approx(2 * alone)
    slow = Network(on_processors(dp=2, zero_stage=1, blocks=(4,)), processors())
    assert slow.orthogonalization(muon, 1e9) == slow.orthogonalization(muon, 0.0)


def test_experts_are_reduced_over_the_ranks_that_hold_copies() -> None:
    """With ep 4 on 8 data ranks, a rank has a quarter of the experts, as has one other rank."""
    run = from_file(FOLDER / "experts.json", "parallel.expert=4", world_size=8).run
    work = workload_of(run)
    network, model = Network(work, cluster()), work.model
    assert model.num_experts == 8 and work.grid.size_along("expert_shard") == 2
    (copies, others), (of_experts, experts) = work.held_of_block
    assert (copies.shard, of_experts.shard) == (8, 2)
    width = model.expert_width
    assert experts == 2 * 3 * model.hidden_size * width
    assert others + 4 * experts == block_parameters(model)
    (_, all_others), (_, all_experts) = work.held(0)
    sizes: list[tuple[Axis, float]] = [("shard", all_others), ("expert_shard", all_experts)]
    both = 0.0
    for axis, size in sizes:
        both += network.collective(axis, "reduce_scatter", size * work.gradient_bytes)
        both += network.collective(axis, "all_gather", size * 4)
    alone = dataclasses.replace(work, overlaps_dp=False, overlaps_gathers=False, bucket_bytes=1e12)
    assert Network(alone, cluster()).dp(0, 0.0, 0.0) == pytest.approx(both)


@pytest.mark.parametrize("load_factor", [1.0, 2.0])
def test_the_exchange_of_experts_worked_by_hand(load_factor: float) -> None:
    run = from_file(FOLDER / "experts.json", "parallel.expert=4", world_size=8).run
    work = workload_of(dataclasses.replace(run, load_factor=load_factor))
    network, model = Network(work, cluster()), work.model
    rows = load_factor * work.tokens * 2
    sizes = [rows * 4 * (model.hidden_size + weights) for weights in (4, 0)]  # in fp32
    both = sum(network.collective("ep", "all_to_all", size) for size in sizes)
    forward, backward = network.ep
    assert backward == pytest.approx(both)
    counts = network.collective("ep", "all_to_all", 8 * 4)
    assert forward == pytest.approx(both + counts + 30e-6)
    # The products have as many rows, and a quarter of the matrices.
    products = block_products(model, work.tokens, 1, 4, load_factor)
    assert {(each.m, each.matrices) for each in products if each.matrices > 1} == {(rows, 2)}


def test_a_scaled_prediction_has_the_same_shares() -> None:
    step = predict_step_time(on_processors(tp=2), processors())
    twice = step.scaled(2.0)
    assert twice.total == pytest.approx(2 * step.total)
    assert twice.terms == {name: 2 * seconds for name, seconds in step.terms.items()}


def test_the_group_that_is_placed_worst_determines_the_time() -> None:
    """tp 3 on nodes of 8: ranks 6, 7 | 8 have one network for rank 8, not NVLink."""
    aligned = dataclasses.replace(cluster(), gpus_per_node=3)
    across = dataclasses.replace(cluster(), gpus_per_node=8)
    work = workload(dp=8, tp=3)

    def ring(work: Workload, on: Cluster, axis: Axis) -> tuple[int, float]:
        network = Network(work, on)
        return network.placement.along(axis).most_nodes, network.ring_bandwidth(axis)

    one_rank_each = (2, 0.78e9 * across.network_bandwidth)
    assert ring(work, aligned, "tp")[0] == 1
    assert ring(work, across, "tp") == one_rank_each
    assert Network(work, across).tp[0] > 3 * Network(work, aligned).tp[0]
    # There are four ranks on nodes of three, so one of them is alone.
    alone = dataclasses.replace(cluster(), gpus_per_node=3)
    assert ring(workload(dp=1, tp=4), alone, "tp")[1] == 0.78e9 * alone.network_bandwidth
    # Data ranks 0, 3, 6 | 9 have one network on the second node, and 2, 5 | 8, 11 have two.
    assert ring(workload(dp=4, tp=3), across, "replica") == one_rank_each
