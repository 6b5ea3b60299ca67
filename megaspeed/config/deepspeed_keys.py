"""DeepSpeed's own keys, at the top level of the JSON, each with DeepSpeed's meaning.

These are the keys of DeepSpeed 0.19.8 that work here. ``keys.py`` lists those that do not.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megaspeed.config.scheduler import SchedulerConfig
from megaspeed.config.section import (
    LARGEST_ACCUMULATION,
    LARGEST_BATCH,
    LARGEST_COUNT,
    ElementCount,
    PathText,
    Section,
)


def _no_boolean(value: Any) -> Any:
    """Refuses true, which Python counts as equal to 1 in a list of allowed numbers."""
    if isinstance(value, bool):
        raise ValueError("a whole number")
    return value


class OffloadConfig(Section):
    """Where a part of the state is kept while it is not used."""

    device: Literal["none", "cpu"] = "none"
    """none: on the accelerator; cpu: in the host's memory."""
    pin_memory: bool = True
    """Page-locked host memory, for transfers at full speed. Turn it off only if `ulimit -l` is too
    low."""


class ZeroConfig(Section):
    """What is partitioned over the data-parallel axis, and how many elements travel at a time."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_boolean)] = 0
    """0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they are produced."""
    reduce_scatter: bool = True
    """Average gradients with reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Annotated[ElementCount, Field(gt=0)] | None = None
    """Elements reduced at a time. If omitted: about one block, 12 x model.hidden_size^2 /
    parallel.tensor."""
    use_multi_rank_bucket_allreduce: bool = False
    """Stages 1 and 2: all-reduce each bucket of gradients, instead of reducing each part of it to
    the rank that owns it. DeepSpeed's own default is true: fewer messages, which may be faster if
    buckets are small and there are many owners, but twice the bytes, so a step moves 3 x the
    parameters instead of ZeRO's 2 x."""
    allgather_partitions: bool = True
    """Gather updated parameters with all-gather instead of broadcasts."""
    allgather_bucket_size: ElementCount = Field(default=500_000_000, gt=0)
    """Elements gathered at a time."""
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass continues, if they are reduced after each
    micro-batch (parallel.gradient_reduction). If omitted: on for stage 3 only."""
    offload_param: OffloadConfig | None = None
    """Stage 3: where partitioned parameters live."""
    offload_optimizer: OffloadConfig | None = None
    """Stages 1 to 3: where optimizer states live. Its keys are those of offload_param."""
    sub_group_size: ElementCount = Field(default=1_000_000_000, gt=0)
    """Stage 3: elements the optimizer steps at a time."""
    stage3_prefetch_bucket_size: Annotated[ElementCount, Field(ge=0)] | None = None
    """0: gather each layer when a pass enters it. If another number or omitted: gather the next
    layer while one computes, if stage3_max_live_parameters leaves room."""
    stage3_param_persistence_threshold: Annotated[ElementCount, Field(ge=0)] | None = None
    """Parameters with up to this many elements stay gathered. If omitted: 10 x
    model.hidden_size."""
    stage3_model_persistence_threshold: Annotated[ElementCount, Field(ge=0)] | None = None
    """Largest total number of elements that stay gathered. If omitted: no bound."""
    stage3_max_live_parameters: Annotated[ElementCount, Field(ge=0)] | None = None
    """The next layer is gathered while one computes only if both together have at most this many
    elements. Parameters that stay gathered do not count. If omitted: no bound."""

    def prefetches(self, current: int, following: int) -> bool:
        """Stage 3: whether the next layer is gathered while the current one computes.

        Args:
            current: gathered elements of the current layer, without padding.
            following: gathered elements of the next layer.
        """
        bound = self.stage3_max_live_parameters
        has_room = bound is None or current + following <= bound
        return has_room and self.stage3_prefetch_bucket_size != 0

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are kept in host memory."""
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"

    @property
    def offloads_parameters(self) -> bool:
        """Whether partitioned parameters are kept in host memory."""
        return self.offload_param is not None and self.offload_param.device != "none"


class Bf16Config(Section):
    """bfloat16 parameters and activations with fp32 master weights."""

    enabled: bool = False
    """Compute in bfloat16."""
    check_grad_overflow: bool = True
    """Skip a step whose gradients are not finite."""


class Fp16Config(Section):
    """float16 parameters and activations with fp32 master weights and a scaled loss."""

    enabled: bool = False
    """Compute in float16 (GPU only)."""
    loss_scale: float = Field(default=0.0, ge=0)
    """Factor on the loss; 0: adjusted during training."""
    initial_scale_power: int = Field(default=16, ge=0, le=127)
    """The first dynamic loss scale is 2 to this power."""
    loss_scale_window: int = Field(default=1000, gt=0)
    """Steps without overflow before the loss scale doubles."""
    hysteresis: int = Field(default=2, gt=0)
    """Number of overflows after which the loss scale is halved."""
    consecutive_hysteresis: bool = False
    """Refill the hysteresis after a step without overflow."""
    min_loss_scale: int = Field(default=1, gt=0)
    """Smallest dynamic loss scale."""


class DataTypesConfig(Section):
    """Number types that may differ from the model's."""

    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are summed over micro-batches and reduced. bf16 halves their memory
    and traffic, but a micro-batch's gradient is lost if it is more than 256 times smaller than the
    sum."""


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(Section):
    """The numbers of AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate that the scheduler's warmup leads up to."""
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.999), strict=False)
    """Decay of the running means of the gradient and of its square, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.01, ge=0)
    """In each step, matrices and embeddings shrink by this number times the learning rate; biases
    and norms do not."""
    torch_adam: Literal[True] = True
    """torch's AdamW, which needs no compiler; the only one available."""


class OptimizerConfig(Section):
    """AdamW. Adam means the same, as in DeepSpeed."""

    type: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW or Adam; both decouple weight decay."""
    params: AdamParams = Field(default_factory=AdamParams)
    """The optimizer's numbers."""


class CommsLoggerConfig(Section):
    """DeepSpeed's log of its collectives."""

    enabled: bool = False
    """Record DeepSpeed's collectives."""
    prof_all: bool = True
    """Record every operation."""
    prof_ops: tuple[str, ...] = Field(default=(), strict=False)
    """Operations to record if prof_all is false."""
    verbose: bool = False
    """A log line for every operation."""
    debug: bool = False
    """Name the calling function in the log."""


class FlopsProfilerConfig(Section):
    """DeepSpeed's FLOPs profiler: one forward pass of pipeline stage 0."""

    enabled: bool = False
    """Profile one step."""
    recompute_fwd_factor: float = Field(default=0.0, ge=0)
    """Share of the forward FLOPs that recomputation adds."""
    profile_step: int = Field(default=1, gt=0)
    """Step that is profiled."""
    module_depth: int = Field(default=-1, ge=-1)
    """Depth reported; -1: the deepest."""
    top_modules: int = Field(default=1, gt=0)
    """Modules listed for each depth."""
    detailed: bool = True
    """Print the profile of each module."""
    output_file: PathText | None = None
    """File to write to. If omitted: the console."""


class DeepSpeedKeys(Section):
    """The top level of the JSON, without megaspeed's sections."""

    train_batch_size: int | None = Field(default=None, gt=0, le=LARGEST_BATCH)
    """Samples of one optimizer step over all ranks = train_micro_batch_size_per_gpu x
    gradient_accumulation_steps x dp. If it is stated, the batch is the same at every layout."""
    train_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0, le=LARGEST_BATCH)
    """Samples of one micro-batch on one data-parallel rank."""
    gradient_accumulation_steps: int | None = Field(default=None, gt=0, le=LARGEST_ACCUMULATION)
    """Micro-batches of one optimizer step; with a pipeline, those that flow through it."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest gradient norm, over all axes; gradients above are scaled down. 0: no clipping."""
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """What is partitioned over the data-parallel axis."""
    bf16: Bf16Config = Field(default_factory=Bf16Config)
    """Training in bfloat16."""
    fp16: Fp16Config = Field(default_factory=Fp16Config)
    """Training in float16."""
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Number types other than the model's."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    """Type in which gradients are reduced. If omitted: the type in which they are summed over
    micro-batches."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    scheduler: SchedulerConfig | None = None
    """The learning rate over the steps. If omitted: constant."""
    steps_per_print: int | None = Field(default=None, gt=0, le=LARGEST_COUNT)
    """Steps between DeepSpeed's own log lines; none if null."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Level of DeepSpeed's own log. If omitted: DeepSpeed's default."""
    wall_clock_breakdown: bool = False
    """Log the time of forward, backward and step."""
    memory_breakdown: bool = False
    """Log the memory at points in a step."""
    dump_state: bool = False
    """Log DeepSpeed's state at the start."""
    disable_python_gc: bool = False
    """Turn Python's garbage collector off while training."""
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    """Log of DeepSpeed's collectives."""
    flops_profiler: FlopsProfilerConfig = Field(default_factory=FlopsProfilerConfig)
    """DeepSpeed's FLOPs profiler."""
