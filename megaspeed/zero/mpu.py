"""What DeepSpeed asks a "model parallel unit": the data-parallel group, and nothing else.

DeepSpeed partitions over the data axis. Everything that spans the model axes - the norm, tied
weights, the agreement to skip a step - is done by this package, so DeepSpeed sees no model-parallel
group: None, which its ZeRO optimizers understand (deepspeed/comm/pg_utils.py, is_parallel).
"""

import torch.distributed as dist

from megaspeed.topology.context import ParallelContext


class DataAxis:
    """DeepSpeed's ``mpu`` for one engine.

    Args:
        context: this rank's groups.
        replicate: ZeRO-0: partition over this rank alone, so that every rank holds everything.

    All ranks create it together.
    """

    def __init__(self, context: ParallelContext, *, replicate: bool) -> None:
        self._partition_group = context.group_of_this_rank() if replicate else context.dp_group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group over which ZeRO partitions."""
        return self._partition_group

    def get_data_parallel_world_size(self) -> int:
        """Its size."""
        return dist.get_world_size(self._partition_group)

    def get_data_parallel_rank(self) -> int:
        """This rank's place in it."""
        return dist.get_rank(self._partition_group)

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """None: DeepSpeed reduces nothing over the model axes."""
        return None

    def get_model_parallel_world_size(self) -> int:
        """One."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Zero."""
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_pipeline_model_parallel_group = get_model_parallel_group
    get_pipeline_model_parallel_world_size = get_model_parallel_world_size
    get_pipeline_model_parallel_rank = get_model_parallel_rank
