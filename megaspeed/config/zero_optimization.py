"""DeepSpeed's `zero_optimization`: the fields of 0.19.8's DeepSpeedZeroConfig that work here."""

from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.section import ElementCount, NoBoolean, Section


class OffloadConfig(Section):
    """Where a part of the state is kept between uses."""

    device: Literal["none", "cpu"] = Field(
        default="none", description="none: on the accelerator; cpu: in the host's memory."
    )
    pin_memory: bool = Field(
        default=True,
        description="Page-locked host memory, for transfers at full speed. Turn it off only if "
        "`ulimit -l` is too low.",
    )


class ZeroConfig(Section):
    """What is partitioned over the data-parallel axis, and in which portions it travels."""

    stage: Annotated[Literal[0, 1, 2, 3], NoBoolean] = Field(
        default=0,
        description="0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters.",
    )
    contiguous_gradients: bool = Field(
        default=True, description="Copy gradients to one buffer as they are produced."
    )
    reduce_scatter: bool = Field(
        default=True, description="Average gradients with reduce-scatter instead of all-reduce."
    )
    reduce_bucket_size: Annotated[ElementCount, Field(gt=0)] | None = Field(
        default=None,
        description="Elements reduced at a time. If omitted: about one block, "
        "12 x model.hidden_size^2 / parallel.tensor.",
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        default=False,
        description="Stages 1 and 2: all-reduce each bucket of gradients, instead of reducing "
        "each part of it to the rank that owns it. DeepSpeed's own default is true: fewer "
        "messages, which may be faster if buckets are small and there are many owners, but twice "
        "the bytes, so a step moves 3 x the parameters instead of ZeRO's 2 x.",
    )
    allgather_partitions: bool = Field(
        default=True,
        description="Gather updated parameters with all-gather instead of broadcasts.",
    )
    allgather_bucket_size: ElementCount = Field(
        default=500_000_000, gt=0, description="Elements gathered at a time."
    )
    overlap_comm: bool | None = Field(
        default=None,
        description="Reduce gradients while the backward pass continues, if they are reduced "
        "after each micro-batch (parallel.gradient_reduction). If omitted: on for stage 3 only.",
    )
    offload_param: OffloadConfig | None = Field(
        default=None, description="Stage 3: where partitioned parameters live."
    )
    offload_optimizer: OffloadConfig | None = Field(
        default=None, description="Stages 1 to 3: where optimizer states live."
    )
    sub_group_size: ElementCount = Field(
        default=1_000_000_000,
        gt=0,
        description="Stage 3: elements the optimizer steps at a time.",
    )
    stage3_prefetch_bucket_size: Annotated[ElementCount, Field(ge=0)] | None = Field(
        default=None,
        description="0: gather each layer when a pass enters it. If another number or omitted: "
        "gather the next layer while one computes, if stage3_max_live_parameters leaves room.",
    )
    stage3_param_persistence_threshold: Annotated[ElementCount, Field(ge=0)] | None = Field(
        default=None,
        description="Parameters with up to this many elements stay gathered. If omitted: 10 x "
        "model.hidden_size.",
    )
    stage3_model_persistence_threshold: Annotated[ElementCount, Field(ge=0)] | None = Field(
        default=None,
        description="Largest total number of elements that stay gathered. If omitted: no bound.",
    )
    stage3_max_live_parameters: Annotated[ElementCount, Field(ge=0)] | None = Field(
        default=None,
        description="The next layer is gathered while one computes only if both together have "
        "at most this many elements. Parameters that stay gathered do not count. If omitted: no "
        "bound.",
    )

    def fetches_ahead(self, at_work: int, following: int) -> bool:
        """Stage 3: whether the next layer is gathered while the current one computes.

        Args:
            at_work: gathered elements of the current layer, without padding.
            following: gathered elements of the next layer.
        """
        bound = self.stage3_max_live_parameters
        has_room = bound is None or at_work + following <= bound
        return has_room and self.stage3_prefetch_bucket_size != 0

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are kept in host memory."""
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"

    @property
    def offloads_parameters(self) -> bool:
        """Whether partitioned parameters are kept in host memory."""
        return self.offload_param is not None and self.offload_param.device != "none"
