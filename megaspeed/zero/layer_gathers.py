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
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megaspeed.config.zero_optimization import ZeroConfig
from megaspeed.model.gpt import GPT
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.gathered_layer import GatheredLayer


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
            if self._config.fetches_ahead(layer.elements, self._layers[later].elements):
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
