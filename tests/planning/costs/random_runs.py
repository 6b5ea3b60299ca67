"""Random runs with valid settings, for laws that hold for each run."""

from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run

Values = tuple[dict[str, Any], int, str]
"""A configuration, its world size and its device."""


def random_runs(random: Random, count: int) -> Iterator[tuple[Run, str]]:
    """Yield random runs. Variants follow each one, which differ from it in one setting.

    If the key of a cache lacks this setting, the cached result is wrong for the variant.
    """
    others = Random(0)
    while count:
        values = _random_values(random)
        if (run := _resolved(*values)) is None:
            continue
        count -= 1
        yield run, values[2]
        for key in (*OTHERS, "device"):
            variant = _with_another(key, others, *values)
            if (other := _resolved(*variant)) is not None:
                yield other, variant[2]


def _resolved(values: dict[str, Any], world_size: int, device_type: str) -> Run | None:
    """Return the run; None if its settings break a rule."""
    try:
        return resolve_run(parse_config(values), World(world_size, "x", device_type), name="x")
    except ConfigError:
        return None


OTHERS: dict[str, list[Any]] = {
    "model.hidden_size": [32, 64],
    "model.tie_word_embeddings": [True, False],
    "model.residual_dropout": [0.0, 0.1],
    "parallel.context": [1, 2, 4],
    "parallel.tensor": [1, 2, 4],
    "parallel.schedule": ["1f1b", "gpipe"],
    "parallel.activation_checkpointing": ["none", "selective", "full", "full_offloaded"],
    "parallel.recomputed_blocks": [1, 2],
    "parallel.sequence_parallel": [True, False],
    "parallel.gradient_reduction": ["per_step", "per_visit", "per_micro_batch"],
    "parallel.replicate": [1, 2],
    "parallel.gradient_compression": ["none", "bf16", "int8", {"type": "powersgd"}],
    "parallel.context_method": ["ulysses", "all_gather"],
    "parallel.virtual_stages": [1, 2],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.reduce_bucket_size": [5000, 200000],
    "zero_optimization.overlap_comm": [True, False],
    "data.sequence_length": [32, 64, 128],
    "data.reset_at_documents": [True, False],
    "training.compile": [True, False],
    "bf16.enabled": [True, False],
    "data_types.grad_accum_dtype": ["fp32", "bf16"],
    "communication_data_type": ["fp32", "bf16"],
    "gradient_accumulation_steps": [1, 2, 8],
    "train_micro_batch_size_per_gpu": [1, 2, 4],
    "optimizer": [
        {"type": "Muon", "params": params}
        for params in ({}, {"per_head_muon": True, "nesterov": False}, {"ns_dtype": "fp32"})
    ],
}
"""The settings of which one differs in a variant, and their values."""


def _with_another(
    key: str, random: Random, values: dict[str, Any], world_size: int, device_type: str
) -> Values:
    if key == "device":
        return values, world_size, "cpu" if device_type == "cuda" else "cuda"
    changed = deepcopy(values)
    *section, name = key.split(".")
    place = changed.setdefault(section[0], {}) if section else changed
    value = random.choice([each for each in OTHERS[key] if each != place.get(name)])
    if name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        changed["train_batch_size"] = changed["train_batch_size"] // changed[name] * value
    if name in ("context", "tensor"):
        world_size = world_size // place[name] * value
    place[name] = value
    return changed, world_size, device_type


def _random_values(random: Random) -> Values:
    one = random.choice

    def some(share: float, **choices: list[Any]) -> dict[str, Any]:
        """Return each key with this probability, with one of its values."""
        return {key: one(each) for key, each in choices.items() if random.random() < share}

    pp, dp, cp, tp = (
        one([1, 1, 2, 3, 4, 8]),
        one([1, 2, 2, 4, 6]),
        one([1, 1, 1, 2]),
        one([1, 2, 4]),
    )
    chunks = one([1, 1, 1, 2, 3, 4]) if pp > 1 else 1
    size, count = one([1, 2, 4]), one([1, 2, 3, 4, 8, 16, 20])
    device_type, precision = one(["cuda", "cuda", "cpu"]), one(["bf16", "bf16", "fp16", "fp32"])
    model = {
        "architecture": one(["gpt2", "llama"]),
        "vocab_size": one([256, 1000, 5003]),
        "hidden_size": one([32, 64, 96, 128]),
        "num_hidden_layers": one([1, 2, 3, 4, 7, 8, 12, 16, 24, 33]),
        "num_attention_heads": one([4, 8]),
        "max_position_embeddings": 256,
        **some(0.3, tie_word_embeddings=[True, False]),
        **some(0.1, attention_dropout=[0.1], residual_dropout=[0.1], embedding_dropout=[0.1]),
    }
    if model["architecture"] == "llama":
        model |= {"num_key_value_heads": 4, "intermediate_size": one([64, 128, 352])}
        model |= some(0.1, qk_norm=[True, "all_heads"], norm_position=["after"])
        model |= some(0.1, sliding_window=[32])
    parallel = {
        "pipeline": pp,
        "context": cp,
        "tensor": tp,
        "virtual_stages": chunks,
        "schedule": one(["1f1b", "gpipe"]) if chunks == 1 else "1f1b",
        "activation_checkpointing": one(["none", "selective", "full", "full_offloaded"]),
        **some(0.3, gradient_reduction=["per_step", "per_visit", "per_micro_batch"]),
        **some(0.3, sequence_parallel=[True, False], recomputed_blocks=[1, 2, 3]),
        **some(0.3, replicate=[1, 2, 3], micro_batch_groups=[1, 2, 3]),
        **some(0.2, context_method=["ulysses", "all_gather"]),
        **some(0.2, gradient_compression=["bf16", "int8", {"type": "powersgd", "start_step": 10}]),
    }
    if pp > chunks == 1 and parallel["schedule"] == "1f1b":
        parallel |= some(0.4, extra_in_flight=[1, pp - 1])
    zero = {
        "stage": one([0, 1, 2, 3]),
        **some(0.6, reduce_bucket_size=[1000, 5000, 20000, 60000, 200000]),
        **some(0.5, stage3_prefetch_bucket_size=[0, 5000, 30000, 100000]),
        **some(0.5, stage3_param_persistence_threshold=[0, 100, 5000, 20000]),
        **some(0.4, stage3_max_live_parameters=[1000, 50000, 200000, 10**6]),
        **some(0.5, overlap_comm=[True, False]),
        **some(0.15, stage3_model_persistence_threshold=[0, 1000], sub_group_size=[5000, 50000]),
        **some(0.1, reduce_scatter=[False], use_multi_rank_bucket_allreduce=[False]),
        **some(0.1, offload_optimizer=[{"device": "cpu"}], offload_param=[{"device": "cpu"}]),
    }
    values = {
        "model": model,
        "parallel": parallel,
        "zero_optimization": zero,
        "train_batch_size": size * count * dp,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": count,
        "data": {"sequence_length": one([32, 64, 128]), **some(0.2, reset_at_documents=[True])},
        "training": {"steps": 100, **some(0.3, compile=[True, False])},
        **some(0.15, communication_data_type=["fp32", "bf16", "fp16"]),
    }
    if precision != "fp32":
        values[precision] = {"enabled": True}
    if precision == "bf16":
        values["data_types"] = some(0.4, grad_accum_dtype=["fp32", "bf16"])
    return values, pp * dp * cp * tp, device_type
