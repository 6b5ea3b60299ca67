"""DeepSpeed's `bf16`, `fp16` and `data_types`: the number types of the model."""

from typing import Literal

from pydantic import Field

from megaspeed.config.section import Section


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
