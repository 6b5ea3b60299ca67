"""Read DeepSpeed's files as they are: keys that megaspeed does not have, and "auto".

    values of the JSON -> ``accept`` -> values of megaspeed's keys, problems, notes

    RENAMED       an old name, or a section that asks for what megaspeed has under another name
    NO_EFFECT     a key for tuning, saving or logging: the run is the same without it
    REFUSED       a key that would change what is trained, or that asks for what megaspeed does not
                  do; accepted if its value switches it off

A note names each key that is accepted without its effect. ``deepspeed_keys.py`` has the keys of
DeepSpeed 0.19.8 that work.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megaspeed.config.document import describe_value, paths_in
from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.config.layout import BATCH_KEYS

SERVICES = ("tensorboard", "wandb")
"""Sections that are read as entries of training.report_to if they are enabled."""

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
"""Old name -> the key that means the same. If an old name of offload is true, it means the CPU."""


def _by_key(table: Mapping[str, str], section: str = "") -> dict[str, str]:
    """Key -> reason, from reason -> keys of a section."""
    return {f"{section}{key}": reason for reason, keys in table.items() for key in keys.split()}


_NVME = "nvme_path buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init"
_ADAMW = "the optimizer is torch's AdamW"

NO_EFFECT: Mapping[str, str] = {
    **_by_key(
        {
            "see training.log_interval": "steps_per_print",
            "see training.profile": "wall_clock_breakdown flops_profiler comms_logger",
            "the run folder has config.json and metrics.jsonl": (
                "dump_state memory_breakdown timers csv_monitor"
            ),
            "see parallel.activation_checkpointing": "activation_checkpointing",
            "see training.save_interval; a checkpoint fits every layout": "checkpoint datastates",
            "megaspeed plan --what-if ranks the layouts": "autotuning",
            "the gradient is the mean over the batch at every layout": (
                "prescale_gradients gradient_predivide_factor"
            ),
            "gradients are dense, and added to their sum after each micro-batch": (
                "sparse_gradients bf16.immediate_grad_update"
            ),
            "inputs are token ids, which have no precision": "fp16.auto_cast bf16.auto_cast",
            "bf16 needs no loss scale": (
                "bf16.loss_scale bf16.initial_scale_power bf16.loss_scale_window bf16.hysteresis "
                "bf16.consecutive_hysteresis bf16.min_loss_scale"
            ),
            "updated parameters are always gathered": "disable_allgather",
            "megaspeed reads the data itself; see data": "dataloader_drop_last",
            "state is never moved to NVMe": "aio",
            _ADAMW: (
                "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
                "optimizer.params.torch_adam zero_optimization.offload_optimizer.cpuadam_cores_perc"
            ),
            "see model.vocab_size": "vocabulary_size",
            "gram is another order of the same Newton-Schulz steps; see ns_dtype": (
                "optimizer.params.ns_method"
            ),
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
                "log_trace_cache_warnings memory_efficient_linear override_module_apply "
                "zero_quantized_nontrainable_weights"
            ),
            "gradients are reduced in contiguous buckets, each part to the rank that owns it": (
                "contiguous_gradients round_robin_gradients parameter_alignment legacy_stage1 "
                "ignore_unused_parameters compute_grad_norm"
            ),
            "updated parameters are gathered in the buckets of reduce_bucket_size": (
                "allgather_bucket_size allgather_partitions"
            ),
            "see pin_memory of offload_optimizer and offload_param": "cpu_offload_use_pin_memory",
            "checkpoints have fp32 weights and fit every layout": (
                "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"
            ),
            "state is never moved to NVMe": "save_muon_momentum_buffer_in_memory",
        },
        "zero_optimization.",
    ),
    **_by_key({"state is never moved to NVMe": _NVME}, "zero_optimization.offload_param."),
    **_by_key({"state is never moved to NVMe": _NVME}, "zero_optimization.offload_optimizer."),
}
"""Key without effect -> why."""

REFUSED: Mapping[str, str] = _by_key(
    {
        "DeepSpeed 0.19 no longer supports it; remove it": (
            "nebula sparse_attention eigenvalue quantize_training compression_training "
            "progressive_layer_drop curriculum_learning graph_harvesting elasticity "
            "zero_optimization.zeropp_loco_param zero_optimization.mics_hierarchical_params_gather"
        ),
        "here ZeRO partitions over dp / parallel.replicate neighbours on the data axis, and sums "
        "gradients over the replicas; set parallel.replicate to dp / this number": (
            "zero_optimization.zero_hpz_partition_size zero_optimization.mics_shard_size"
        ),
        "the model computes in one type; set bf16.enabled or fp16.enabled": (
            "amp torch_autocast data_types.param_dtype data_types.buffer_dtype "
            "data_types.keep_in_fp32_modules"
        ),
        "master weights and optimizer states are kept in fp32; remove it": (
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
            "fp16.fp16_master_weights_and_grads"
        ),
        "megaspeed has its own pipeline; set parallel.pipeline": "pipeline",
        "it would replace megaspeed's process groups; set parallel.tensor, parallel.data or "
        "parallel.sequence_parallel": (
            "tensor_parallel sequence_parallel_size data_parallel_size "
            "seq_parallel_communication_data_type"
        ),
        "no token is dropped, because a capacity depends on the micro-batch, so another layout "
        "would train another model; remove it": (
            "model.capacity_factor model.expert_capacity_factor model.moe_expert_capacity_factor"
        ),
        "neighbouring ranks of a pipeline stage share the experts; set parallel.expert": (
            "expert_parallel use_data_before_expert_parallelism"
        ),
        "a block is gathered as a whole; remove it": "zero_optimization.leaf_module",
        "megaspeed orders the data itself, the same at every layout; see `data`": "data_efficiency",
        "it is not for pretraining; remove it": "weight_quantization hybrid_engine",
        "DeepSpeed's compiler needs the complete model in one graph; set training.compile": (
            "compile"
        ),
        "the loss and its gradient are means over the complete batch at every layout; remove it": (
            "gradient_allreduce_op managed_gradient_accumulation"
        ),
        f"{_ADAMW}, which corrects the bias of its running means and decouples weight decay; "
        "remove it": (
            "optimizer.params.adam_w_mode optimizer.params.bias_correction "
            "optimizer.params.amsgrad optimizer.legacy_fusion "
            "zero_optimization.offload_optimizer.super_offload"
        ),
        "a resumed run continues its schedule by itself; remove it": (
            "scheduler.params.last_batch_iteration"
        ),
        "set gradient_clipping": "optimizer.params.max_grad_norm",
        'set communication_data_type to "fp32"': "fp32_allreduce",
        'set training.report_to: ["tensorboard", "wandb"], or read metrics.jsonl': "comet",
        "DeepSpeed compares over all ranks, but other pipeline stages wait for activations "
        "meanwhile: a deadlock; remove it": "zero_optimization.enable_sanity_checks",
        "DeepSpeed forms its groups from consecutive ranks, which is wrong with pipeline or tensor "
        'parallelism; set parallel.gradient_compression to "int8"': (
            "zero_optimization.zero_quantized_gradients"
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
"""Refused key -> the values that switch it off; for all other keys: false."""

_DISABLED_BY_DEFAULT = (
    *("amp", "nebula", "eigenvalue", "elasticity", "curriculum_learning", "progressive_layer_drop"),
    *("data_efficiency", "torch_autocast", "hybrid_engine", "comet", "expert_parallel", *SERVICES),
)
"""Sections of DeepSpeed whose ``enabled`` is false if it is omitted."""

_OWN = ("model", "parallel", "data", "training")
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "muon": "Muon"}

_SIZES = ("zero_optimization.sub_group_size", "zero_optimization.reduce_bucket_size")
"""Keys for which 0 would mean that each parameter is sent or updated separately."""

_FOLLOWS = "it follows from the other two numbers of the batch"

_STAGES = {
    "stage3_": (3,),
    "sub_group_size": (3,),
    "offload_param": (3,),
    "offload_optimizer": (1, 2, 3),
    "use_multi_rank_bucket_allreduce": (1, 2),
}
"""Key of zero_optimization, or how it begins -> the stages at which it has an effect."""


@dataclass(frozen=True)
class Accepted:
    """The values of megaspeed's keys, and what was found about the others."""

    values: dict[str, Any]  # the JSON without keys that megaspeed does not have
    problems: tuple[Problem, ...]  # one for each key that is refused
    notes: tuple[str, ...]  # a sentence for each group of keys that have another name or no effect
    auto: tuple[KeyPath, ...]  # megaspeed's keys that are "auto", which ``values`` does not have

    def all_notes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the notes, and one with the values of ``config`` for the keys that are "auto"."""
        auto = ", ".join(f"{dotted(path)} {json.dumps(_at(config, path))}" for path in self.auto)
        return (f'"auto" means omitted here: {auto}', *self.notes) if auto else self.notes


def accept(values: Mapping[str, Any], known: Collection[str]) -> Accepted:
    """Separate megaspeed's keys from DeepSpeed's others.

    Args:
        values: the JSON, which is not changed.
        known: megaspeed's keys as dotted paths. An unknown key stays, and is refused later.
    """
    tree = copy.deepcopy(dict(values))
    notes: list[str] = []
    problems: list[Problem] = []
    _rename(tree, notes, problems)
    _refuse_other_optimizers(tree, problems)
    # What happens to a key -> the reason -> the keys, in the order in which the JSON has them.
    sorted_keys: dict[str, dict[str, list[KeyPath]]] = defaultdict(lambda: defaultdict(list))
    train, micro, accumulation = (tree.get(key) for key in BATCH_KEYS)
    chooses = micro == "auto" and train not in (None, "auto") and accumulation in (None, "auto")
    zero_stage = _at(tree, ("zero_optimization", "stage")) or 0
    for path in (p for p in paths_in(tree) if p[0] not in _OWN or dotted(p) in REFUSED):
        name, value, stages = dotted(path), _at(tree, path), _stages_of(path)
        is_for_others = bool(stages) and zero_stage not in stages and value is not None
        table = (
            (str(path[-1]).startswith("_"), "dropped", "the name of a comment begins with _"),
            (chooses and name == BATCH_KEYS[1], "chosen", ""),
            (chooses and name == BATCH_KEYS[2], "dropped", _FOLLOWS),
            (value == "auto" and name in known, "auto", ""),
            (name in _SIZES and value == 0, "dropped", "0 stands for the default"),
            (name in NO_EFFECT, "dropped", NO_EFFECT.get(name, "")),
            (name in REFUSED and _is_off(name, value), "dropped", "this value changes nothing"),
            (name in REFUSED, "refused", ""),
            (is_for_others, "kept", f"it is for ZeRO-{', '.join(map(str, stages))}"),
        )
        for applies, what, reason in table:
            if applies:
                sorted_keys[what][reason].append(path)
                break
    auto, dropped, kept = sorted_keys["auto"][""], sorted_keys["dropped"], sorted_keys["kept"]
    notes += (
        f'{dotted(path)} "auto": a run takes the largest size that is predicted to fit'
        for path in sorted_keys["chosen"][""]
    )
    for path in sorted_keys["refused"][""]:
        reason = REFUSED[dotted(path)].replace("this number", json.dumps(_at(tree, path)))
        problems.append(Problem(path, f"{dotted(path)} cannot be used here: {reason}"))
    for path in chain(auto, *dropped.values(), (problem.path for problem in problems)):
        remove(tree, path)
    notes += (
        f"no effect here: {', '.join(map(dotted, paths))}: {reason}"
        for reason, paths in chain(dropped.items(), kept.items())
    )
    return Accepted(tree, tuple(problems), tuple(notes), tuple(auto))


def _stages_of(path: KeyPath) -> tuple[int, ...]:
    """Return the ZeRO stages at which a key has an effect; none if that is not decided by them."""
    if path[:-1] != ("zero_optimization",):
        return ()
    name = str(path[-1])
    return _STAGES.get("stage3_" if name.startswith("stage3_") else name, ())


def remove(tree: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at a path, if it exists, and the objects that are empty without it."""
    *section, name = path
    owner = _at(tree, tuple(section))
    if isinstance(owner, dict):
        owner.pop(name, None)
        if section and not owner:
            remove(tree, tuple(section))


def _rename(tree: dict[str, Any], notes: list[str], problems: list[Problem]) -> None:
    """Give old names in ``tree`` their new ones."""
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        tree["zero_optimization"] = {"stage": int(zero)}
        notes.append(f"zero_optimization is read as zero_optimization.stage {int(zero)}")
    for old, new in RENAMED.items():
        path = tuple(old.split("."))
        value = _at(tree, path)
        remove(tree, path)
        is_off = new == "parallel.tensor" and value == 0
        if value in (None, "auto") or value is False or is_off:
            if value == "auto":
                notes.append(f'"auto" means omitted here: {old}')
            continue
        if value is True and "offload" in old:
            value = {"device": "cpu"}
        *section, key = new.split(".")
        owner = tree.setdefault(section[0], {}) if section else tree
        if not isinstance(owner, dict):
            continue  # its type is a mistake that is found later
        if owner.setdefault(key, value) == value:
            notes.append(f"{old} is read as {new}")
        else:
            message = f"{old} means {new}, which is also stated, with another value; remove it"
            problems.append(Problem(path, message))
    for service in SERVICES:
        section, training = tree.pop(service, None), tree.get("training")
        is_on = isinstance(section, dict) and not _is_off(service, section)
        if is_on and isinstance(training, dict):
            reported = training.get("report_to") or []
            if isinstance(reported, list) and service not in reported:
                training["report_to"] = [*reported, service]
            notes.append(
                f'{service} is read as training.report_to ["{service}"], which has no other keys'
            )


def _refuse_other_optimizers(tree: dict[str, Any], problems: list[Problem]) -> None:
    """Refuse another optimizer once, and remove its section, with all its parameters.

    As in DeepSpeed, capital letters do not matter.
    """
    kind = _at(tree, ("optimizer", "type"))
    if isinstance(kind, str) and kind.lower() in _OPTIMIZERS:
        tree["optimizer"]["type"] = _OPTIMIZERS[kind.lower()]
    elif isinstance(kind, str) and kind != "auto":
        del tree["optimizer"]
        message = (
            f'optimizer.type {describe_value(kind)} is not available; write "AdamW" (or "Adam", '
            'which means the same here) with the params lr, betas, eps and weight_decay, or "Muon"'
        )
        problems.append(Problem(("optimizer",), message))


def _is_off(name: str, value: Any) -> bool:
    """Return whether a value switches its key off. A section is off if each of its parts is."""
    if not isinstance(value, dict):
        return value in (None, "auto", *_OFF.get(name, (False,)))
    if "shared_parameters" in value:  # of a method of compression_training
        return _is_off("", value["shared_parameters"])
    if "enabled" in value or name in _DISABLED_BY_DEFAULT:
        return value.get("enabled") in (None, False, "auto")
    return all(_is_off("", part) for part in value.values())


def _at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path of keys; None if there is none."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
