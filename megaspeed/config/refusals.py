"""Keys of DeepSpeed 0.19.8 that cannot work here, each with the reason and a fix.

A value that has no effect (`"prescale_gradients": false`) is accepted, and not passed to DeepSpeed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.config.run import DeepSpeedKeys


@dataclass(frozen=True)
class Refusal:
    """Why a key cannot be used and what to do instead."""

    reason: str
    inert: tuple[Any, ...] = ()
    """Values that have no effect, so they are accepted."""
    is_off_unless_enabled: bool = False
    """Whether the key is a section that has no effect unless its `enabled` is true."""

    def lets_pass(self, value: Any) -> bool:
        """Whether this value has no effect, so it is accepted."""
        if self.is_off_unless_enabled and isinstance(value, dict):
            return value.get("enabled") in _OFF
        return value in self.inert


_OFF = (False, None)
_NVME_ONLY = Refusal("it belongs to NVMe offload; state can only move to host memory, so remove it")
_MASTER_WEIGHTS = "master weights and optimizer states are kept in fp32; remove it"
_REMOVED = "DeepSpeed 0.19 no longer supports it; remove it"
_ZERO_PLUS_PLUS = (
    "DeepSpeed forms its groups from consecutive ranks of the whole world, which is wrong "
    "beside pipeline or tensor parallelism; remove it"
)
_WHOLE_LAYERS = (
    "a layer is gathered in one all-gather when a pass enters it, and freed when the pass leaves "
    "it; remove it"
)
_MEAN = "the loss and its gradient are means over the whole batch at every layout; remove it"
_OWN_CHECKPOINTS = "megaspeed writes its own checkpoints, which fit every layout; remove it"
_MONITOR = Refusal(
    "DeepSpeed's monitors would get the learning rate alone, against a number of samples that is "
    "not the run's; remove it and read metrics.jsonl, which has every number of every step, or set "
    'training.report_to: ["tensorboard", "wandb"]',
    (None,),
    is_off_unless_enabled=True,
)
_OWN_DATA = "megaspeed reads and orders the data itself, the same at every layout; see `data`"

REFUSED_KEYS: Mapping[str, Refusal] = {
    "pipeline": Refusal("the pipeline is megaspeed's own; set parallel.pipeline"),
    "tensor_parallel": Refusal("it would replace megaspeed's process groups; set parallel.tensor"),
    "sequence_parallel_size": Refusal(
        "it would replace megaspeed's process groups; set parallel.sequence_parallel"
    ),
    "data_parallel_size": Refusal("it would replace megaspeed's process groups; set parallel.data"),
    "expert_parallel": Refusal("there are no mixture-of-experts models here; remove it"),
    "use_data_before_expert_parallelism": Refusal(
        "there are no mixture-of-experts models here; remove it", _OFF
    ),
    "activation_checkpointing": Refusal(
        "it configures deepspeed.checkpointing, which is not used here; set "
        "parallel.activation_checkpointing"
    ),
    "checkpoint": Refusal(_OWN_CHECKPOINTS),
    "nebula": Refusal(_REMOVED),
    "datastates": Refusal(_OWN_CHECKPOINTS),
    "amp": Refusal(f"{_REMOVED} and use bf16"),
    "torch_autocast": Refusal(
        "DeepSpeed recognises torch's own linear layers only, not tensor-parallel ones; use bf16"
    ),
    "bfloat16": Refusal("it is an old name; write bf16"),
    "sparse_attention": Refusal(_REMOVED),
    "sparse_gradients": Refusal(_REMOVED, _OFF),
    "eigenvalue": Refusal(_REMOVED),
    "quantize_training": Refusal(_REMOVED),
    "compression_training": Refusal(_REMOVED),
    "progressive_layer_drop": Refusal(_REMOVED),
    "curriculum_learning": Refusal(_REMOVED),
    "graph_harvesting": Refusal(_REMOVED, _OFF),
    "elasticity": Refusal(
        "DeepSpeed 0.19 has removed it; state train_batch_size, which stays the same at every "
        "world size"
    ),
    "weight_quantization": Refusal("it serves inference only; remove it"),
    "hybrid_engine": Refusal("it serves generation while training; remove it"),
    "autotuning": Refusal("it launches DeepSpeed's own trials of a layout; remove it"),
    "compile": Refusal("DeepCompile needs the whole model in one graph on a GPU; remove it"),
    "aio": _NVME_ONLY,
    "data_efficiency": Refusal(_OWN_DATA),
    "dataloader_drop_last": Refusal(_OWN_DATA, _OFF),
    "vocabulary_size": Refusal("it only makes DeepSpeed warn; set model.vocab_size"),
    "prescale_gradients": Refusal(_MEAN, _OFF),
    "gradient_predivide_factor": Refusal(_MEAN, (1, None)),
    "gradient_allreduce_op": Refusal(_MEAN, ("mean", None)),
    "managed_gradient_accumulation": Refusal(
        "the pipeline schedule decides when a step ends; remove it", (True, None)
    ),
    "disable_allgather": Refusal("ranks would keep stale parameters; remove it", _OFF),
    "seq_parallel_communication_data_type": Refusal(
        "it belongs to another kind of sequence parallelism; see parallel.sequence_parallel"
    ),
    "zero_allow_untested_optimizer": Refusal(
        "Adam and AdamW need no permission; remove it", (True, False, None)
    ),
    "zero_force_ds_cpu_optimizer": Refusal(
        "DeepSpeed's CPU optimizer has to be compiled when a run starts; torch's AdamW is used, "
        "so remove it",
        _OFF,
    ),
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": _MONITOR,
    "comet": _MONITOR,
    "timers": Refusal("megaspeed measures the throughput itself; remove it"),
    "optimizer.legacy_fusion": Refusal("it belongs to fused optimizers; remove it", _OFF),
    "optimizer.params.adam_w_mode": Refusal(
        "weight decay is decoupled from the gradient in both Adam and AdamW; remove it",
        (True, None),
    ),
    "optimizer.params.max_grad_norm": Refusal("set gradient_clipping"),
    "data_types.param_dtype": Refusal("set bf16.enabled or fp16.enabled", (None,)),
    "data_types.buffer_dtype": Refusal("buffers keep the type of the model; remove it", (None,)),
    "data_types.keep_in_fp32_modules": Refusal(
        "every module has the type of the model; remove it", ("auto", None)
    ),
    "bf16.immediate_grad_update": Refusal(
        "gradients are taken over where the pipeline schedule says; remove it", _OFF
    ),
    "bf16.bf16_master_weights_and_grads": Refusal(_MASTER_WEIGHTS, _OFF),
    "bf16.bf16_optimizer_states": Refusal(_MASTER_WEIGHTS, _OFF),
    "fp16.auto_cast": Refusal("token ids are not cast; remove it", _OFF),
    "fp16.fp16_master_weights_and_grads": Refusal(_MASTER_WEIGHTS, _OFF),
    "zero_optimization.compute_grad_norm": Refusal(
        "every step needs the gradient norm, for clipping and for metrics.jsonl; remove it",
        (True, None),
    ),
    "zero_optimization.enable_sanity_checks": Refusal(
        "DeepSpeed compares over the whole world, where other pipeline stages wait for "
        "activations: a deadlock; remove it",
        _OFF,
    ),
    "zero_optimization.round_robin_gradients": Refusal(
        "it moves parameters within the flat buffers that tied embeddings on two pipeline stages "
        "exchange gradients from; remove it",
        _OFF,
    ),
    "zero_optimization.parameter_alignment": Refusal(
        "it pads the flat buffers that tied embeddings on two pipeline stages exchange gradients "
        "from; remove it",
        _OFF,
    ),
    "zero_optimization.zero_hpz_partition_size": Refusal(_ZERO_PLUS_PLUS, (0, 1, None)),
    "zero_optimization.zero_quantized_weights": Refusal(
        "it changes the parameters that the forward pass sees, so that layouts no longer train "
        "the same model; remove it",
        _OFF,
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": Refusal(
        "every parameter is trained here; remove it", _OFF
    ),
    "zero_optimization.zero_quantized_gradients": Refusal(_ZERO_PLUS_PLUS, _OFF),
    "zero_optimization.zeropp_loco_param": Refusal(_REMOVED),
    "zero_optimization.mics_shard_size": Refusal(_REMOVED, (-1, None)),
    "zero_optimization.mics_hierarchical_params_gather": Refusal(_REMOVED, _OFF),
    "zero_optimization.zenflow": Refusal(
        "it delays updates, so that layouts no longer train the same model; remove it", (None,)
    ),
    "zero_optimization.legacy_stage1": Refusal("there is one stage 1; remove it", _OFF),
    "zero_optimization.ignore_unused_parameters": Refusal(
        "every parameter is used; remove it", (True, False, None)
    ),
    "zero_optimization.leaf_module": Refusal("it serves mixture of experts; remove it"),
    "zero_optimization.stage3_max_reuse_distance": Refusal(_WHOLE_LAYERS, (0, None)),
    "zero_optimization.stage3_module_granularity_threshold": Refusal(_WHOLE_LAYERS, (0, None)),
    "zero_optimization.stage3_allgather_sequential": Refusal(_WHOLE_LAYERS, _OFF),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Refusal(_WHOLE_LAYERS, _OFF),
    "zero_optimization.log_trace_cache_warnings": Refusal(
        "the order in which layers are gathered is fixed, so there is no trace; remove it", _OFF
    ),
    "zero_optimization.memory_efficient_linear": Refusal(
        "no layer keeps a gathered weight; remove it", (True, False, None)
    ),
    "zero_optimization.override_module_apply": Refusal(
        "parameters are initialised before DeepSpeed sees them; remove it", (True, None)
    ),
    "zero_optimization.load_from_fp32_weights": Refusal(_OWN_CHECKPOINTS, (True, None)),
    "zero_optimization.elastic_checkpoint": Refusal(_OWN_CHECKPOINTS, _OFF),
    "zero_optimization.pipeline_loading_checkpoint": Refusal(_OWN_CHECKPOINTS, _OFF),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Refusal(_OWN_CHECKPOINTS, _OFF),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Refusal(_OWN_CHECKPOINTS, _OFF),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _NVME_ONLY,
    "zero_optimization.cpu_offload": Refusal(
        'it is an old name; write "offload_optimizer": {"device": "cpu"}', _OFF
    ),
    "zero_optimization.cpu_offload_param": Refusal(
        'it is an old name; write "offload_param": {"device": "cpu"}', _OFF
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Refusal(
        "it is an old name; set pin_memory in offload_optimizer or offload_param", _OFF
    ),
    "zero_optimization.offload_param.nvme_path": _NVME_ONLY,
    "zero_optimization.offload_param.buffer_count": _NVME_ONLY,
    "zero_optimization.offload_param.buffer_size": _NVME_ONLY,
    "zero_optimization.offload_param.max_in_cpu": _NVME_ONLY,
    "zero_optimization.offload_optimizer.nvme_path": _NVME_ONLY,
    "zero_optimization.offload_optimizer.buffer_count": _NVME_ONLY,
    "zero_optimization.offload_optimizer.pipeline_read": _NVME_ONLY,
    "zero_optimization.offload_optimizer.pipeline_write": _NVME_ONLY,
    "zero_optimization.offload_optimizer.fast_init": _NVME_ONLY,
    "zero_optimization.offload_optimizer.ratio": Refusal(
        "optimizer states are offloaded as a whole or not at all; remove it", (1, None)
    ),
    "zero_optimization.offload_optimizer.super_offload": Refusal(
        "it needs DeepSpeed's compiled optimizer; remove it", _OFF
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Refusal(
        "it belongs to super_offload; remove it"
    ),
}


# Refuses keys and values of DeepSpeed files that cannot work here.

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def refuse_foreign_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Remove the keys that cannot work, with a problem for each that is not inert.

    Returns:
        The remaining values (a copy) and the problems.
    """
    problems = [
        *_refused_keys(values),
        *_auto_values(values),
        *_nvme(values),
    ]
    taken_out = [tuple(name.split(".")) for name in REFUSED_KEYS]
    return without(values, [*taken_out, *(problem.path for problem in problems)]), problems


def without(values: Mapping[str, Any], paths: list[KeyPath]) -> dict[str, Any]:
    """A copy of a tree without the values at these paths, if they exist."""
    here = {path[0] for path in paths if len(path) == 1}
    below: dict[str | int, list[KeyPath]] = defaultdict(list)
    for path in paths:
        below[path[0]].append(path[1:])
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in here:
            continue
        inside = below.get(key)
        kept[key] = without(value, inside) if inside and isinstance(value, dict) else value
    return kept


def _refused_keys(values: Mapping[str, Any]) -> Iterator[Problem]:
    for name, refusal in REFUSED_KEYS.items():
        path = tuple(name.split("."))
        held = _value_at(values, path)
        if held is not _ABSENT and not refusal.lets_pass(held):
            yield Problem(path, f"{name} cannot be used here: {refusal.reason}")


def _auto_values(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Only Hugging Face's Trainer replaces "auto" by a value. DeepSpeed does not."""
    for key in DeepSpeedKeys.model_fields:
        for path in _paths_of_auto(values.get(key), (key,)):
            mend = "omit the key to use its default, or write a value"
            if key in _BATCH_KEYS:
                mend = "leave it out: any two of the three batch keys give the third"
            yield Problem(
                path,
                f'{dotted(path)} is "auto", which only Hugging Face\'s Trainer fills in; {mend}',
            )


def _nvme(values: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("offload_param", "offload_optimizer"):
        path = ("zero_optimization", name, "device")
        if _value_at(values, path) == "nvme":
            yield Problem(
                path,
                f'{dotted(path)} is "nvme", but state can only move to host memory; write "cpu"',
            )


def _paths_of_auto(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if value == "auto" and ".".join(map(str, path)) not in REFUSED_KEYS:
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths_of_auto(inner, (*path, key))


class _Absent:
    """Represents a key that is absent. (A key with the value null is present.)"""


_ABSENT = _Absent()


def _value_at(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    here: Any = values
    for part in path:
        if not isinstance(here, dict) or part not in here:
            return _ABSENT
        here = here[part]
    return here
