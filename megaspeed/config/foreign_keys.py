"""Keys in DeepSpeed's files that megaspeed does not have, and "auto".

    RENAMED       an old name, or a section that asks for what megaspeed has under another name
    NO_EFFECT     a key for tuning, saving or logging: the run is the same without it
    REFUSED       a key that would change what is trained, or promise what does not happen, unless
                  its value is off

    values of the JSON -> `accept` -> values of megaspeed's keys, problems, notes

A note names each key that is accepted without its effect. `deepspeed_keys.py` has the keys of
DeepSpeed 0.19.8 that work.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.document import describe_value, paths_in
from megaspeed.config.errors import KeyPath, Problem

_OWN = ("model", "parallel", "data", "training")
_ADAM = {"adam": "Adam", "adamw": "AdamW"}
SERVICES = ("tensorboard", "wandb")
"""Sections that are read as entries of training.report_to if they are enabled."""
_WARMUP_MAX_LR = 0.001  # DeepSpeed's default

RENAMED: Mapping[str, str] = {
    "bfloat16": "bf16",
    "tensor_parallel.autotp_size": "parallel.tensor",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": (
        "zero_optimization.stage3_param_persistence_threshold"
    ),
    "zero_optimization.model_persistence_threshold": (
        "zero_optimization.stage3_model_persistence_threshold"
    ),
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
}
"""Old name -> the key that means the same. `true` in an old name of offload means the CPU."""


def _by_key(table: Mapping[str, str], section: str = "") -> dict[str, str]:
    """Key -> reason, from reason -> keys of a section."""
    return {f"{section}{key}": reason for reason, keys in table.items() for key in keys.split()}


_NVME = "nvme_path buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init"

NO_EFFECT: Mapping[str, str] = {
    **_by_key(
        {
            "training.log_interval sets how often a line is printed": "steps_per_print",
            "training.profile shows where the time of a step goes": (
                "wall_clock_breakdown flops_profiler"
            ),
            "metrics.jsonl has step time, throughput and memory": (
                "memory_breakdown timers csv_monitor"
            ),
            "see parallel.activation_checkpointing": "activation_checkpointing",
            "see training.save_interval; a checkpoint fits every layout": "checkpoint datastates",
            "megaspeed plan --what-if ranks the layouts": "autotuning",
            "the gradient is the mean over the batch at every layout": (
                "prescale_gradients gradient_predivide_factor"
            ),
            "gradients of embeddings are dense": "sparse_gradients",
            "gradients are added to their sum after each micro-batch": (
                "bf16.immediate_grad_update"
            ),
            "inputs are token ids, which have no precision": "fp16.auto_cast bf16.auto_cast",
            "bf16 needs no loss scale": (
                "bf16.loss_scale bf16.initial_scale_power bf16.loss_scale_window bf16.hysteresis "
                "bf16.consecutive_hysteresis bf16.min_loss_scale"
            ),
            "updated parameters are always gathered": "disable_allgather",
            "megaspeed reads the data itself; see data": "dataloader_drop_last",
            "state is never moved to NVMe": "aio",
            "torch's AdamW is used": (
                "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
                "optimizer.params.torch_adam"
            ),
            "see model.vocab_size": "vocabulary_size",
        }
    ),
    **_by_key(
        {
            "export-hf writes 16-bit weights from any checkpoint": (
                "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
                "stage3_gather_fp16_weights_on_model_save"
            ),
            "a layer is gathered when a pass enters it, and freed when the pass leaves it": (
                "stage3_max_reuse_distance max_reuse_distance stage3_module_granularity_threshold "
                "module_granularity_threshold stage3_allgather_sequential allgather_sequential "
                "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
                "log_trace_cache_warnings"
            ),
            "gradients are reduced in contiguous buckets, each part to the rank that owns it": (
                "contiguous_gradients round_robin_gradients parameter_alignment legacy_stage1 "
                "ignore_unused_parameters"
            ),
            "see pin_memory of offload_optimizer and offload_param": "cpu_offload_use_pin_memory",
            "every step computes the gradient norm": "compute_grad_norm",
            "checkpoints have fp32 weights and fit every layout": (
                "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"
            ),
            "DeepSpeed's engine does not run the step": (
                "memory_efficient_linear override_module_apply zero_quantized_nontrainable_weights"
            ),
            "torch's AdamW is used": "offload_optimizer.cpuadam_cores_perc",
            "state is never moved to NVMe": "save_muon_momentum_buffer_in_memory",
        },
        "zero_optimization.",
    ),
    **_by_key({"state is never moved to NVMe": _NVME}, "zero_optimization.offload_param."),
    **_by_key({"state is never moved to NVMe": _NVME}, "zero_optimization.offload_optimizer."),
}
"""Key without effect -> why."""

_SIZES = ("zero_optimization.sub_group_size", "zero_optimization.reduce_bucket_size")
"""Numbers of elements whose 0 would mean that each parameter is sent or updated by itself."""

EFFECTIVE_STAGES: Mapping[str, tuple[int, ...]] = {
    "reduce_scatter": (1, 2, 3),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "allgather_partitions": (1, 2),
    "allgather_bucket_size": (1, 2),
    "offload_optimizer": (1, 2, 3),
    "offload_param": (3,),
    "sub_group_size": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
}
"""Key of zero_optimization -> the ZeRO stages at which it has an effect; the others: all stages."""

_WRONG_GROUPS = "it would replace megaspeed's process groups; set parallel."

REFUSED: Mapping[str, str] = _by_key(
    {
        "DeepSpeed 0.19 no longer supports it; remove it": (
            "nebula sparse_attention eigenvalue quantize_training compression_training "
            "progressive_layer_drop curriculum_learning graph_harvesting "
            "zero_optimization.zeropp_loco_param zero_optimization.mics_shard_size "
            "zero_optimization.mics_hierarchical_params_gather"
        ),
        "DeepSpeed 0.19 no longer supports it; remove it and use bf16": "amp",
        "DeepSpeed 0.19 has removed it; state train_batch_size, which stays the same at every "
        "world size": "elasticity",
        "megaspeed has its own pipeline; set parallel.pipeline": "pipeline",
        f"{_WRONG_GROUPS}tensor": "tensor_parallel",
        f"{_WRONG_GROUPS}sequence_parallel": "sequence_parallel_size",
        f"{_WRONG_GROUPS}data": "data_parallel_size",
        "it is for another kind of sequence parallelism; see parallel.sequence_parallel": (
            "seq_parallel_communication_data_type"
        ),
        "no model here has a mixture of experts; remove it": (
            "expert_parallel use_data_before_expert_parallelism zero_optimization.leaf_module"
        ),
        "megaspeed reads and orders the data itself, the same at every layout; see `data`": (
            "data_efficiency"
        ),
        "DeepSpeed recognises torch's own linear layers only, not tensor-parallel ones; use bf16": (
            "torch_autocast"
        ),
        "it is not for pretraining; remove it": "weight_quantization hybrid_engine",
        "DeepSpeed's compiler needs the complete model in one graph; set training.compile": (
            "compile"
        ),
        "the loss and its gradient are means over the complete batch at every layout; remove it": (
            "gradient_allreduce_op"
        ),
        "the pipeline schedule decides when gradients are added and when a step ends; remove it": (
            "managed_gradient_accumulation"
        ),
        "it is for optimizers that DeepSpeed compiles, but torch's AdamW is used; remove it": (
            "zero_optimization.offload_optimizer.super_offload optimizer.legacy_fusion"
        ),
        "weight decay is decoupled from the gradient in both Adam and AdamW; remove it": (
            "optimizer.params.adam_w_mode"
        ),
        "torch's AdamW corrects the bias of its running means, and has no AMSGrad; remove it": (
            "optimizer.params.bias_correction optimizer.params.amsgrad"
        ),
        "a resumed run continues its schedule by itself; remove it": (
            "scheduler.params.last_batch_iteration"
        ),
        "set gradient_clipping": "optimizer.params.max_grad_norm",
        'set communication_data_type to "fp32"': "fp32_allreduce",
        'Comet is not supported; set training.report_to: ["tensorboard", "wandb"], or remove it '
        "and read metrics.jsonl, which has every number of every step": "comet",
        "set bf16.enabled or fp16.enabled": "data_types.param_dtype",
        "every module and buffer has the type of the model; remove it": (
            "data_types.buffer_dtype data_types.keep_in_fp32_modules"
        ),
        "master weights and optimizer states are kept in fp32; remove it": (
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
            "fp16.fp16_master_weights_and_grads"
        ),
        "DeepSpeed compares over all ranks, but other pipeline stages wait for activations "
        "meanwhile: a deadlock; remove it": "zero_optimization.enable_sanity_checks",
        "DeepSpeed forms its groups from consecutive ranks, which is wrong with pipeline or tensor "
        "parallelism; remove it": (
            "zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_gradients"
        ),
        "with it, layouts would no longer train the same model; remove it": (
            "zero_optimization.zero_quantized_weights zero_optimization.zenflow"
        ),
        "optimizer states are offloaded completely or not at all; remove it": (
            "zero_optimization.offload_optimizer.ratio"
        ),
    }
)
"""Refused key -> reason and fix."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "sequence_parallel_size": (1,),
    "gradient_allreduce_op": ("mean",),
    "managed_gradient_accumulation": (True,),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.bias_correction": (True,),
    "scheduler.params.last_batch_iteration": (-1,),
}
"""Refused key -> the values with which it asks for nothing; the others: false."""

_DISABLED_BY_DEFAULT = (
    *("amp", "nebula", "eigenvalue", "elasticity", "curriculum_learning", "progressive_layer_drop"),
    *("data_efficiency", "torch_autocast", "hybrid_engine", "comet", "expert_parallel"),
)
"""Sections of DeepSpeed whose `enabled` is false if it is omitted."""


@dataclass(frozen=True)
class Accepted:
    """The values of megaspeed's keys, and what was found about the others.

    Attributes:
        values: the JSON without keys that megaspeed does not have.
        problems: one for each key that is refused.
        notes: a sentence for each group of keys that are renamed or have no effect.
        auto: megaspeed's keys that are "auto", which `values` does not have.
    """

    values: dict[str, Any]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    auto: tuple[KeyPath, ...]

    def all_notes(
        self, stated: Mapping[str, Any], resolved: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """The notes, and those about values that follow from other keys.

        Args:
            stated: the config's values with defaults.
            resolved: the same, with the values that are computed for a number of processes; None
                if that number is not known.
        """
        auto = ", ".join(
            f"{'.'.join(map(str, path))} {_computed_value(stated, resolved, path)}"
            for path in self.auto
        )
        notes = [f'"auto" is as if omitted: {auto}', *self.notes] if auto else list(self.notes)
        highest: KeyPath = ("scheduler", "params", "warmup_max_lr")
        rate = _at(resolved, highest)
        if rate not in (None, _WARMUP_MAX_LR) and (
            _at(stated, highest) is None and highest not in self.auto
        ):
            notes.append(
                "scheduler.params.warmup_max_lr is omitted, so it is optimizer.params.lr "
                f"{rate:g}; DeepSpeed's default is {_WARMUP_MAX_LR}"
            )
        return tuple(notes)


def accept(values: Mapping[str, Any], known: Collection[str]) -> Accepted:
    """Separates megaspeed's keys from DeepSpeed's others.

    Args:
        values: the JSON, which is not changed.
        known: megaspeed's keys as dotted paths. A key that nobody knows stays, and is found later.
    """
    tree = copy.deepcopy(dict(values))
    dropped: dict[str, list[str]] = defaultdict(list)
    auto: list[KeyPath] = []
    for path in [path for path in paths_in(tree) if path[0] not in _OWN]:
        name = ".".join(map(str, path))
        if str(path[-1]).startswith("_"):
            dropped["the name of a comment begins with _"].append(name)
        elif _at(tree, path) == "auto" and name in known:
            auto.append(path)
        elif name in _SIZES and _at(tree, path) == 0:
            dropped["0 stands for the default"].append(name)
    tree = _without_emptied(tree, auto)
    renamed, problems = _rename(tree)
    problems += _other_optimizers(tree)
    foreign: list[KeyPath] = [tuple(name.split(".")) for keys in dropped.values() for name in keys]
    for name, reason in {**NO_EFFECT, **REFUSED}.items():
        path = tuple(name.split("."))
        value = _at(tree, path, absent=...)
        if value is ...:
            continue
        foreign.append(path)
        if _is_off(name, value):
            dropped["off"].append(name)
        elif name in NO_EFFECT:
            dropped[reason].append(name)
        else:
            problems.append(Problem(path, f"{name} cannot be used here: {reason}"))
    kept = _without_emptied(tree, foreign)
    notes = [
        *renamed,
        *(f"no effect here: {', '.join(names)}: {reason}" for reason, names in dropped.items()),
        *_notes_of_stage(kept.get("zero_optimization")),
    ]
    return Accepted(kept, tuple(problems), tuple(notes), tuple(auto))


def _rename(tree: dict[str, Any]) -> tuple[list[str], list[Problem]]:
    """Gives old names in `tree` their new ones. Returns notes and problems."""
    notes: list[str] = []
    problems: list[Problem] = []
    for old, new in RENAMED.items():
        *section, name = old.split(".")
        owner = _at(tree, tuple(section))
        value = owner.pop(name, None) if isinstance(owner, dict) else None
        if value in (None, False, "auto"):
            continue
        value = {"device": "cpu"} if value is True else value
        *section, key = new.split(".")
        owner = tree.setdefault(section[0], {}) if section else tree
        if not isinstance(owner, dict):
            continue  # its type is a mistake that is found later
        stated = owner.setdefault(key, value)
        if _agree(stated, value):
            notes.append(f"{old} is read as {new}")
        else:
            message = f"{old} means {new}, which is also stated, with another value; remove it"
            problems.append(Problem(tuple(old.split(".")), message))
    return notes + _report_to(tree), problems


def _agree(stated: Any, value: Any) -> bool:
    """Whether a key has the value of its old name, or if both are objects, all of its values."""
    if isinstance(stated, dict) and isinstance(value, dict):
        return all(stated.get(key) == each for key, each in value.items())
    return bool(stated == value)


def _report_to(tree: dict[str, Any]) -> list[str]:
    """Replaces DeepSpeed's sections of services by `training.report_to`. Returns notes."""
    notes = []
    for service in SERVICES:
        training = tree.get("training")
        section = tree.pop(service, None)
        is_on = isinstance(section, dict) and section.get("enabled") not in (None, False)
        if is_on and isinstance(training, dict):
            reported = training.get("report_to") or []
            if isinstance(reported, list) and service not in reported:
                training["report_to"] = [*reported, service]
            notes.append(
                f'{service} is read as training.report_to ["{service}"], which has no other keys'
            )
    return notes


def _other_optimizers(tree: dict[str, Any]) -> list[Problem]:
    """A problem if the optimizer is another one. Its section is removed, with all its parameters.

    As in DeepSpeed, capital letters do not matter.
    """
    kind = _at(tree, ("optimizer", "type"))
    if not isinstance(kind, str):
        return []
    if kind.lower() in _ADAM:
        tree["optimizer"]["type"] = _ADAM[kind.lower()]
        return []
    del tree["optimizer"]
    return [
        Problem(
            ("optimizer",),
            f'optimizer.type {describe_value(kind)} is not available; write "AdamW" (or "Adam", '
            "which means the same here) with the params lr, betas, eps and weight_decay",
        )
    ]


def _is_off(name: str, value: Any) -> bool:
    """Whether a value asks for nothing. A section does if each of its parts is off."""
    if not isinstance(value, dict):
        return value in (None, "auto", *_OFF.get(name, (False,)))
    if "enabled" in value or name in _DISABLED_BY_DEFAULT:
        return value.get("enabled") in (None, False, "auto")
    return all(_is_off("", part) for part in value.values())


def _notes_of_stage(zero: Any) -> Iterator[str]:
    """A note about keys that have no effect at the stated ZeRO stage."""
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    names = [
        f"zero_optimization.{name}"
        for name, stages in EFFECTIVE_STAGES.items()
        if isinstance(zero, dict) and stage not in stages and _changes(name, zero.get(name))
    ]
    if names:
        yield f"no effect at zero_optimization.stage {stage}: {', '.join(names)}"


def _changes(name: str, value: Any) -> bool:
    """Whether a key of ZeRO has another value than its default."""
    if isinstance(value, dict):
        return value.get("device", "none") != "none"
    return value not in (None, ZeroConfig.model_fields[name].default)


def _computed_value(
    stated: Mapping[str, Any], resolved: Mapping[str, Any] | None, path: KeyPath
) -> str:
    """The value of a key that was omitted, and where it comes from."""
    default = _at(stated, path)
    if isinstance(default, dict):
        return "(default)"
    if default is not None:
        return f"{json.dumps(default)} (default)"
    if resolved is None:
        return "(depends on the number of processes)"
    value = _at(resolved, path)
    return "(not set)" if value is None else f"{json.dumps(value)} (computed)"


def _at(tree: Any, path: KeyPath, absent: Any = None) -> Any:
    """The value at a path of keys."""
    for part in path:
        tree = tree.get(part, absent) if isinstance(tree, dict) else absent
    return tree


def _without_emptied(tree: Mapping[str, Any], paths: Collection[KeyPath]) -> dict[str, Any]:
    """`without`, and without the objects that have no other keys, because they state nothing."""
    kept = without(tree, paths)
    parents = {path[:length] for path in paths for length in range(1, len(path))}
    for parent in sorted(parents, key=len, reverse=True):
        if _at(kept, parent) == {}:
            kept = without(kept, [parent])
    return kept


def without(values: Mapping[str, Any], paths: Collection[KeyPath]) -> dict[str, Any]:
    """A copy of a tree without the values at these paths, if they exist."""
    below: dict[str | int, list[KeyPath]] = defaultdict(list)
    for path in paths:
        below[path[0]].append(path[1:])
    kept: dict[str, Any] = {}
    for key, value in values.items():
        inner = below.get(key, [])
        if () not in inner:
            kept[key] = without(value, inner) if inner and isinstance(value, dict) else value
    return kept
