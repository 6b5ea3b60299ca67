"""Tensors between pipeline stages.

    stage before  -- activations -->  this stage  -- activations -->  stage after
                  <-- gradients ----              <-- gradients ----

All messages of a pipeline use one process group. One ``batch_isend_irecv`` carries all messages of
a ``Transfer``. On a GPU it is one NCCL kernel on the group's communicator. A single message is a
batch too, because for a plain ``isend`` torch opens a communicator for each pair of ranks if no
device is bound to the group.

At most one batch is in flight: before a rank starts the next one, it waits for the last one. On a
GPU the current stream waits, not the host. The tensors are kept until then. ``check_schedule``
proves that this cannot deadlock, even if each stage waits for every batch as soon as it has started
it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from megaspeed.topology.process_settings import use_device

_DIRECTIONS = {dist.isend: "send of {} to", dist.irecv: "receive of {} from"}


def as_message(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that torch's allocator does not know, for ``dist.P2POp``.

    The caller must keep the result until its stream waits for the message.

    torch 2.13 (ProcessGroupNCCL.cpp, pointToPoint) calls recordStream for every message, because
    it does not know whether the caller waits. Freed memory is then not reused until the device has
    sent it, so a host that is ahead of the device allocates more. recordStream ignores memory that
    comes through DLPack, like all memory that torch has not allocated (CUDACachingAllocator.cpp).
    """
    message: Tensor = torch.from_dlpack(to_dlpack(tensor))
    return message


class PipelineProtocolError(RuntimeError):
    """Two pipeline stages do not agree on what they send each other."""


class Links:
    """The messages between this rank and the other stages of its pipeline.

    Every message is a contiguous tensor of one shape and dtype.

    Args:
        group: the ranks of one pipeline, from the first stage to the last.
        shape, dtype: of every message.
        device: of every message on this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._shape = torch.Size(shape)
        self._dtype = dtype
        # "cuda" has no index. A tensor's device has one, and ``start`` compares the two.
        self._device = torch.empty(0, device=device).device
        self._works: list[dist.Work] = []
        self._in_flight: list[str] = []
        self._is_waiting = False
        self._messages: list[dist.P2POp] = []

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Check that all stages expect the same messages. All ranks of the group call this.

        Raises:
            PipelineProtocolError: two neighbours expect different shapes or dtypes. Every rank of
                the pipeline raises it, so no rank waits for another.
        """
        # The stages agree once. A step has no headers, which the host would have to read.
        messages = [""] * group.size()
        dist.all_gather_object(messages, _describe(shape, dtype), group)
        stages = zip(dist.get_process_group_ranks(group), messages, strict=True)
        for (sender, sent), (receiver, expected) in pairwise(stages):
            if sent != expected:
                raise PipelineProtocolError(
                    "Two neighbouring pipeline stages must agree on what they exchange. Rank "
                    f"{sender} sends {sent}, but rank {receiver} expects {expected}. Start all "
                    "ranks from the same configuration: compare the micro-batch size, sequence "
                    "length, hidden size, precision and sequence_parallel."
                )
        return cls(group, shape=shape, dtype=dtype, device=device)

    def start(
        self, sent: Sequence[tuple[Tensor, int]], receive_from: Sequence[int] = ()
    ) -> list[Tensor]:
        """Start a batch of messages, after the last one is complete.

        Args:
            sent: tensors, and the stages that get them. Do not write to them before ``finish``.
            receive_from: the stages that send to this one.

        Returns:
            A new tensor from each of these stages, complete after ``finish``.

        Raises:
            PipelineProtocolError: a tensor has not the shape, dtype or device of all messages.
                Nothing is sent.
        """
        self.finish()
        own = self._shape, self._dtype, self._device
        for tensor, stage in sent:
            if (tensor.shape, tensor.dtype, tensor.device) != own:
                raise PipelineProtocolError(
                    "All messages between two pipeline stages must have one shape, dtype and "
                    f"device. Rank {dist.get_rank()} tried to send "
                    f"{_describe(tensor.shape, tensor.dtype)} on {tensor.device} to rank "
                    f"{self._ranks[stage]}, but they exchange "
                    f"{_describe(self._shape, self._dtype)} on {self._device}. Nothing was sent."
                )
        received = [
            torch.empty(self._shape, dtype=self._dtype, device=self._device) for _ in receive_from
        ]
        batch: list[tuple[Any, Tensor, int]] = [
            (dist.isend, tensor.detach().contiguous(), stage) for tensor, stage in sent
        ]
        arrivals = zip(received, receive_from, strict=True)
        batch += [(dist.irecv, tensor, stage) for tensor, stage in arrivals]
        # gloo and NCCL use the tensors until the batch is done.
        self._messages = [
            dist.P2POp(operation, as_message(tensor), self._ranks[stage], self._group)
            for operation, tensor, stage in batch
        ]
        what = _describe(self._shape, self._dtype)
        # The receives first, because they are usually those that take longer.
        self._in_flight = [
            f"{_DIRECTIONS[message.op].format(what)} rank {message.peer}"
            for message in reversed(self._messages)
        ]
        self._works = dist.batch_isend_irecv(self._messages)
        return received

    def pending(self) -> list[str]:
        """Pending messages, such as "receive of float32 of shape (4, 16, 64) from rank 2".

        On a CPU, a message is pending while ``finish`` waits for it. On a GPU, ``finish`` does not
        make the host wait, so a message is pending until its transfer is complete. Another thread
        may call this method.
        """
        on_gpu = self._device.type != "cpu"
        use_device(self._device)  # another thread's current GPU would be GPU 0
        if all(work.is_completed() for work in self._works) if on_gpu else not self._is_waiting:
            return []
        return self._in_flight

    def finish(self) -> None:
        """Wait until the batch in flight is done, if there is one, and free what was sent.

        Call it on the stream on which the tensors were allocated.
        """
        self._is_waiting = True
        for work in self._works:
            work.wait()
        self._is_waiting = False
        self._works = []
        self._in_flight = []
        self._messages = []


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
