"""DeepSpeed's own keys, at the top level of the JSON, as in DeepSpeed's own file."""

from typing import Literal

from pydantic import Field

from megaspeed.config.observation import CommsLoggerConfig, FlopsProfilerConfig
from megaspeed.config.optimizer import OptimizerConfig
from megaspeed.config.precision import Bf16Config, DataTypesConfig, Fp16Config
from megaspeed.config.scheduler import SchedulerConfig
from megaspeed.config.section import (
    LARGEST_ACCUMULATION,
    LARGEST_BATCH,
    LARGEST_COUNT,
    Section,
)
from megaspeed.config.zero_optimization import ZeroConfig


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
