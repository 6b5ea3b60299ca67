"""Compare predicted step times with published runs.

    python scripts/benchmark_plan.py

Each row of docs/published_runs/fitted.csv is one run: its shape, layout and GPU, and its step time.
For each source, the constants are fitted to the rows of all others. The errors of the source are
predicted / reported - 1. A new source has larger ones, because the terms of the formula were chosen
with all these sources in view. In the line "sources alike", all sources
have the same weight: each of n rows counts 1/n. In the line "runs alike", each row counts once.

A fit takes the constants with the smallest mean of |log(predicted / reported)|, in which all
sources have the same weight. The spread of these fits is the interval of the constants.

The rows of docs/published_runs/unseen.csv determine no constant and no term of the formula. They
are predicted with the constants of megaspeed. The interval of a step time is the smallest one that
covers nine of ten of these runs, whether runs or sources have the same weight.

Layouts of one model on the same GPUs, with the same sequences and batch, are a group. For each
group, the fastest layout by prediction is compared with the fastest by report.

What only other frameworks do is predicted here, not in ``planning.costs``: fp8, other kernels and
kinds of recomputation, collectives beside products, and DeepSpeed's engine.

Rows with a memory are compared with the predicted memory of a run of megaspeed in that shape and
layout. The memory of all logits is added, because only megaspeed computes them in chunks.

The columns:

    gpu, n_gpus, fact_gpn, fact_nic         GPUs a node, GB/s of each GPU's network if unusual
    layers hidden heads kv_heads ffn mlp_mats (2 GELU, 3 SwiGLU) vocab seq_len
    tp pp vp dp mbs gbs_seqs                degrees, sequences of a micro-batch and of a step
    zero_stage, fact_fsdp                   ZeRO-3 if fact_fsdp
    recompute, precision                    none, selective, full, full 1/3; bf16, fp16, fp8
    fact_flash                              none, fa1, fa2
    fact_sp fact_async_tp fact_overlap fact_scatter_gather fact_gbytes fact_part framework
    d_iter_time_s                           reported seconds of a step
    memory_gib, memory_kind                 of the fullest rank: allocated, reserved, or driver's
    id src model usable why_not             a row that is not usable is omitted
"""

import argparse
import csv
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import resolve_run
from megaspeed.model.parameters import forward_flops_per_token
from megaspeed.pipeline.partition import partition_layers
from megaspeed.planning.costs import step_time
from megaspeed.planning.costs.network_time import Network
from megaspeed.planning.costs.reserved_memory import reserved_memory
from megaspeed.planning.costs.step_time import (
    AGAIN,
    LayerParts,
    Layers,
    LayerTime,
    Rates,
    StepTime,
    recomputed_seconds,
)
from megaspeed.planning.costs.workload import (
    FLASH_ATTENTION_2,
    AttentionKernel,
    Cluster,
    Workload,
    block_products,
)
from megaspeed.planning.forecast import (
    LARGE_FACTOR,
    MUCH_COMMUNICATION,
    SHORT_STEP,
    TYPICAL_FACTOR,
)
from megaspeed.planning.prediction import predict as predict_run
from megaspeed.topology.devices import DEVICES, device_named
from megaspeed.topology.grid import Grid

PUBLISHED = Path(__file__).parents[1] / "docs" / "published_runs"


@dataclass(frozen=True, kw_only=True)
class Constants(step_time.Constants):
    """The fitted constants: megaspeed's, and one that only published runs need."""

    interpreted: float
    """How many times as long layers take under DeepSpeed's PipelineEngine of 2021 and 2022. BLOOM,
    MT-NLG and GPT-NeoX have about the same factor. BLOOM's runs on one node also have it, although
    they send nothing between stages or along the data axis. megaspeed does not use this engine."""


FITTED = Constants(**asdict(step_time.FITTED), interpreted=1.24)
"""If one source is left out, ``interpreted`` is 1.22 to 1.24."""

TRIED: Mapping[str, Sequence[float]] = {
    "products": [round(0.90 + 0.01 * step, 2) for step in range(15)],
    "pointwise": [round(2.6 + 0.2 * step, 1) for step in range(12)],
    "interpreted": [round(1.00 + 0.02 * step, 2) for step in range(21)],
}
"""Constant -> the values that a fit tries."""

_DDP_BUCKET_BYTES = 25 * 2**20
"""Bucket of nanotron and nanoGPT, which use torch's DistributedDataParallel: its default."""

_MEGATRON_BUCKET = 40e6
"""Elements of a bucket of Megatron-Core, if it overlaps reductions with the backward."""

_SXM_94_GB = "h100-96gb"
"""The SXM H100 with 94 or 96 GB has HBM2e. The table's h100-94gb is the NVL card."""

_KERNELS: Mapping[str, AttentionKernel | None] = {
    "none": None,
    "fa1": AttentionKernel(0.40, 0.30),
    "fa2": FLASH_ATTENTION_2,
}
"""FlashAttention 1 with a causal mask: 30 to 50 % and 25 to 35 % of the peak (Dao 2023,
FlashAttention-2, section 1)."""

_AGAIN: Mapping[str, LayerParts] = {
    **AGAIN,
    # the attention between its two projections (Korthikanti et al. 2022, section 5)
    "attention": LayerParts(attention=1),
    # Every second product, and all operations that are no product (torchtitan's "selective op").
    "operations": LayerParts(products=0.5, pointwise=1),
}
"""What is recomputed -> the share of each part of a block's forward."""

_EXPOSED_TP = 0.5
"""The fraction of a tp collective's time that remains if it runs beside products in parts. The
first part precedes all products, or the last part follows them. An assumption, for torchtitan's
asynchronous tensor parallelism."""

_BYTES_OF_A_LOGIT = 10
"""In 16 bits, a copy in fp32 for the softmax, and the fp32 gradient."""

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)  # by identity: a fast key
class Published:
    """A published run, and the values that predict it."""

    id: str
    source: str
    group: str  # layouts of one model on the same GPUs, with the same batch
    work: Workload  # as megaspeed would train it
    cluster: Cluster
    recomputation: str = "none"  # of ``_AGAIN``
    is_fp8: bool = False
    is_interpreted: bool = False  # whether DeepSpeed's PipelineEngine runs the schedule
    splits_messages: bool = False  # whether a tensor rank sends its part to the next stage
    overlaps_tp: bool = False  # whether tp collectives run beside products, within a node
    seconds: float  # as reported
    memory_bytes: float | None = None  # as reported, of the fullest rank
    # Whether it includes CUDA and NCCL; otherwise it is from torch's allocator.
    is_drivers_memory: bool = False

    @cached_property
    def network(self) -> Network:
        """The run's communication. It does not depend on the fitted constants."""
        return Network(self.work, self.cluster)

    @cached_property
    def message_share(self) -> float:
        """Time of a message between stages / time of one that is not split over tensor ranks."""
        if not self.splits_messages or self.work.grid.pp == 1:
            return 1.0
        part = Network(replace(self.work, sequence_parallel=True), self.cluster)
        return part.message / self.network.message


def main() -> None:
    """Print the tables."""
    description = "Compare predicted step times with published runs"
    argparse.ArgumentParser(description=description).parse_args()
    benchmark(rows_of("fitted"))
    print("\nRuns to which nothing is fitted")
    benchmark_unseen(rows_of("unseen"))


def rows_of(name: str) -> list[Row]:
    """Return the usable rows of a file of published runs."""
    with (PUBLISHED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["usable"] == "True"]


def benchmark_unseen(rows: Sequence[Row]) -> dict[str, Any]:
    """Print the tables of rows to which nothing is fitted. Return their figures."""
    runs = [published_run(row) for row in rows]
    predicted = {run.id: predict(run) for run in runs}
    return {"errors": show_errors(runs, predicted), "needed": show_needed(runs, predicted)}


def benchmark(rows: Sequence[Row]) -> dict[str, Any]:
    """Print the tables of these rows. Return their figures."""
    runs = [published_run(row) for row in rows]
    chosen = fit(runs)
    sources = sorted({run.source for run in runs})
    without = {source: fit([run for run in runs if run.source != source]) for source in sources}
    show_constants(chosen, without)
    predicted = {run.id: predict(run, without[run.source]) for run in runs}
    return {
        "constants": asdict(chosen),
        "errors": show_errors(runs, predicted),
        "needed": show_needed(runs, predicted),
        "memory": show_memory(runs),
        "layouts": show_layouts(runs, predicted),
    }


def published_run(row: Row) -> Published:
    """Return the run of a row."""
    name = row["gpu"].lower()
    if name.startswith(("h100-94gb", "h100-96gb")):
        name = _SXM_94_GB
    recomputation, share = _recomputation(row)
    device = device_named(next(known for known in DEVICES if known.startswith(name)))
    return Published(
        id=row["id"],
        source=row["src"],
        group=" ".join(
            row[key] for key in ("src", "model", "gpu", "n_gpus", "seq_len", "gbs_seqs")
        ),
        work=_workload(row, share),
        recomputation=recomputation,
        is_fp8="fp8" in row["precision"],
        is_interpreted="DeepSpeed" in row["framework"],
        splits_messages=row["fact_scatter_gather"] == "True",
        overlaps_tp=row["fact_async_tp"] == "True",
        cluster=Cluster(
            device=device,
            gpus_per_node=int(row["fact_gpn"]),
            network_bandwidth=float(row["fact_nic"] or device.network_bandwidth),
        ),
        seconds=float(row["d_iter_time_s"]),
        memory_bytes=2**30 * float(row["memory_gib"]) if row["memory_gib"] else None,
        is_drivers_memory=row["memory_kind"] == "driver",
    )


def _workload(row: Row, recomputed_share: float) -> Workload:
    shape = {
        "architecture": "llama" if row["mlp_mats"] == "3" else "gpt2",
        "vocab_size": int(row["vocab"]),
        "hidden_size": int(row["hidden"]),
        "num_hidden_layers": int(row["layers"]),
        "num_attention_heads": int(row["heads"]),
        "num_key_value_heads": int(row["kv_heads"]),
        "intermediate_size": int(row["ffn"]),
        "max_position_embeddings": int(row["seq_len"]),
    }
    model = _one_of_equal(ModelConfig.model_validate(shape))
    tp, pp, dp, size = (int(row[column]) for column in ("tp", "pp", "dp", "mbs"))
    micro_batches = max(1, round(int(row["gbs_seqs"]) / (dp * size)))
    stage = 3 if row["fact_fsdp"] == "True" else int(row["zero_stage"])
    overlaps, gradient_bytes = row["fact_overlap"] == "True", int(row["fact_gbytes"])
    bucket = _MEGATRON_BUCKET * gradient_bytes if overlaps else math.inf
    if row["framework"] in ("nanotron", "nanoGPT"):
        bucket = _DDP_BUCKET_BYTES
    return Workload(
        model=model,
        sequence_length=int(row["seq_len"]),
        grid=Grid(pp=pp, dp=dp, tp=tp, replicate=dp if stage == 0 else 1),
        micro_batch_size=size,
        micro_batches=micro_batches,
        blocks=_blocks(model, row, pp * int(row["vp"])),
        groups=max(1, micro_batches // pp) if int(row["vp"]) > 1 else 1,
        zero_stage=stage,
        precision="fp16" if row["precision"] == "fp16" else "bf16",
        gradient_bytes=gradient_bytes,
        attention=_KERNELS[row["fact_flash"]],
        recomputed_share=recomputed_share,
        sequence_parallel=row["fact_sp"] == "True" and tp > 1,
        overlaps_dp=overlaps,
        overlaps_gathers=False,  # few sources say whether they do that
        reductions=micro_batches if stage == 3 else 1,
        bucket_bytes=bucket,
    )


@cache
def _one_of_equal(model: ModelConfig) -> ModelConfig:
    """Return the same object for equal models: as a key of a cache, it is found faster."""
    return model


def _blocks(model: ModelConfig, row: Row, stages: int) -> tuple[int, ...]:
    """Return the blocks of each virtual stage: balanced with the head's operations, or equal
    numbers.
    """
    layers = model.num_hidden_layers
    if row["fact_part"] == "balanced":
        costs = forward_flops_per_token(model, int(row["seq_len"]))
        parts = partition_layers([int(cost) for cost in costs], stages)
        return tuple(len(part) - (0 in part) - (layers + 1 in part) for part in parts)
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def _recomputation(row: Row) -> tuple[str, float]:
    """Return what is recomputed, and the share of blocks.

    For torchtitan, "selective" is a list of operations, or every second layer. For others, it is
    the attention, as in Megatron-LM. "full 1/3" is a third of the blocks.
    """
    stated = row["recompute"]
    if stated.startswith("full"):
        return "full", float(Fraction(stated.split()[-1])) if "/" in stated else 1.0
    if stated.startswith("none"):
        return "none", 1.0
    if "selective layer" in stated:
        return "full", 0.5
    return ("operations" if row["framework"] == "torchtitan" else "attention"), 1.0


def predict(run: Published, constants: Constants = FITTED) -> StepTime:
    """Predict the step of a published run as megaspeed's, with the features of its framework.

    A tensor rank that sends only its part does this as with sequence parallelism (Narayanan et al.
    2021, section 4.1).
    """
    rates, layers = _layers(run, constants.products, constants.pointwise)
    if run.is_interpreted:
        layers = Layers(*(_scaled(layer, constants.interpreted) for layer in layers))
    step = rates.step(layers)
    return replace(step, p2p=step.p2p * run.message_share) if run.splits_messages else step


@lru_cache(maxsize=1 << 15)  # a fit scales the same layers with many values of ``interpreted``
def _layers(run: Published, products: float, pointwise: float) -> tuple[Rates, Layers]:
    constants = step_time.Constants(products=products, pointwise=pointwise)
    rates = Rates(run.work, run.cluster, constants)
    rates.network = run.network
    return rates, Layers(rates.embedding(), _block(run, rates), rates.head())


def _block(run: Published, rates: Rates) -> LayerTime:
    """Predict a block.

    In fp8, both operands of each product are read twice in 16 bits, to find the largest number and
    to convert them, and are written in 8 bits: 5 bytes an element. Everything except the products
    of blocks is in 16 bits.
    """
    work, cluster, device = run.work, run.cluster, run.cluster.device
    if run.is_fp8:
        cluster = replace(cluster, device=replace(device, sustained_16=device.sustained_8))
        rates = Rates(work, cluster, rates.constants)
    block = rates.block()
    forward, backward = block.forward_parts, block.backward_parts
    if run.is_fp8:
        m, n, k, *_ = zip(*block_products(work.model, work.tokens, work.grid.tp), strict=True)
        weights, inputs, outputs = (
            sum(rows * columns for rows, columns in zip(*sizes, strict=True))
            for sizes in ((n, k), (m, k), (m, n))
        )
        converted = 5 * (inputs + weights) / rates.memory, 5 * outputs / rates.memory
        forward = forward._replace(pointwise=forward.pointwise + converted[0])
        backward = backward._replace(pointwise=backward.pointwise + converted[1])
    if run.overlaps_tp and work.grid.tp <= cluster.gpus_per_node:
        forward = forward._replace(tp=_EXPOSED_TP * forward.tp)
        backward = backward._replace(tp=_EXPOSED_TP * backward.tp)
    again = work.recomputed_share * recomputed_seconds(forward, _AGAIN[run.recomputation])
    return replace(block, forward_parts=forward, backward_parts=backward, recomputation=again)


def _scaled(layer: LayerTime, factor: float) -> LayerTime:
    return LayerTime(
        forward_parts=LayerParts(*(factor * seconds for seconds in layer.forward_parts)),
        backward_parts=LayerParts(*(factor * seconds for seconds in layer.backward_parts)),
        recomputation=factor * layer.recomputation,
    )


@cache
def distance(run: Published, constants: Constants) -> float:
    """Return the absolute logarithm of predicted / reported step time."""
    return abs(math.log(predict(run, constants).total / run.seconds))


def fit(runs: Sequence[Published]) -> Constants:
    """Return the constants with the smallest mean distance, if all sources have the same weight.

    The first two are fitted together, then the third, until none of them changes. Faster products
    and slower other operations give nearly the same times. So if the first two changed one after
    the other, the result would depend on the starting point.
    """
    weights = weights_of(runs)
    heaviest_first = sorted(runs, key=lambda run: -weights[run.id])

    def mean(constants: Constants, bound: float = math.inf) -> float:
        """The mean distance, or a part of it that is at least ``bound``."""
        alone, total = replace(constants, interpreted=1.0), 0.0
        for run in heaviest_first:
            total += weights[run.id] * distance(run, constants if run.is_interpreted else alone)
            if total >= bound:
                break
        return total

    # If no run here determines the factor of DeepSpeed's engine, the factor stays 1.
    best, before = replace(FITTED, interpreted=1.0), None
    while best != before:
        before, least = best, mean(best)
        for names in (("products", "pointwise"), ("interpreted",)):
            start = best
            for values in itertools.product(*(TRIED[name] for name in names)):
                tried = replace(start, **dict(zip(names, values, strict=True)))
                if (found := mean(tried, least)) < least:
                    best, least = tried, found
    return best


def weights_of(runs: Sequence[Published]) -> dict[str, float]:
    """Return id of a run -> its weight. All sources have the same weight, and weights sum to 1."""
    sources = _grouped(runs, lambda run: run.source).values()
    return {run.id: 1 / len(sources) / len(members) for members in sources for run in members}


def weighted_quantile(values: Mapping[str, float], weights: Mapping[str, float], q: float) -> float:
    """Return the smallest value that at least the share ``q`` of the weight does not exceed."""
    below = 0.0
    for name in sorted(weights, key=lambda name: values[name]):
        below += weights[name]
        if below >= q * sum(weights.values()) - 1e-9:
            return values[name]
    raise AssertionError("the last value has the complete weight below it")


def show_constants(chosen: Constants, fits: Mapping[str, Constants]) -> None:
    """Print each constant, and its range over the fits that leave one source out."""
    for name, value in asdict(chosen).items():
        values = [getattr(each, name) for each in fits.values()]
        spread = f"   {min(values):g} to {max(values):g} without one source" if values else ""
        print(f"{name:<12} {value:g}{spread}")


def show_errors(
    runs: Sequence[Published], predicted: Mapping[str, StepTime]
) -> dict[str, dict[str, float]]:
    """Print the errors by source. Return all figures."""
    errors = {run.id: predicted[run.id].total / run.seconds - 1 for run in runs}
    sizes = {name: abs(error) for name, error in errors.items()}
    needed = factors_needed(runs, predicted)
    figures: dict[str, dict[str, float]] = {}
    print(f"\n{'':<24} {'runs':>5} {'median':>8} {'p90':>8} {'mean bias':>10} {'in interval':>12}")
    by_source = _grouped(runs, lambda run: run.source)
    shown = {source: weights_of(members) for source, members in by_source.items()}
    shown[f"{len(by_source)} sources alike"] = weights_of(runs)
    shown["runs alike"] = dict.fromkeys(errors, 1 / len(runs))
    for name, weights in shown.items():
        figures[name] = row = {
            "runs": len(weights),
            "median": weighted_quantile(sizes, weights, 0.5),
            "p90": weighted_quantile(sizes, weights, 0.9),
            "bias": sum(weight * errors[each] for each, weight in weights.items()),
            "inside": sum(weights[each] for each in weights if needed[each] <= TYPICAL_FACTOR),
        }
        print(
            f"{name:<24} {len(weights):>5} {row['median']:>8.1%} {row['p90']:>8.1%} "
            f"{row['bias']:>+10.1%} {row['inside']:>12.1%}"
        )
    return figures


def factors_needed(
    runs: Sequence[Published], predicted: Mapping[str, StepTime]
) -> dict[str, float]:
    """Return for each run's id the smallest ``TYPICAL_FACTOR`` whose interval contains the run."""
    widening = math.log(LARGE_FACTOR) / math.log(TYPICAL_FACTOR)
    needed = {}
    for run in runs:
        step = predicted[run.id]
        logarithm = abs(math.log(step.total / run.seconds))
        needed[run.id] = math.exp(logarithm / (widening if is_uncertain(step) else 1))
    return needed


def is_uncertain(step: StepTime) -> bool:
    """Whether the interval of this step has the large factor."""
    return step.communication > MUCH_COMMUNICATION or step.total < SHORT_STEP


def show_needed(runs: Sequence[Published], predicted: Mapping[str, StepTime]) -> dict[str, float]:
    """Print how wide the interval must be to cover nine of ten runs."""
    needed = factors_needed(runs, predicted)
    figures = {
        "runs": weighted_quantile(needed, dict.fromkeys(needed, 1 / len(needed)), 0.9),
        "sources": weighted_quantile(needed, weights_of(runs), 0.9),
    }
    print(
        f"nine of ten are in the interval if its factor is {figures['runs']:.3f} (runs alike), "
        f"{figures['sources']:.3f} (sources alike); it is {TYPICAL_FACTOR:g}"
    )
    return figures


def show_memory(runs: Sequence[Published]) -> dict[str, float]:
    """Print how many times as much memory as its predicted tensors a run needs."""
    compared = [run for run in runs if run.memory_bytes]
    factors = {run.id: memory_factor(run) for run in compared}
    shares, sources = [], _grouped(compared, lambda run: run.source)
    for source, members in sources.items():
        others = weights_of([run for run in compared if run.source != source])
        limit = weighted_quantile(factors, others, 0.9)
        shares.append(statistics.fmean(factors[run.id] <= limit for run in members))
    weights = weights_of(compared)
    figures = {
        "runs": len(compared),
        "median": weighted_quantile(factors, weights, 0.5),
        "p90": weighted_quantile(factors, weights, 0.9),
        "coverage": statistics.fmean(shares),
    }
    print(
        f"memory / predicted tensors of {len(compared)} runs, {len(sources)} sources alike: median "
        f"{figures['median']:.2f}, p90 {figures['p90']:.2f}; of an unseen source, "
        f"{figures['coverage']:.0%} are below the p90 of the others"
    )
    return figures


def memory_factor(run: Published) -> float:
    """Return the fullest rank's reported memory, without CUDA and NCCL, as a multiple of its
    tensors.
    """
    work, grid = run.work, run.work.grid
    recomputed = run.recomputation if run.recomputation in ("none", "full") else "selective"
    stated: dict[str, object] = {
        "model": work.model.model_dump(exclude_defaults=True),
        "data": {"sequence_length": work.sequence_length},
        "parallel": {
            "pipeline": grid.pp,
            "tensor": grid.tp,
            "sequence_parallel": work.sequence_parallel,
            "activation_checkpointing": recomputed,
            "schedule": "1f1b",
            "virtual_stages": work.chunks,
        },
        "zero_optimization": {"stage": work.zero_stage},
        "fp16" if work.precision == "fp16" else "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": work.micro_batch_size,
        "train_batch_size": work.micro_batch_size * work.micro_batches * grid.dp,
        "training": {"steps": 1, "compile": False},
    }
    if work.gradient_bytes == 4 and work.precision != "fp16":
        stated["data_types"] = {"grad_accum_dtype": "fp32"}
    world = World(grid.world_size, "the row", "cuda")
    resolved = resolve_run(parse_config(stated), world, name=run.id)
    prediction = predict_run(resolved)
    logits = work.tokens * work.model.vocab_size / grid.tp
    last = prediction.stages[-1].peak_bytes + _BYTES_OF_A_LOGIT * logits
    tensors = max(prediction.fullest.peak_bytes, last)
    assert run.memory_bytes is not None, "only runs with a memory are compared"
    beside = reserved_memory(resolved, run.cluster.device, run.cluster.gpus_per_node, 0).certain
    return (run.memory_bytes - beside * run.is_drivers_memory) / tensors


def show_layouts(runs: Sequence[Published], predicted: Mapping[str, StepTime]) -> dict[str, int]:
    """Print how well layouts are ordered by predicted time."""
    groups = [group for group in _grouped(runs, lambda run: run.group).values() if len(group) > 1]
    within = right = pairs = 0
    for group in groups:
        first = min(group, key=lambda run: predicted[run.id].total)
        within += first.seconds < 1.05 * min(run.seconds for run in group)
        for one, other in itertools.combinations(group, 2):
            difference = math.log(one.seconds / other.seconds)
            if abs(difference) > 0.05:
                pairs += 1
                right += difference * (predicted[one.id].total - predicted[other.id].total) > 0
    print(
        f"layouts by predicted time: first choice within 5 % of the best in {within} of "
        f"{len(groups)} groups; {right} of {pairs} pairs ordered right"
    )
    figures = {"groups": len(groups), "first_within_5_percent": within}
    return {**figures, "pairs": pairs, "ordered_right": right}


def _grouped(
    runs: Sequence[Published], key: Callable[[Published], str]
) -> dict[str, list[Published]]:
    groups: dict[str, list[Published]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


if __name__ == "__main__":
    main()
