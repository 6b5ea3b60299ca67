"""ZeRO-3: one layer's parameters, gathered together into one piece of memory.

    partitions of rank r    [ a_r | b_r | c_r ]
    arriving                [ a_0 b_0 c_0 | a_1 b_1 c_1 | ... ]             one all-gather
    whole                   [ a_0 a_1 ... | b_0 b_1 ... | c_0 c_1 ... ]     one copy

A parameter travels padded to a multiple of the number of ranks. One parameter alone arrives in
``whole`` directly. If there is one rank, its partitions are the parameters, and nothing is copied
unless they are offloaded.

While the layer is not gathered, its storage has 0 bytes, but it remains the same storage object. So
autograd may save a view of a weight from forward to backward (``weight.t()`` in a linear layer, or
any view that a compiled block saves). The view takes no memory, and shows the weight again as soon
as the layer is gathered again.
(torch's FSDP2 does the same: ``alloc_storage`` in torch/distributed/fsdp/_fully_shard/.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor


class GatheredLayer:
    """Gathers and frees some parameters that DeepSpeed has partitioned.

    Args:
        parameters: in the same order on every rank of ``group``; may be none.
        group: the ranks that hold the partitions.
        device: where parameters are gathered.
    """

    def __init__(
        self, parameters: Sequence[Any], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._device = device
        self._ranks = dist.get_world_size(group)
        self.elements: int = sum(parameter.ds_numel for parameter in self._parameters)
        """Elements of the parameters, without padding."""
        self._sizes: list[int] = [parameter.partition_numel() for parameter in self._parameters]
        dtype = parameters[0].dtype if parameters else None
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        on_device = all(parameter.ds_tensor.device == device for parameter in parameters)
        self._is_there = not parameters or (self._ranks == 1 and on_device)
        self._whole = torch.empty(self._ranks * sum(self._sizes), dtype=dtype, device=device)
        regions = self._whole.split([self._ranks * size for size in self._sizes])
        self._rows = [region.view(self._ranks, -1) for region in regions]
        self._views = [
            region[: parameter.ds_numel].view(parameter.ds_shape)
            for region, parameter in zip(regions, self._parameters, strict=True)
        ]
        self._free_memory()
        self._arriving: Tensor | None = None
        self._message: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are there."""
        return all(p.ds_status is ZeroParamStatus.AVAILABLE for p in self._parameters)

    @property
    def is_arriving(self) -> bool:
        """Whether ``start`` was called, and ``finish`` was not."""
        return self._arriving is not None

    @torch.no_grad()
    def start(self) -> None:
        """Starts the all-gather on the current stream."""
        if self._is_there:
            return
        if self._ranks == 1 or len(self._parameters) == 1:
            self._take_memory()
            self._arriving = self._whole
        else:
            self._arriving = torch.empty_like(self._whole)
        own = self._arriving.view(self._ranks, -1)[dist.get_rank(self._group)]
        partitions = [p.ds_tensor.to(self._device, non_blocking=True) for p in self._parameters]
        torch.cat(partitions, out=own)
        if self._ranks > 1:
            self._message = comm.allgather_fn(
                self._arriving, own, group=self._group, async_op=True
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the current stream wait for what arrives, and gives the parameters their values."""
        if self._message is not None:
            self._message.wait()
            self._message = None
        if self._arriving is not None and self._arriving is not self._whole:
            self._take_memory()
            by_rank = self._arriving.view(self._ranks, -1)
            torch.split_with_sizes_copy(by_rank, self._sizes, dim=1, out=self._rows)
        self._arriving = None
        self.give_shapes()
        for parameter in self._parameters:
            parameter.ds_status = ZeroParamStatus.AVAILABLE

    def give_shapes(self) -> None:
        """Gives the parameters their shapes, and what is in the memory as values."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = (
                parameter.ds_tensor.view(parameter.ds_shape) if self._is_there else view
            )

    def free(self) -> None:
        """Frees the memory. The current stream must be the one that has used the parameters."""
        for parameter in self._parameters:
            parameter.data = self._nothing
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self._free_memory()

    def _take_memory(self) -> None:
        self._whole.untyped_storage().resize_(self._whole.nbytes)

    def _free_memory(self) -> None:
        self._whole.untyped_storage().resize_(0)
