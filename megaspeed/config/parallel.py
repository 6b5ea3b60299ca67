"""The `parallel` section: how the ranks share the work."""

from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.section import LARGEST_WORLD, Section


class ParallelConfig(Section):
    """Degrees of the three axes. data x pipeline x tensor is the number of processes."""

    data: Annotated[int, Field(gt=0, le=LARGEST_WORLD)] | Literal["auto"] = Field(
        default="auto",
        description='Data-parallel degree (dp); "auto" = world size / (pipeline x tensor).',
    )
    pipeline: int = Field(
        default=1,
        gt=0,
        le=LARGEST_WORLD,
        description="Number of pipeline stages (pp); at most as many as there are blocks.",
    )
    tensor: int = Field(
        default=1,
        gt=0,
        le=LARGEST_WORLD,
        description="Tensor-parallel degree (tp); must divide the attention heads and the "
        "feed-forward width.",
    )
    spare_ranks: bool = Field(
        default=False,
        description="true: more processes may be started than the layout uses. The spare ranks "
        'wait until the run ends. With data "auto", data is the largest degree that fits the '
        "batch. false: the number of processes must fit.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split activations between blocks along the sequence over the tensor axis; "
        "data.sequence_length must be divisible by tensor.",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        default="1f1b",
        description="Order of forwards and backwards in the pipeline. 1f1b keeps at most "
        "`pipeline` micro-batches in memory, gpipe all of them.",
    )
    gradient_reduction: Literal["auto", "per_step", "per_micro_batch"] = Field(
        default="auto",
        description="When gradients are reduced over dp: once a step (least traffic) or after "
        "every micro-batch (least memory). auto: per_step for ZeRO 0 and 1, "
        "per_micro_batch for 2 and 3.",
    )
    activation_checkpointing: Literal["none", "full"] = Field(
        default="none",
        description="full: keep only the inputs of each block and compute the rest again in "
        "the backward pass.",
    )
