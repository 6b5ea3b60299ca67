"""ZeRO-3: which layers' parameters are gathered when.

    forward     embedding > block 0 > block 1 > ... > head
    backward    head > ... > block 1 > block 0 > embedding, which gathers nothing

A layer is gathered when a pass enters it and freed when the pass leaves it. While it computes, the
layer that comes next in the same pass is gathered, if there is room for both. So every pass gathers
every layer once. (The embedding's backward does not: it adds rows to a gradient and reads no
weight.) A block that is recomputed in a backward is gathered already.

DeepSpeed 0.19.8 gathers each module's own parameters, in an order that it records
(partitioned_param_coordinator.py). With several micro-batches in flight the order never matches the
record, so nothing is fetched ahead. A hook on every module takes longer than a small module's
computation. The hooks of this file replace DeepSpeed's.

Parameters that stay whole (``stage3_param_persistence_threshold``) belong to no layer. They are
gathered together when the first pass after an optimizer step begins.

On a GPU the host never waits here. A gather runs on a stream of its own, after all that was
launched before it: after the optimizer step that wrote the partitions, and after the layer before
the one at work, whose memory it may take. The copy out of it runs on the stream that computes. So
no more than two layers are gathered at a time, even if the host is far ahead of the device.

The gradients of a layer are reduced one parameter at a time, as DeepSpeed does by default. With its
"leaf modules" it would reduce all gradients of a block together, but would hold all of them first.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.model.gpt import GPT
from megaspeed.topology.context import ParallelContext

# ZeRO-3: one layer's parameters, gathered together into one piece of memory.
#
#     partitions of rank r    [ a_r | b_r | c_r ]
#     arriving                [ a_0 b_0 c_0 | a_1 b_1 c_1 | ... ]             one all-gather
#     whole                   [ a_0 a_1 ... | b_0 b_1 ... | c_0 c_1 ... ]     one copy
#
# A parameter travels padded to a multiple of the number of ranks. One parameter alone arrives in
# ``whole`` directly. If there is one rank, its partitions are the parameters, and nothing is copied
# unless they are offloaded.
#
# While the layer is not gathered, its storage has 0 bytes, but it remains the same storage object.
# So autograd may save a view of a weight from forward to backward (``weight.t()`` in a linear
# layer, or any view that a compiled block saves). The view takes no memory, and shows the weight
# again as soon as the layer is gathered again. (torch's FSDP2 does the same: ``alloc_storage`` in
# torch/distributed/fsdp/_fully_shard/.)


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
            self._message = comm.allgather_fn(self._arriving, own, group=self._group, async_op=True)

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


class LayerGathers:
    """Gathers the layers of ``model`` from the partitions of ZeRO-3's optimizer.

    Args:
        model: this rank's layers, whose parameters DeepSpeed has partitioned.
        context: this rank's groups.
        config: when the next layer is gathered ahead of its use.
    """

    def __init__(self, model: GPT, context: ParallelContext, config: ZeroConfig) -> None:
        self._timeline = context.timeline
        layers = model.layer_modules()
        kept: list[Any] = [p for p in model.parameters() if _stays_whole(p)]
        self._kept = GatheredLayer(kept, context.dp_group, context.device)
        self._layers = [
            GatheredLayer(
                [p for p in layer.parameters() if not _stays_whole(p)],
                context.dp_group,
                context.device,
            )
            for layer in layers
        ]
        self._first_in_backward = 0 if model.embedding is None else 1
        self._config = config
        self._at_work: GatheredLayer | None = None
        self._accelerator = get_accelerator()
        self._stream = (
            None if self._accelerator.is_synchronized_device() else self._accelerator.Stream()
        )
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._before_forward, index))
            layer.register_forward_hook(functools.partial(self._after_forward, index))

    def begin_forward(self) -> None:
        """Called before the model's forward: gathers what stays whole until the next step."""
        if not self._kept.is_whole:
            self._start(self._kept)
            self._finish(self._kept)

    def end_backward(self) -> None:
        """Called after the model's backward: frees the last layer."""
        self._leave()

    def weights_changed(self) -> None:
        """Called if the partitions were written to outside an optimizer step."""
        self._kept.free()

    def _before_forward(self, index: int, layer: nn.Module, inputs: Any) -> None:
        if not _in_backward():
            self._enter(index, range(index + 1, len(self._layers)))

    def _after_forward(self, index: int, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if _in_backward():
            return
        self._leave()
        if output.requires_grad:
            output.register_hook(functools.partial(self._before_backward, index))

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        self._leave()
        if index >= self._first_in_backward:
            self._enter(index, range(index - 1, self._first_in_backward - 1, -1))
        else:
            # Autograd compares a gradient's shape with its parameter's.
            self._layers[index].give_shapes()
            self._at_work = self._layers[index]

    def _enter(self, index: int, following: range) -> None:
        layer = self._layers[index]
        if not layer.is_arriving:
            self._start(layer)
        self._finish(layer)
        self._at_work = layer
        for later in following[:1]:
            if self._config.prefetches(layer.elements, self._layers[later].elements):
                self._start(self._layers[later])

    def _leave(self) -> None:
        if self._at_work is not None:
            self._at_work.free()
        self._at_work = None

    def _start(self, layer: GatheredLayer) -> None:
        if self._stream is not None:
            self._stream.wait_stream(self._accelerator.current_stream())
        with self._on_own_stream():
            layer.start()

    def _finish(self, layer: GatheredLayer) -> None:
        with self._timeline.part("data"):
            if self._stream is not None:
                self._accelerator.current_stream().wait_stream(self._stream)
            layer.finish()

    def _on_own_stream(self) -> AbstractContextManager[None]:
        on_stream: AbstractContextManager[None] = self._accelerator.stream(self._stream)
        return on_stream


def _stays_whole(parameter: Any) -> bool:
    return bool(parameter.ds_persist)


def _in_backward() -> bool:
    """Whether autograd is at work on this thread, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1
