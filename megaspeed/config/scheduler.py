"""DeepSpeed's `scheduler`: the learning rate as a function of the step.

Each scheduler warms up over `warmup_num_steps` steps and then stays (WarmupLR), falls in a straight
line to 0 (WarmupDecayLR) or falls as a cosine to `cos_min_ratio` (WarmupCosineLR).
"""

from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.section import Section


class WarmupParams(Section):
    """What every scheduler has."""

    warmup_num_steps: int = Field(default=1000, gt=0, description="Steps of warmup.")
    warmup_type: Literal["log", "linear"] = Field(
        default="log", description="Shape of the warmup over the steps."
    )


class WarmupLRParams(WarmupParams):
    """Warm up, then stay."""

    warmup_min_lr: float = Field(default=0.0, ge=0, description="Learning rate at step 0.")
    warmup_max_lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate after warmup. Left out: optimizer.params.lr.",
    )


class WarmupDecayLRParams(WarmupLRParams):
    """Warm up, then fall to 0."""

    total_num_steps: int | None = Field(
        default=None, gt=0, description="Step at which 0 is reached. Left out: training.steps."
    )


class WarmupCosineLRParams(WarmupParams):
    """Warm up, then fall as half a cosine."""

    total_num_steps: int | None = Field(
        default=None,
        gt=0,
        description="Step at which the smallest rate is reached. Left out: training.steps.",
    )
    warmup_min_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Rate at step 0, as a fraction of the optimizer's."
    )
    cos_min_ratio: float = Field(
        default=0.0001,
        ge=0,
        le=1,
        description="Smallest rate, as a fraction of the optimizer's.",
    )


class WarmupLR(Section):
    """Constant after warmup."""

    type: Literal["WarmupLR"] = Field(description="Constant after warmup.")
    params: WarmupLRParams = Field(
        default_factory=WarmupLRParams, description="The scheduler's numbers."
    )


class WarmupDecayLR(Section):
    """Linear decay after warmup."""

    type: Literal["WarmupDecayLR"] = Field(description="Linear decay to 0 after warmup.")
    params: WarmupDecayLRParams = Field(
        default_factory=WarmupDecayLRParams, description="The scheduler's numbers."
    )


class WarmupCosineLR(Section):
    """Cosine decay after warmup."""

    type: Literal["WarmupCosineLR"] = Field(description="Cosine decay after warmup.")
    params: WarmupCosineLRParams = Field(
        default_factory=WarmupCosineLRParams, description="The scheduler's numbers."
    )


SchedulerConfig = Annotated[WarmupLR | WarmupDecayLR | WarmupCosineLR, Field(discriminator="type")]

SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
