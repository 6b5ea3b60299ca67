"""Keys of DeepSpeed 0.19.8 that cannot work here. Each is refused with a reason and a fix.

A value that has no effect (`"prescale_gradients": false`) is accepted, and not passed to DeepSpeed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from megaspeed.config.errors import KeyPath, Problem

_OFF = (False, None)
_ON = (True, None)
_EITHER = (True, False, None)

_REASONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "DeepSpeed 0.19 no longer supports it; remove it": {
        "nebula": (),
        "sparse_attention": (),
        "sparse_gradients": _OFF,
        "eigenvalue": (),
        "quantize_training": (),
        "compression_training": (),
        "progressive_layer_drop": (),
        "curriculum_learning": (),
        "graph_harvesting": _OFF,
        "zero_optimization.zeropp_loco_param": (),
        "zero_optimization.mics_shard_size": (-1, None),
        "zero_optimization.mics_hierarchical_params_gather": _OFF,
    },
    "DeepSpeed 0.19 no longer supports it; remove it and use bf16": {"amp": ()},
    "DeepSpeed 0.19 has removed it; state train_batch_size, which stays the same at every world "
    "size": {"elasticity": ()},
    "it is an old name; write bf16": {"bfloat16": ()},
    'it is an old name; write "offload_optimizer": {"device": "cpu"}': {
        "zero_optimization.cpu_offload": _OFF
    },
    'it is an old name; write "offload_param": {"device": "cpu"}': {
        "zero_optimization.cpu_offload_param": _OFF
    },
    "it is an old name; set pin_memory in offload_optimizer or offload_param": {
        "zero_optimization.cpu_offload_use_pin_memory": _OFF
    },
    "megaspeed has its own pipeline; set parallel.pipeline": {"pipeline": ()},
    "it would replace megaspeed's process groups; set parallel.tensor": {"tensor_parallel": ()},
    "it would replace megaspeed's process groups; set parallel.sequence_parallel": {
        "sequence_parallel_size": ()
    },
    "it would replace megaspeed's process groups; set parallel.data": {"data_parallel_size": ()},
    "it is for another kind of sequence parallelism; see parallel.sequence_parallel": {
        "seq_parallel_communication_data_type": ()
    },
    "no model here has a mixture of experts; remove it": {
        "expert_parallel": (),
        "use_data_before_expert_parallelism": _OFF,
        "zero_optimization.leaf_module": (),
    },
    "it configures deepspeed.checkpointing, which is not used here; set "
    "parallel.activation_checkpointing": {"activation_checkpointing": ()},
    "megaspeed writes its own checkpoints, which fit every layout; remove it": {
        "checkpoint": (),
        "datastates": (),
        "zero_optimization.load_from_fp32_weights": _ON,
        "zero_optimization.elastic_checkpoint": _OFF,
        "zero_optimization.pipeline_loading_checkpoint": _OFF,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OFF,
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": _OFF,
    },
    "megaspeed reads and orders the data itself, the same at every layout; see `data`": {
        "data_efficiency": (),
        "dataloader_drop_last": _OFF,
    },
    "DeepSpeed recognises torch's own linear layers only, not tensor-parallel ones; use bf16": {
        "torch_autocast": ()
    },
    "it is not for pretraining; remove it": {"weight_quantization": (), "hybrid_engine": ()},
    "it launches DeepSpeed's own trials of a layout; remove it": {"autotuning": ()},
    "DeepCompile needs the complete model in one graph on a GPU; remove it": {"compile": ()},
    "the loss and its gradient are means over the complete batch at every layout; remove it": {
        "prescale_gradients": _OFF,
        "gradient_predivide_factor": (1, None),
        "gradient_allreduce_op": ("mean", None),
    },
    "the pipeline schedule decides when gradients are added and when a step ends; remove it": {
        "managed_gradient_accumulation": _ON,
        "bf16.immediate_grad_update": _OFF,
    },
    "ranks would keep stale parameters; remove it": {"disable_allgather": _OFF},
    "it is for optimizers that DeepSpeed compiles, but torch's AdamW is used; remove it": {
        "zero_force_ds_cpu_optimizer": _OFF,
        "zero_optimization.offload_optimizer.super_offload": _OFF,
        "zero_optimization.offload_optimizer.cpuadam_cores_perc": (),
        "optimizer.legacy_fusion": _OFF,
    },
    "weight decay is decoupled from the gradient in both Adam and AdamW; remove it": {
        "optimizer.params.adam_w_mode": _ON
    },
    "set gradient_clipping": {"optimizer.params.max_grad_norm": ()},
    "DeepSpeed's monitors would get the learning rate alone, against a number of samples that is "
    "not the run's; remove it and read metrics.jsonl, which has every number of every step, or set "
    'training.report_to: ["tensorboard", "wandb"]': {
        "tensorboard": (None,),
        "csv_monitor": (None,),
        "wandb": (None,),
        "comet": (None,),
    },
    "megaspeed measures the throughput itself; remove it": {"timers": ()},
    "set bf16.enabled or fp16.enabled": {"data_types.param_dtype": (None,)},
    "every module and buffer has the type of the model; remove it": {
        "data_types.buffer_dtype": (None,),
        "data_types.keep_in_fp32_modules": ("auto", None),
        "fp16.auto_cast": _OFF,
    },
    "master weights and optimizer states are kept in fp32; remove it": {
        "bf16.bf16_master_weights_and_grads": _OFF,
        "bf16.bf16_optimizer_states": _OFF,
        "fp16.fp16_master_weights_and_grads": _OFF,
    },
    "every step needs the gradient norm, for clipping and for metrics.jsonl; remove it": {
        "zero_optimization.compute_grad_norm": _ON
    },
    "DeepSpeed compares over all ranks, but other pipeline stages wait for activations meanwhile: "
    "a deadlock; remove it": {"zero_optimization.enable_sanity_checks": _OFF},
    "it changes the flat buffers from which tied embeddings on two pipeline stages exchange "
    "gradients; remove it": {
        "zero_optimization.round_robin_gradients": _OFF,
        "zero_optimization.parameter_alignment": _OFF,
    },
    "DeepSpeed forms its groups from consecutive ranks, which is wrong with pipeline or tensor "
    "parallelism; remove it": {
        "zero_optimization.zero_hpz_partition_size": (0, 1, None),
        "zero_optimization.zero_quantized_gradients": _OFF,
    },
    "with it, layouts would no longer train the same model; remove it": {
        "zero_optimization.zero_quantized_weights": _OFF,
        "zero_optimization.zenflow": (None,),
    },
    "it has no effect here; remove it": {
        "vocabulary_size": (),
        "zero_allow_untested_optimizer": _EITHER,
        "zero_optimization.zero_quantized_nontrainable_weights": _OFF,
        "zero_optimization.ignore_unused_parameters": _EITHER,
        "zero_optimization.legacy_stage1": _OFF,
        "zero_optimization.memory_efficient_linear": _EITHER,
        "zero_optimization.override_module_apply": _ON,
    },
    "a layer is gathered in one all-gather when a pass enters it, and freed when the pass leaves "
    "it; remove it": {
        "zero_optimization.stage3_max_reuse_distance": (0, None),
        "zero_optimization.stage3_module_granularity_threshold": (0, None),
        "zero_optimization.stage3_allgather_sequential": _OFF,
        "zero_optimization.stage3_use_all_reduce_for_fetch_params": _OFF,
        "zero_optimization.log_trace_cache_warnings": _OFF,
    },
    "it is for NVMe offload; state can only move to host memory, so remove it": {
        "aio": (),
        "zero_optimization.save_muon_momentum_buffer_in_memory": (),
        "zero_optimization.offload_param.nvme_path": (),
        "zero_optimization.offload_param.buffer_count": (),
        "zero_optimization.offload_param.buffer_size": (),
        "zero_optimization.offload_param.max_in_cpu": (),
        "zero_optimization.offload_optimizer.nvme_path": (),
        "zero_optimization.offload_optimizer.buffer_count": (),
        "zero_optimization.offload_optimizer.pipeline_read": (),
        "zero_optimization.offload_optimizer.pipeline_write": (),
        "zero_optimization.offload_optimizer.fast_init": (),
    },
    "optimizer states are offloaded completely or not at all; remove it": {
        "zero_optimization.offload_optimizer.ratio": (1, None)
    },
}
"""Reason and fix -> the refused keys, each with the values that have no effect."""

REFUSED_KEYS: Mapping[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys}
"""Refused key -> reason and fix."""

_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")
"""Sections that have no effect unless they are enabled."""


def refuse_foreign_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Removes DeepSpeed's keys that cannot work.

    Returns:
        A copy of the values without them, and a problem for each that would have an effect.
    """
    problems = []
    for name, reason in REFUSED_KEYS.items():
        section: Any = values
        *sections, key = path = tuple(name.split("."))
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section:
            value = section[key]
            if name in _MONITORS and isinstance(value, dict):
                value = value.get("enabled") or None
            if value not in _REASONS[reason][name]:
                problems.append(Problem(path, f"{name} cannot be used here: {reason}"))
    return without(values, [tuple(name.split(".")) for name in REFUSED_KEYS]), problems


def without(values: Mapping[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
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
