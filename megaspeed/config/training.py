"""The `training` section: how long, how often to look, how often to save."""

from pydantic import Field

from megaspeed.config.section import Section


class TrainingConfig(Section):
    """The length of the run, what it reports and what it keeps."""

    steps: int = Field(gt=0, description="Number of optimizer steps.")
    seed: int = Field(
        default=1234, ge=0, lt=2**63, description="Seed of initial weights and of dropout."
    )
    run_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder the run writes to. Left out: runs/<name of the config file>.",
    )
    log_interval: int = Field(default=10, gt=0, description="Steps between two console lines.")
    eval_interval: int = Field(
        default=0, ge=0, description="Steps between two validations; 0: only at the end."
    )
    eval_batches: int = Field(
        default=8,
        gt=0,
        description="Number of batches, each of train_batch_size samples, of one validation.",
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
        description="Steps in a row that may be skipped for a loss or gradient norm that is "
        "not finite before the run stops.",
    )
    hang_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Without progress for so long, every rank writes its stacks, the ranks that "
        "did not arrive are named, and the run ends with exit code 3. Starting up may take four "
        "times as long; saving may take as long as it needs.",
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
        description="Steps between two comparisons of what several ranks hold copies of, bit by "
        "bit; also before each checkpoint. 0: never.",
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
