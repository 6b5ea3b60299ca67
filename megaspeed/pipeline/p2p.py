"""Tensors between neighbouring pipeline stages, in one direction.

A pipeline has two channels, each over a process group of its own:

    activations  stage 0 ---> stage 1 ---> stage 2      receive from previous, send to next
    gradients    stage 0 <--- stage 1 <--- stage 2      receive from next, send to previous

Why two groups: NCCL runs what is asked of one communicator between two ranks in the order in which
it was asked, and a send is done only when the other side receives. In 1f1b two neighbours
send at the same time, one an activation and the other a gradient, before either receives. On one
communicator each receive would queue behind its own rank's send, and both would wait for ever; on
two they pass each other.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

# What the header calls a dtype. The numbers are the protocol: add to them, never change one.
_DTYPE_NUMBERS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
)
_MOST_DIMS = 8


class PipelineProtocolError(RuntimeError):
    """Two pipeline stages do not agree on what they send each other."""


class Channel:
    """One direction of point-to-point messages along the pipeline, as seen by one rank.

    Every message is a contiguous tensor of one shape and dtype, known to both ends when they are
    built. At the first message the sender announces both in a header, which the receiver compares
    with its own; afterwards only payloads travel.

    Args:
        group: the process group along the pipeline axis, used for this direction only.
        receive_from: global rank of the stage this channel comes from; None at its source.
        send_to: global rank of the stage this channel goes to; None at its end.
        shape, dtype: of every message.
        device: where received tensors are made and sent ones must be.
        max_sends_in_flight: how many unreceived messages are kept. A further `send` waits for the
            oldest. A schedule's `peak_micro_batches_in_flight` is enough for it not to deadlock
            (`check_schedule` proves it with that number) and bounds the memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        receive_from: int | None,
        send_to: int | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        max_sends_in_flight: int,
    ) -> None:
        assert max_sends_in_flight >= 1, max_sends_in_flight
        self._group = group
        self._receive_from = receive_from
        self._send_to = send_to
        self._shape = torch.Size(shape)
        self._dtype = dtype
        # "cuda" names no one device, but the tensors to compare with do.
        self._device = torch.empty(0, device=device).device
        self._max_sends_in_flight = max_sends_in_flight
        self._header = _encode(self._shape, dtype)
        self._header_sent = False
        self._header_checked = False
        self._sends: deque[_Send] = deque()
        self._finished = 0  # messages that have left _sends since the channel was made
        self._known_received = 0  # messages that the caller has said are received

    @property
    def sends_in_flight(self) -> int:
        """How many sent tensors this channel still keeps alive."""
        return len(self._sends)

    def send(self, tensor: Tensor) -> None:
        """Start sending `tensor` and return; do not write to it before it has been received.

        Raises `PipelineProtocolError`, before anything is sent, for another shape, dtype or device
        than the channel's.
        """
        assert self._send_to is not None, "this is the end of the channel: there is no receiver"
        self._check_own(tensor)
        while self._sends and self._sends[0].is_finished():
            self._finish_oldest()
        while len(self._sends) >= self._max_sends_in_flight:
            self._finish_oldest()
        tensors = [tensor.detach().contiguous()]
        if not self._header_sent:
            tensors.insert(0, torch.tensor(self._header, device=self._device))
            self._header_sent = True
        self._sends.append(_Send(tensors, [self._start_send(part) for part in tensors]))

    def receive(self) -> Tensor:
        """Wait for the next message: a new tensor that does not require grad.

        Raises `PipelineProtocolError` at the first message where the sender announces another
        shape or dtype than this end expects.
        """
        assert self._receive_from is not None, "this is the source of the channel: no sender"
        if not self._header_checked:
            self._check_header(self._receive_payload((len(self._header),), torch.int64).tolist())
            self._header_checked = True
        return self._receive_payload(self._shape, self._dtype)

    def finish_oldest_send(self) -> None:
        """Let go of the oldest message that this has not been called for yet: it has been received.

        For a caller whose schedule proves it: when the gradient of a micro-batch comes back, its
        activation had arrived. gloo tells that a send is done only to who waits for it, so without
        this call its tensor stays until there are `max_sends_in_flight`. Returns at once.
        """
        self._known_received += 1
        while self._sends and self._finished < self._known_received:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait until everything sent has been received."""
        while self._sends:
            self._finish_oldest()
        self._known_received = self._finished

    def _finish_oldest(self) -> None:
        self._sends.popleft().finish()
        self._finished += 1

    def _start_send(self, tensor: Tensor) -> dist.Work:
        work = dist.isend(tensor, self._send_to, group=self._group)
        assert work is not None, "this rank is not in the channel's group"
        return work

    def _receive_payload(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, self._receive_from, group=self._group)
        return tensor

    def _check_own(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.dtype, tensor.device) == (self._shape, self._dtype, self._device):
            return
        raise PipelineProtocolError(
            f"Every message of a pipeline channel has one shape, dtype and device. Rank "
            f"{dist.get_rank()} was to send {_describe(tensor.shape, tensor.dtype)} on "
            f"{tensor.device} to rank {self._send_to}, but its channel carries "
            f"{_describe(self._shape, self._dtype)} on {self._device}. Nothing was sent."
        )

    def _check_header(self, header: list[int]) -> None:
        if header == self._header:
            return
        raise PipelineProtocolError(
            f"Two neighbouring pipeline stages must agree on what they exchange. Rank "
            f"{self._receive_from} sends {_decode(header)}, but rank {dist.get_rank()} expects "
            f"{_describe(self._shape, self._dtype)}. Start all ranks from the same configuration: "
            "compare the micro-batch size, sequence length, hidden size, precision and "
            "sequence_parallel."
        )


@dataclass(frozen=True, slots=True)
class _Send:
    """A message on its way, with its header if it is the first.

    The tensors stand beside their works because the transport reads them until these are done.
    """

    tensors: list[Tensor]
    works: list[dist.Work]

    def is_finished(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def finish(self) -> None:
        for work in self.works:
            work.wait()


def _encode(shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    """The header: dtype number, number of dims, sizes; zeros up to one length for all headers."""
    if dtype not in _DTYPE_NUMBERS or len(shape) > _MOST_DIMS:
        raise PipelineProtocolError(
            f"A pipeline channel carries tensors of up to {_MOST_DIMS} dims in one of "
            f"{', '.join(map(_name, _DTYPE_NUMBERS))}, not {_describe(shape, dtype)}."
        )
    return [_DTYPE_NUMBERS[dtype], len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))]


def _decode(header: list[int]) -> str:
    number, dims, *sizes = header
    for dtype, known in _DTYPE_NUMBERS.items():
        if number == known:
            return _describe(sizes[:dims], dtype)
    return f"something that is no tensor header ({header})"


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{_name(dtype)} of shape {tuple(shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
