"""DeepSpeed's `optimizer`: Adam with decoupled weight decay."""

from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.section import Section

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
