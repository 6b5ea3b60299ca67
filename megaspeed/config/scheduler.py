"""`scheduler`: the learning rate as a function of the step.

    cosine, linear, constant                ours: the rate of step s of T, after W steps of warmup
    WarmupCosineLR, WarmupDecayLR, WarmupLR DeepSpeed's, by its formulas (training/step_inputs.py)

Each warms up and then falls as a cosine, falls linearly or stays constant. With DeepSpeed's types,
steps 1 and 2 both have the lowest rate (0 by default), and step W + 2 has the full rate, because
DeepSpeed counts iterations from -1.
"""

from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.section import Section


class ConstantParams(Section):
    """What cosine, linear and constant have in common."""

    warmup_num_steps: int = Field(
        default=0,
        ge=0,
        description="Number W of steps of linear warmup: step 1 has 1/W of the full rate, and step "
        "W has the full rate.",
    )


class DecayParams(ConstantParams):
    """Warm up, then fall."""

    total_num_steps: int | None = Field(
        default=None,
        gt=0,
        description="Step at which the smallest rate is reached. If omitted: training.steps.",
    )
    min_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Smallest rate, as a fraction of the full one."
    )


class Decay(Section):
    """A fall after warmup, which ends with the run."""

    type: Literal["cosine", "linear"] = Field(
        description="cosine: falls as half a cosine; linear: falls in a straight line."
    )
    params: DecayParams = Field(default_factory=DecayParams, description="The numbers.")


class Constant(Section):
    """Constant after warmup."""

    type: Literal["constant"] = Field(description="Constant after warmup.")
    params: ConstantParams = Field(default_factory=ConstantParams, description="The numbers.")


class WarmupParams(Section):
    """What every scheduler of DeepSpeed has."""

    warmup_num_steps: int = Field(default=1000, gt=0, description="Steps of warmup.")
    warmup_type: Literal["log", "linear"] = Field(
        default="log", description="Shape of the warmup over the steps."
    )


class WarmupLRParams(WarmupParams):
    """Warm up, then stay."""

    warmup_min_lr: float = Field(default=0.0, ge=0, description="Lowest learning rate of warmup.")
    warmup_max_lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate after warmup. If omitted: optimizer.params.lr.",
    )


class WarmupDecayLRParams(WarmupLRParams):
    """Warm up, then fall to 0."""

    total_num_steps: int | None = Field(
        default=None, gt=0, description="Step at which 0 is reached. If omitted: training.steps."
    )


class WarmupCosineLRParams(WarmupParams):
    """Warm up, then fall as half a cosine."""

    total_num_steps: int | None = Field(
        default=None,
        gt=0,
        description="Step at which the smallest rate is reached. If omitted: training.steps.",
    )
    warmup_min_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Lowest warmup rate, as a fraction of the optimizer's."
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


SchedulerConfig = Annotated[
    Decay | Constant | WarmupLR | WarmupDecayLR | WarmupCosineLR, Field(discriminator="type")
]

SCHEDULER_TYPES = ("cosine", "linear", "constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
