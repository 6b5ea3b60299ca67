"""Tensors between neighbouring pipeline stages.

    previous stage  <---- link ---->  this stage  <---- link ---->  next stage
                    activations -->               activations -->
                    <-- gradients                 <-- gradients

All messages of a pipeline use one process group. One ``batch_isend_irecv`` carries either a single
message, or a send and a receive that face each other (``schedules.form_exchanges``). On a GPU it is
one NCCL kernel on the group's communicator. A single message is a batch too, because for a plain
``isend`` torch opens a communicator for each pair of ranks if no device is bound to the group.

A link has at most one batch in flight: before it starts the next batch, it waits for the last one.
On a GPU the current stream waits, not the host. The link keeps the tensors until then.
``check_schedule`` proves that this cannot deadlock, even if each stage waits for every message as
soon as it has started it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import to_dlpack

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


class Link:
    """The messages between this rank and one neighbour.

    Every message is a contiguous tensor of one shape and dtype.

    Args:
        group: the process group along the pipeline axis.
        peer: global rank of the neighbour.
        shape, dtype: of every message.
        device: of every message on this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._peer = peer
        self._shape = torch.Size(shape)
        self._dtype = dtype
        # "cuda" has no index. A tensor's device has one, and ``_check_own`` compares the two.
        self._device = torch.empty(0, device=device).device
        self._works: list[dist.Work] = []
        self._in_flight: list[str] = []
        self._is_waiting = False
        self._messages: list[dist.P2POp] = []

    def send(self, tensor: Tensor) -> None:
        """Start to send ``tensor``; do not write to it before ``finish``.

        Raises ``PipelineProtocolError``, before anything is sent, if the shape, dtype or device of
        ``tensor`` is not that of the link.
        """
        self._start(tensor, None)

    def receive(self) -> Tensor:
        """Start to receive a new tensor, which is complete after ``finish``."""
        received = self._new_tensor()
        self._start(None, received)
        return received

    def exchange(self, tensor: Tensor) -> Tensor:
        """Start to send ``tensor`` and to receive a new one, as one batch. Raises like ``send``."""
        received = self._new_tensor()
        self._start(tensor, received)
        return received

    def pending(self) -> list[str]:
        """Pending messages, such as "receive of float32 of shape (4, 16, 64) from rank 2".

        On a CPU, a message is pending while ``finish`` waits for it. On a GPU, ``finish`` does not
        make the host wait, so a message is pending until its transfer is complete. Another thread
        may call this method.
        """
        on_gpu = self._device.type != "cpu"
        if all(work.is_completed() for work in self._works) if on_gpu else not self._is_waiting:
            return []
        what = _describe(self._shape, self._dtype)
        return [f"{direction.format(what)} rank {self._peer}" for direction in self._in_flight]

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

    def _start(self, sent: Tensor | None, received: Tensor | None) -> None:
        self.finish()
        messages = []
        if sent is not None:
            self._check_own(sent)
            sent = as_message(sent.detach().contiguous())
            messages.append(dist.P2POp(dist.isend, sent, self._peer, self._group))
        if received is not None:
            received = as_message(received)
            messages.append(dist.P2POp(dist.irecv, received, self._peer, self._group))
        self._messages = messages  # gloo and NCCL use the tensors until the batch is done
        # The receive first, because it is usually the one that takes longer.
        self._in_flight = [_DIRECTIONS[message.op] for message in reversed(messages)]
        self._works = dist.batch_isend_irecv(messages)

    def _new_tensor(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def _check_own(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.dtype, tensor.device) == (self._shape, self._dtype, self._device):
            return
        raise PipelineProtocolError(
            "All messages between two pipeline stages must have one shape, dtype and device. Rank "
            f"{dist.get_rank()} tried to send {_describe(tensor.shape, tensor.dtype)} on "
            f"{tensor.device} to rank {self._peer}, but the link carries "
            f"{_describe(self._shape, self._dtype)} on {self._device}. Nothing was sent."
        )


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The links to the previous and the next stage; None at the ends of the pipeline."""

    before: Link | None
    after: Link | None

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup,
        *,
        before: int | None,
        after: int | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Link this rank to its neighbours. All ranks of the group call this together.

        Args:
            group: the ranks of one pipeline, from the first stage to the last.
            before, after: global ranks of the neighbours; None at the ends of the pipeline.
            shape, dtype: of every message.
            device: of every message on this rank.

        Raises:
            PipelineProtocolError: two neighbours expect different shapes or dtypes. Every rank of
                the pipeline raises it, so no rank waits for another.
        """
        _agree(group, _describe(shape, dtype))

        def link(peer: int | None) -> Link | None:
            if peer is None:
                return None
            return Link(group, peer, shape=shape, dtype=dtype, device=device)

        return cls(before=link(before), after=link(after))

    def pending(self) -> list[str]:
        """Descriptions of the pending messages."""
        links = [link for link in (self.before, self.after) if link is not None]
        return [message for link in links for message in link.pending()]

    def drain(self) -> None:
        """Wait until all messages have arrived."""
        for link in (self.before, self.after):
            if link is not None:
                link.finish()


def _agree(group: dist.ProcessGroup, message: str) -> None:
    """Check once, before the first step, that neighbours expect the same messages."""
    ranks = dist.get_process_group_ranks(group)
    messages = [""] * len(ranks)
    dist.all_gather_object(messages, message, group)
    stages = zip(ranks, messages, strict=True)
    for (sender, sent), (receiver, expected) in pairwise(stages):
        if sent != expected:
            raise PipelineProtocolError(
                "Two neighbouring pipeline stages must agree on what they exchange. Rank "
                f"{sender} sends {sent}, but rank {receiver} expects {expected}. Start all ranks "
                "from the same configuration: compare the micro-batch size, sequence length, "
                "hidden size, precision and sequence_parallel."
            )


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
