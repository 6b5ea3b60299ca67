"""`scheduler`: the learning rate as a function of the step.

    cosine, linear, constant                  step W of the warmup has the full rate
    WarmupCosineLR, WarmupDecayLR, WarmupLR   the same shapes by DeepSpeed's formulas

With DeepSpeed's types, steps 1 and 2 both have the lowest rate (0 by default) and step W + 2 has
the full rate, because DeepSpeed counts iterations from -1. ``training/step_inputs.py`` has the
formulas.
"""

from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.section import Section


class ConstantParams(Section):
    """The numbers of constant, which cosine and linear have, too."""

    warmup_num_steps: int = Field(default=0, ge=0)
    """Steps W of linear warmup: step 1 has 1/W of the full rate, step W all of it."""


class DecayParams(ConstantParams):
    """The numbers of cosine and linear."""

    total_num_steps: int | None = Field(default=None, gt=0)
    """Step at which the smallest rate is reached. If omitted: training.steps."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Smallest rate, as a fraction of the full one."""


class Decay(Section):
    """A learning rate that falls after warmup."""

    type: Literal["cosine", "linear"]
    """cosine: falls as half a cosine; linear: falls in a straight line."""
    params: DecayParams = Field(default_factory=DecayParams)
    """The numbers."""


class Constant(Section):
    """A learning rate that is constant after warmup."""

    type: Literal["constant"]
    """Constant after warmup."""
    params: ConstantParams = Field(default_factory=ConstantParams)
    """The numbers."""


class WarmupParams(Section):
    """Numbers that all of DeepSpeed's schedulers have."""

    warmup_num_steps: int = Field(default=1000, gt=0)
    """Steps of warmup."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warmup over the steps."""


class WarmupLRParams(WarmupParams):
    """The numbers of WarmupLR."""

    warmup_min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate of warmup."""
    warmup_max_lr: float | None = Field(default=None, gt=0)
    """Learning rate after warmup. If omitted: optimizer.params.lr."""


class WarmupDecayLRParams(WarmupLRParams):
    """The numbers of WarmupDecayLR."""

    total_num_steps: int | None = Field(default=None, gt=0)
    """Step at which 0 is reached. If omitted: training.steps."""


class WarmupCosineLRParams(WarmupParams):
    """The numbers of WarmupCosineLR."""

    total_num_steps: int | None = Field(default=None, gt=0)
    """Step at which the smallest rate is reached. If omitted: training.steps."""
    warmup_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Lowest warmup rate, as a fraction of the optimizer's."""
    cos_min_ratio: float = Field(default=0.0001, ge=0, le=1)
    """Smallest rate, as a fraction of the optimizer's."""


class WarmupLR(Section):
    """DeepSpeed's constant rate after warmup."""

    type: Literal["WarmupLR"]
    """Constant after warmup."""
    params: WarmupLRParams = Field(default_factory=WarmupLRParams)
    """The numbers."""


class WarmupDecayLR(Section):
    """DeepSpeed's linear decay after warmup."""

    type: Literal["WarmupDecayLR"]
    """Linear decay to 0 after warmup."""
    params: WarmupDecayLRParams = Field(default_factory=WarmupDecayLRParams)
    """The numbers."""


class WarmupCosineLR(Section):
    """DeepSpeed's cosine decay after warmup."""

    type: Literal["WarmupCosineLR"]
    """Cosine decay after warmup."""
    params: WarmupCosineLRParams = Field(default_factory=WarmupCosineLRParams)
    """The numbers."""


SchedulerConfig = Annotated[
    Decay | Constant | WarmupLR | WarmupDecayLR | WarmupCosineLR, Field(discriminator="type")
]

SCHEDULER_TYPES = ("cosine", "linear", "constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
