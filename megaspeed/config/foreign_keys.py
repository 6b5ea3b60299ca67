"""Keys in DeepSpeed's files that megaspeed does not have.

    RENAMED       an old name, or a section that asks for what megaspeed has under another name
    NO_EFFECT     a key for tuning, saving or logging: the run is the same without it
    REFUSED       a key that would change what is trained, or that asks for what megaspeed does not
                  do; accepted if its value switches it off

``deepspeed_keys.py`` has the keys of DeepSpeed 0.19.8 that work, ``acceptance.py`` reads a file.
"""

from collections.abc import Mapping
from typing import Any

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

NO_EFFECT: Mapping[str, str] = {
    **_by_key(
        {
            "training.log_interval sets how often a line is printed": "steps_per_print",
            "training.profile shows where the time of a step goes, and its collectives": (
                "wall_clock_breakdown flops_profiler comms_logger"
            ),
            "config.json in the run folder has every value": "dump_state",
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

OFF: Mapping[str, tuple[Any, ...]] = {
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

DISABLED_BY_DEFAULT = (
    *("amp", "nebula", "eigenvalue", "elasticity", "curriculum_learning", "progressive_layer_drop"),
    *("data_efficiency", "torch_autocast", "hybrid_engine", "comet", "expert_parallel"),
)
"""Sections of DeepSpeed whose ``enabled`` is false if it is omitted."""
