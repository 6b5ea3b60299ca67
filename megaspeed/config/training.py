"""The `training` section: the length of the run, validations, reports and checkpoints."""

import math
from typing import Literal

from pydantic import Field

from megaspeed.config.section import LARGEST_SECONDS, PathText, Section

ReportTo = Literal["tensorboard", "wandb"]
"""Services that a run can report to."""


class TrainingConfig(Section):
    """The length of the run, what it reports and what it keeps."""

    steps: int = Field(gt=0, description="Number of optimizer steps.")
    seed: int = Field(
        default=1234, ge=0, lt=2**63, description="Seed of initial weights and of dropout."
    )
    run_dir: PathText | None = Field(
        default=None,
        description="Folder the run writes to. If omitted: runs/<name of the config file>.",
    )
    log_interval: int = Field(default=10, gt=0, description="Steps between two console lines.")
    report_to: tuple[ReportTo, ...] = Field(
        default=(),
        strict=False,
        description="Services that get the numbers of metrics.jsonl too: tensorboard, wandb. "
        "Their packages must be installed.",
    )
    eval_interval: int = Field(
        default=0, ge=0, description="Steps between two validations; 0: only at the end."
    )
    eval_batches: int = Field(
        default=8,
        gt=0,
        description="Number of batches, each of train_batch_size samples, of one validation.",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Multiply the learning rate by k = train_batch_size / base_batch_size "
        "(linear; Goyal et al. 2017) or by the square root of k (sqrt).",
    )
    base_batch_size: int | None = Field(
        default=None,
        gt=0,
        description="Samples of the batch for which the stated learning rate is right; required "
        "if lr_scaling is not none. The resolved configuration has the scaled rate and states the "
        "run's own batch here.",
    )
    allow_tf32: bool = Field(
        default=False,
        description="On CUDA, multiply fp32 matrices in TF32, which keeps 10 of 23 mantissa bits. "
        "This is faster, but layouts agree only to about 1e-3.",
    )
    allow_reduced_precision_reduction: bool = Field(
        default=False,
        description="On CUDA, let bf16 and fp16 matrix products add partial sums in bf16 or fp16 "
        "instead of fp32.",
    )
    max_skipped_steps: int = Field(
        default=20,
        gt=0,
        description="The run stops after this many steps in a row were skipped because the loss or "
        "the gradient norm was not finite.",
    )
    hang_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        le=LARGEST_SECONDS,
        description="If there is no progress for this long, every rank writes its stacks, the "
        "ranks that did not arrive are named, and the run ends with exit code 3. Start-up and the "
        "first step may take four times as long, saving and loading 24 times.",
    )
    restart: int = Field(
        default=0,
        ge=0,
        description="How many times the ranks are started again after a failure, under deepspeed, "
        "srun, mpirun or plain python. torchrun does this by itself (--max-restarts).",
    )
    check_replicas_interval: int = Field(
        default=0,
        ge=0,
        description="Steps between two comparisons, bit by bit, of the copies that several ranks "
        "hold. They are also compared before each checkpoint. 0: never.",
    )
    save_interval: int = Field(
        default=1000,
        ge=0,
        description="Steps between two checkpoints; 0: only at the end and on a stop signal.",
    )
    keep_last: int = Field(
        default=3, gt=0, description="Number of checkpoints kept; older ones are deleted."
    )
    async_save: bool = Field(
        default=False,
        description="Copy a checkpoint to host memory and write it while training continues. "
        "From the first save to the end of the run, this takes 12 bytes of host memory for each "
        "parameter that a rank writes. If the rank trains on a GPU, the memory is page-locked.",
    )

    def lr_factor(self, train_batch_size: int) -> float:
        """What `lr_scaling` multiplies every stated learning rate by."""
        if self.lr_scaling == "none":
            return 1.0
        assert self.base_batch_size is not None, "a rule checked that the base is stated"
        ratio = train_batch_size / self.base_batch_size
        return ratio if self.lr_scaling == "linear" else math.sqrt(ratio)
