"""ZeRO-3: gathers parameters as the plan states: layers in the order of a pass, or chunks.

    forward     embedding > block 0 > block 1 > ... > head
    backward    the head's norm > ... > block 1 > block 0 > embedding, which gathers nothing

Each pass gathers each layer at most once. Layers of a chunk (``gather``, ``release``) arrive in the
order of the pass. A block that is recomputed in a backward is gathered already. The backward of the
embedding reads no weight, but autograd compares its shape. What stays gathered is gathered when the
first pass after an optimizer step begins.

On a GPU the host never waits. A gather runs on its own stream, after everything that was launched
before it: after the optimizer step that wrote the partitions, and after the layer before the
current one, whose memory it may reuse. So at most two layers are gathered at a time, or the chunks
that the program holds, even if the host is far ahead of the device.

These hooks replace DeepSpeed's, for the reasons in ``workarounds.remove_module_hooks``. Besides, a
hook on every module takes longer than the computation of a small module.
"""

import functools
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions

from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.gathers import Gather, PassOfChunk, aligned_elements
from megaspeed.model.gpt import GPT
from megaspeed.pipeline.schedules import Pass
from megaspeed.topology.context import ParallelContext


class GatheredLayer:
    """Gathers and frees the parameters a, b, c, ... of a layer, which DeepSpeed has partitioned.

        partitions of rank r    a_r    b_r    c_r
        gathered                [ a_0 a_1 ... | b_0 b_1 ... | c_0 c_1 ... ]     a coalesced gather

    Each parameter is padded to a multiple of the number of ranks, and gathered into a region of its
    own. Regions start at multiples of 128 bytes, for any number of ranks: kernels that Inductor
    compiled for aligned pointers fail at others, and cuBLAS falls back to slow ones. What is
    received is not copied again. With one rank, nothing is copied unless parameters are offloaded.
    The partitions of experts may be on other ranks. Then there are two collectives.

    While the layer is not gathered, its storage has 0 bytes, but remains the same storage object.
    So autograd may save a view of a weight from forward to backward (``weight.t()`` in a linear
    layer, or any view that a compiled block saves). The view takes no memory, and contains the
    weight again as soon as the layer is gathered again. (torch's FSDP2 does the same:
    ``alloc_storage`` in torch/distributed/fsdp/_fully_shard/.)

    Args:
        parameters: in the same order on every rank; may be empty. The ranks that hold the
            partitions of a parameter are its ``ds_process_group``.
        device: of the gathered parameters.
    """

    def __init__(self, parameters: Sequence[Any], device: torch.device) -> None:
        self._parameters, self._device = parameters, device
        dtype = parameters[0].dtype if parameters else None
        self._empty = torch.empty(0, dtype=dtype, device=device)
        copied = [p for p in parameters if _ranks(p) > 1 or p.ds_tensor.device != device]
        sizes = [_ranks(parameter) * parameter.partition_numel() for parameter in copied]
        spaces = [aligned_elements(size, self._empty.element_size()) for size in sizes]
        self._gathered = torch.empty(sum(spaces), dtype=dtype, device=device)
        self._places: list[_Place] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        """Of the parameters that are copied. The others are their partitions."""
        for parameter, size, space in zip(copied, sizes, self._gathered.split(spaces), strict=True):
            region, group = space[:size], parameter.ds_process_group
            own = region.view(_ranks(parameter), -1)[dist.get_rank(group)]
            self._places.append(_Place(parameter, group, region, own))
            self._views[parameter] = region[: parameter.ds_numel].view(parameter.ds_shape)
        self._groups = [*dict.fromkeys(place.group for place in self._places)]
        self._free_memory()
        self._work: list[Any] = []
        self.launched: Any = None
        """The event recorded when the gather was launched; None on a synchronized device."""

    @property
    def is_gathered(self) -> bool:
        """Whether all parameters have their values. DeepSpeed's step removes the values."""
        return all(p.ds_status is ZeroParamStatus.AVAILABLE for p in self._parameters)

    @property
    def is_finished(self) -> bool:
        """Whether ``finish`` need not be called. It must be called again if another layer has
        freed a tied weight.
        """
        return not self._work and self.is_gathered

    @torch.no_grad()
    def start(self) -> None:
        """Allocate the memory on the current stream, and start to gather into it."""
        if not self._places:
            return
        self._gathered.untyped_storage().resize_(self._gathered.nbytes)
        for group in self._groups:
            places = [place for place in self._places if place.group is group]
            partitions = [
                # What is offloaded is copied to its place among the partitions of all ranks.
                p.ds_tensor if p.ds_tensor.device == self._device else own.copy_(p.ds_tensor, True)
                for p, _, _, own in places
            ]
            if dist.get_world_size(group) > 1:
                options = AllgatherOptions()
                options.asyncOp = True
                regions = [place.region for place in places]
                work = group.allgather_into_tensor_coalesced(regions, partitions, options)
                self._work.append(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Make the current stream wait for the gathers, and set the parameters."""
        while self._work:
            self._work.pop().wait()
        self.give_shapes()
        for parameter in self._parameters:
            parameter.ds_status = ZeroParamStatus.AVAILABLE

    def give_shapes(self) -> None:
        """Give the parameters their shapes. Their values are whatever is in the memory."""
        for parameter in self._parameters:
            view = self._views.get(parameter)
            parameter.data = parameter.ds_tensor.view(parameter.ds_shape) if view is None else view

    def free(self) -> None:
        """Free the memory. The current stream must be the one that has used the parameters."""
        assert not self._work, "a gather in flight writes to this memory"
        for parameter in self._parameters:
            parameter.data = self._empty
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        self._free_memory()

    def _free_memory(self) -> None:
        self._gathered.untyped_storage().resize_(0)


class _Place(NamedTuple):
    """Where a parameter is gathered."""

    parameter: Any
    group: dist.ProcessGroup  # the ranks that hold its partitions
    region: Tensor  # what is gathered, flat
    own: Tensor  # the part of it that this rank sends


def _ranks(parameter: Any) -> int:
    """The number of ranks that hold partitions of a parameter."""
    return dist.get_world_size(parameter.ds_process_group)


class LayerGathers:
    """Gathers the layers of ``model`` from the partitions of ZeRO-3's optimizer.

    Args:
        model: this rank's layers, whose parameters DeepSpeed has partitioned.
        context: this rank's groups.
        axis: what each layer of a pass gathers, and what is held meanwhile.
    """

    def __init__(self, model: GPT, context: ParallelContext, axis: DataAxis) -> None:
        self._timeline = context.timeline
        parameters = dict(model.named_parameters())

        def made(gather: Gather) -> GatheredLayer:
            own = [parameters[parameter.name] for parameter in gather.parameters]
            return GatheredLayer(own, context.device)

        assert axis.persistent is not None, "a plan of ZeRO-3 has it"
        self._persistent = made(axis.persistent)
        self._persistent_is_coming = False  # whether it is being gathered
        layers = {each: made(each) for each in dict.fromkeys(chain(*axis.passes.values()))}
        self._orders = {
            own: [layers[gather] for gather in order] for own, order in axis.passes.items()
        }
        self._holds = {
            (own, following): [[layers[g] for g in hold] for hold in axis.held(own, following)]
            for own in axis.passes
            for following in (*axis.passes, None)
        }
        """(pass of a chunk, next pass) -> what is held at each layer of the pass, and after it."""
        self._hold = self._holds[("forward", 0), None]  # of the current pass
        last, has_head = len(model.chunks) - 1, model.head is not None
        self._embedding = self._orders["forward", 0][: model.embedding is not None]
        self._head = self._orders["forward", last][-1:] if has_head else []
        self._norm = self._orders["backward", last][:has_head]
        self._add_hooks(model)
        self._held: list[GatheredLayer] = []
        self._chunks: dict[int, list[GatheredLayer]] = {}  # gathered as a whole
        self._passes: list[PassOfChunk] = []
        self._accelerator = get_accelerator()
        self._stream = None
        if not self._accelerator.is_synchronized_device():
            # With this priority, a gather gets the next free multiprocessors before a product.
            self._stream = self._accelerator.Stream(priority=-1)

    def _add_hooks(self, model: GPT) -> None:
        modules = iter(model.layer_modules())
        for chunk, indices in enumerate(model.chunks):
            # The range is first. Otherwise ``zip`` would take one more layer, and lose it.
            for index, layer in zip(range(len(indices)), modules, strict=False):
                is_embedding = chunk == index == 0 and model.embedding is not None
                embedding = self._embedding[0] if is_embedding else None
                before = functools.partial(self._before_forward, index)
                after = functools.partial(self._after_forward, len(indices) - 1 - index, embedding)
                layer.register_forward_pre_hook(before)
                layer.register_forward_hook(after)

    def expect(self, passes: Iterable[PassOfChunk]) -> None:
        """Called before a step with its passes. Without it, no pass gathers for the next one."""
        self._passes = list(passes)

    def begin(self, direction: Pass, chunk: int) -> None:
        """Called before a pass through a chunk."""
        if not self._persistent.is_gathered:  # in the first pass after a step
            self._start_persistent()
            self._finish(self._persistent)
            self._persistent_is_coming = False
        own = direction, chunk
        self._passes = self._passes[1:] if self._passes[:1] == [own] else []
        self._hold = self._holds[own, self._passes[0] if self._passes else None]

    def gather(self, chunk: int, *, forward: bool) -> None:
        """Start to gather a chunk, and hold it until ``release``."""
        self._start_persistent()  # each layer needs some of them, so before the chunk
        order = self._orders["forward" if forward else "backward", chunk]
        layers = self._chunks[chunk] = list(dict.fromkeys(order))
        for layer in layers:
            self._start(layer)
        self._held += layers

    def release(self, chunk: int) -> None:
        self._chunks.pop(chunk)
        self._free_all_but([])

    def end_backward(self) -> None:
        """Called after the model's backward."""
        self._leave()
        for embedding in self._embedding:
            if embedding not in self._held:
                embedding.free()  # it was given a shape

    def _start_persistent(self) -> None:
        if not (self._persistent.is_gathered or self._persistent_is_coming):
            self._start(self._persistent)
            self._persistent_is_coming = True

    def free_persistent(self) -> None:
        """Free the persistent parameters, after their partitions were written to."""
        self._persistent.free()

    def _before_forward(self, index: int, layer: nn.Module, inputs: Any) -> None:
        if not _in_backward():
            self._enter(self._hold[index])

    def _after_forward(
        self,
        later: int,
        embedding: GatheredLayer | None,
        layer: nn.Module,
        inputs: Any,
        output: Tensor,
    ) -> None:
        if _in_backward():
            return
        if later == 0:
            self._leave()
        if output.requires_grad:
            output.register_hook(functools.partial(self._before_backward, later, embedding))

    def _before_backward(
        self, later: int, embedding: GatheredLayer | None, gradient: Tensor
    ) -> None:
        """Called before the backward of a layer that has ``later`` layers after it in its chunk."""
        if embedding is not None:
            self._leave()
            # Autograd compares a gradient's shape with its parameter's.
            embedding.give_shapes()
        else:
            self._enter(self._hold[later])

    def _enter(self, hold: Sequence[GatheredLayer]) -> None:
        """Gather the first of the layers to hold, and start to gather the others."""
        if hold[0] in self._norm and self._head[0] in self._held:
            hold = self._head  # gathered for forwards, and it contains the norm
        self._free_all_but(hold)
        for layer in hold:
            if layer not in self._held:
                self._start(layer)
                self._held.append(layer)
            if layer is hold[0] and not layer.is_finished:
                self._finish(layer)

    def _leave(self) -> None:
        """Free all but what the next pass needs first."""
        self._free_all_but(self._hold[-1])

    def _free_all_but(self, hold: Sequence[GatheredLayer]) -> None:
        kept = {*hold, *chain.from_iterable(self._chunks.values())}
        for layer in self._held:
            if layer not in kept:
                layer.free()
        self._held = [layer for layer in self._held if layer in kept]

    def _start(self, layer: GatheredLayer) -> None:
        if self._stream is not None:
            self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            layer.start()
            if self._stream is not None:
                # An event, not the stream: all layers of a chunk are launched before the first one
                # is finished.
                layer.launched = self._stream.record_event(layer.launched)

    def _finish(self, layer: GatheredLayer) -> None:
        with self._timeline.part("data"):
            if self._stream is not None:
                self._accelerator.current_stream().wait_event(layer.launched)
            layer.finish()


def _in_backward() -> bool:
    """Whether autograd runs a backward on this thread, so that a forward is a recomputation."""
    # torch has no public function for this; its utils/checkpoint.py calls the same one.
    return torch._C._current_graph_task_id() != -1
