"""ZeRO-1 and 2: gathers the parameters that an optimizer step has changed, beside the next forward.

    optimizer step       changes this rank's part of each bucket
    gathers              one for each bucket, in the order in which a forward needs them
    next forward         each layer waits for the buckets that contain its parameters

DeepSpeed 0.19.8 gathers all of them at the end of its step, and waits
(``workarounds.without_gathers``). A step that is skipped gathers nothing.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megaspeed.data_axis.axis import DataAxis
from megaspeed.model.gpt import GPT
from megaspeed.tensor_parallel.collectives import all_gather_tensor
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.model_states import own_part


class StepGathers:
    """Gathers the buckets of this rank's parameters after each optimizer step.

    Args:
        model: this rank's layers. Their parameters are views of the buckets.
        buckets: the flat parameters of each bucket of the plan.
        context: this rank's groups.
        axis: which buckets are gathered, and in which order.
    """

    def __init__(
        self, model: GPT, buckets: Sequence[Tensor], context: ParallelContext, axis: DataAxis
    ) -> None:
        self._timeline = context.timeline
        self._gathers: list[tuple[Tensor, Tensor, dist.ProcessGroup | None]] = []
        number: dict[str, int] = {}  # full name -> index of the gather
        for gather in axis.gathers_after_step:
            number.update(dict.fromkeys((p.name for p in gather.parameters), len(self._gathers)))
            bucket = axis.bucket_of[gather.parameters[0].name]
            flat = buckets[axis.buckets.index(bucket)]
            own = flat.view(bucket.shards, -1)[own_part(bucket, context)]
            self._gathers.append((flat, own, context.group_along(bucket.reduction.axis)))
        self._pending: dict[int, Any] = {}  # index of the gather -> its work
        names = {parameter: name for name, parameter in model.named_parameters()}
        for layer in model.layer_modules():
            # The bucket of experts is not gathered if no other rank has a part of it.
            gathered = (name for each in layer.parameters() if (name := names[each]) in number)
            needed = sorted({number[name] for name in gathered})
            layer.register_forward_pre_hook(partial(self._before_forward, needed))

    def start(self) -> None:
        """Start all gathers. The current stream must have changed this rank's parts."""
        for index, (flat, own, group) in enumerate(self._gathers):
            # In place: ``own`` is a part of ``flat``, as NCCL and gloo allow.
            self._pending[index] = all_gather_tensor(flat, own, group=group, async_op=True)

    def finish(self) -> None:
        """Make the current stream wait for all gathers."""
        self._wait([*self._pending])

    def _before_forward(self, needed: Sequence[int], *_: object) -> None:
        if self._pending:  # only in the first forward after a step, and not in its recomputation
            self._wait([index for index in needed if index in self._pending])

    def _wait(self, indices: Sequence[int]) -> None:
        if indices:
            with self._timeline.part("data"):
                for index in indices:
                    self._pending.pop(index).wait()
