"""A whole run as one immutable object: our four sections and DeepSpeed's keys."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megaspeed.config.data import DataConfig
from megaspeed.config.model import ModelConfig
from megaspeed.config.parallel import ParallelConfig
from megaspeed.config.scheduler import SchedulerConfig
from megaspeed.config.section import (
    LARGEST_ACCUMULATION,
    LARGEST_BATCH,
    LARGEST_COUNT,
    PathText,
    Section,
)
from megaspeed.config.training import TrainingConfig
from megaspeed.config.zero_optimization import ZeroConfig

# DeepSpeed's `bf16`, `fp16` and `data_types`: the number types of the model.


class Bf16Config(Section):
    """bfloat16 parameters and activations with fp32 master weights."""

    enabled: bool = Field(default=False, description="Compute in bfloat16.")
    check_grad_overflow: bool = Field(
        default=True, description="Skip a step whose gradients are not finite."
    )


class Fp16Config(Section):
    """float16 parameters and activations with fp32 master weights and a scaled loss."""

    enabled: bool = Field(default=False, description="Compute in float16 (GPU only).")
    loss_scale: float = Field(
        default=0.0, ge=0, description="Factor on the loss; 0: adjusted during training."
    )
    initial_scale_power: int = Field(
        default=16, ge=0, le=127, description="The first dynamic loss scale is 2 to this power."
    )
    loss_scale_window: int = Field(
        default=1000, gt=0, description="Steps without overflow before the loss scale doubles."
    )
    hysteresis: int = Field(
        default=2, gt=0, description="Number of overflows after which the loss scale is halved."
    )
    consecutive_hysteresis: bool = Field(
        default=False, description="Refill the hysteresis after a step without overflow."
    )
    min_loss_scale: int = Field(default=1, gt=0, description="Smallest dynamic loss scale.")


class DataTypesConfig(Section):
    """Number types that may differ from the model's."""

    grad_accum_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Type in which gradients are summed over micro-batches and reduced. bf16 "
        "halves their memory and traffic, but a micro-batch's gradient is lost if it is more than "
        "256 times smaller than the sum.",
    )


# DeepSpeed's `optimizer`: Adam with decoupled weight decay.

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(Section):
    """The parameters of Adam (Kingma & Ba 2015) as AdamW (Loshchilov & Hutter 2019) has them."""

    lr: float = Field(
        default=1e-3, gt=0, description="Learning rate that the scheduler's warmup leads up to."
    )
    betas: tuple[DecayRate, DecayRate] = Field(
        default=(0.9, 0.999),
        strict=False,
        description="Decay of the running means of the gradient and of its square, each in [0, 1).",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        description="Decay of matrices and embeddings, times the learning rate, a step; biases "
        "and norms do not decay.",
    )
    torch_adam: Literal[True] = Field(
        default=True,
        description="torch's AdamW, which needs no compiler; the only one there is here.",
    )


class OptimizerConfig(Section):
    """Adam and AdamW are the same here, as in DeepSpeed: weight decay is decoupled in both."""

    type: Literal["AdamW", "Adam"] = Field(
        default="AdamW", description="AdamW or Adam; both decouple weight decay."
    )
    params: AdamParams = Field(default_factory=AdamParams, description="The optimizer's numbers.")


# DeepSpeed's tools for observing a run: communication log, FLOPs profiler.


class CommsLoggerConfig(Section):
    """Log of DeepSpeed's collectives."""

    enabled: bool = Field(default=False, description="Record DeepSpeed's collectives.")
    prof_all: bool = Field(default=True, description="Record every operation.")
    prof_ops: tuple[str, ...] = Field(
        default=(), strict=False, description="Operations to record if prof_all is false."
    )
    verbose: bool = Field(default=False, description="A log line for every operation.")
    debug: bool = Field(default=False, description="Name the calling function in the log.")


class FlopsProfilerConfig(Section):
    """DeepSpeed's FLOPs profiler: one forward pass of pipeline stage 0."""

    enabled: bool = Field(default=False, description="Profile one step.")
    recompute_fwd_factor: float = Field(
        default=0.0, ge=0, description="Share of the forward FLOPs that recomputation adds."
    )
    profile_step: int = Field(default=1, gt=0, description="Step that is profiled.")
    module_depth: int = Field(default=-1, ge=-1, description="Depth reported; -1: the deepest.")
    top_modules: int = Field(default=1, gt=0, description="Modules listed for each depth.")
    detailed: bool = Field(default=True, description="Print the profile of each module.")
    output_file: PathText | None = Field(
        default=None, description="File to write to. If omitted: the console."
    )


# DeepSpeed's own keys, at the top level of the JSON, as in DeepSpeed's own file.


class DeepSpeedKeys(Section):
    """The keys of DeepSpeed 0.19.8's JSON that work here, each with DeepSpeed's meaning."""

    train_batch_size: int | None = Field(
        default=None,
        gt=0,
        le=LARGEST_BATCH,
        description="Samples of one optimizer step over all ranks = "
        "train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp. If it is stated, "
        "the batch is the same at every layout.",
    )
    train_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        gt=0,
        le=LARGEST_BATCH,
        description="Samples of one micro-batch on one data-parallel rank.",
    )
    gradient_accumulation_steps: int | None = Field(
        default=None,
        gt=0,
        le=LARGEST_ACCUMULATION,
        description="Micro-batches of one optimizer step; with a pipeline, those that flow "
        "through it.",
    )
    gradient_clipping: float = Field(
        default=1.0,
        ge=0,
        description="Largest gradient norm, over all axes; gradients above are scaled down. "
        "0: no clipping.",
    )
    zero_optimization: ZeroConfig = Field(
        default_factory=ZeroConfig,
        description="What is partitioned over the data-parallel axis.",
    )
    bf16: Bf16Config = Field(default_factory=Bf16Config, description="Training in bfloat16.")
    fp16: Fp16Config = Field(default_factory=Fp16Config, description="Training in float16.")
    data_types: DataTypesConfig = Field(
        default_factory=DataTypesConfig, description="Number types other than the model's."
    )
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="Type in which gradients are reduced. If omitted: the type in which they are "
        "summed over micro-batches.",
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="The optimizer."
    )
    scheduler: SchedulerConfig | None = Field(
        default=None,
        description="The learning rate over the steps. If omitted: constant.",
    )
    steps_per_print: int | None = Field(
        default=None,
        gt=0,
        le=LARGEST_COUNT,
        description="Steps between DeepSpeed's own log lines; none if null.",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = Field(
        default=None, description="Level of DeepSpeed's own log. If omitted: DeepSpeed's default."
    )
    wall_clock_breakdown: bool = Field(
        default=False, description="Log the time of forward, backward and step."
    )
    memory_breakdown: bool = Field(default=False, description="Log the memory at points in a step.")
    dump_state: bool = Field(default=False, description="Log DeepSpeed's state at the start.")
    disable_python_gc: bool = Field(
        default=False, description="Turn Python's garbage collector off while training."
    )
    comms_logger: CommsLoggerConfig = Field(
        default_factory=CommsLoggerConfig, description="Log of DeepSpeed's collectives."
    )
    flops_profiler: FlopsProfilerConfig = Field(
        default_factory=FlopsProfilerConfig, description="DeepSpeed's FLOPs profiler."
    )


class RunConfig(DeepSpeedKeys):
    """One JSON file. What depends on the number of processes may still be "auto"."""

    model: ModelConfig = Field(description="The shape of the model.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How the ranks share the work."
    )
    data: DataConfig = Field(description="The corpus and how it is cut into samples.")
    training: TrainingConfig = Field(
        description="The length of the run, what it reports and what it keeps."
    )

    def to_json(self) -> dict[str, Any]:
        """The config as JSON values, every default written out; it loads back to an equal one."""
        return self.model_dump(mode="json", exclude_none=True)

    def deepspeed_json(self) -> dict[str, Any]:
        """DeepSpeed's keys alone, as JSON values: what its `initialize` may be given.

        Keys that are left to DeepSpeed or to the caller (null here) are left out.
        """
        return self.model_dump(
            mode="json", exclude_none=True, include=set(DeepSpeedKeys.model_fields)
        )
