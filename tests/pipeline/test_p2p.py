"""Channels between real processes over gloo."""

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megaspeed.pipeline.instructions import (
    Backward,
    Forward,
    Instruction,
    LoadMicroBatch,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from megaspeed.pipeline.p2p import Channel, PipelineProtocolError
from megaspeed.pipeline.schedules import SCHEDULES, peak_micro_batches_in_flight

HARD_LIMIT_SECONDS = 50.0


def run_ranks(world_size: int, tmp_path: Path, body: Callable[[int], None]) -> None:
    """Run `body(rank)` in `world_size` gloo processes; fail with the first failure or in time."""
    context = spawn(_rank_main, (world_size, str(tmp_path / "store"), body), world_size, join=False)
    deadline = time.monotonic() + HARD_LIMIT_SECONDS
    try:
        while not context.join(timeout=1.0):  # raises what a rank raised
            assert time.monotonic() < deadline, f"ranks still run after {HARD_LIMIT_SECONDS} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _rank_main(rank: int, world_size: int, store: str, body: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    body(rank)
    dist.destroy_process_group()


def channel(
    *,
    receive_from: int | None = None,
    send_to: int | None = None,
    shape: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float32,
    max_sends_in_flight: int = 2,
) -> Channel:
    """A channel over a new group of all ranks: every rank must call this at the same time."""
    return Channel(
        dist.new_group(),
        receive_from=receive_from,
        send_to=send_to,
        shape=shape,
        dtype=dtype,
        device=torch.device("cpu"),
        max_sends_in_flight=max_sends_in_flight,
    )


# --- what a pipeline does -------------------------------------------------------------------------

STAGES, MICRO_BATCHES = 3, 6


def source(micro_batch: int, dtype: torch.dtype) -> Tensor:
    """(2, 3) of small integers, exact in bf16, and not contiguous."""
    return (torch.arange(6).reshape(3, 2).t() + 10 * micro_batch).to(dtype)


def three_stages_run_both_schedules(rank: int) -> None:
    previous = rank - 1 if rank > 0 else None
    following = rank + 1 if rank < STAGES - 1 else None
    for schedule in SCHEDULES.values():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            in_flight = peak_micro_batches_in_flight(schedule, STAGES, rank, MICRO_BATCHES)
            down = channel(
                receive_from=previous,
                send_to=following,
                dtype=dtype,
                max_sends_in_flight=in_flight,
            )
            up = channel(
                receive_from=following,
                send_to=previous,
                dtype=dtype,
                max_sends_in_flight=in_flight,
            )
            run_stage(rank, schedule(STAGES, rank, MICRO_BATCHES), down, up, dtype)
            down.drain()
            up.drain()
            assert down.sends_in_flight == up.sends_in_flight == 0


def run_stage(
    rank: int, program: Iterable[Instruction], down: Channel, up: Channel, dtype: torch.dtype
) -> None:
    """Each stage adds 1 to the activation and doubles the gradient, which begins as the output."""
    values: dict[int, Tensor] = {}
    activations_sent = 0
    for instruction in program:
        match instruction:
            case LoadMicroBatch(m) if rank == 0:
                values[m] = source(m, dtype)
            case ReceiveActivation(m):
                values[m] = down.receive()
                assert torch.equal(values[m], source(m, dtype) + rank)
                assert values[m].is_contiguous()
                assert not values[m].requires_grad
            case Forward(m):
                values[m] = values[m].requires_grad_() + 1
            case SendActivation(m):
                down.send(values[m])
                activations_sent += 1
            case ReceiveGradient(m):
                values[m] = up.receive()
                down.finish_oldest_send()  # the gradient is here, so its activation had arrived
                assert down.sends_in_flight == activations_sent - (m + 1)
                doublings = STAGES - 1 - rank
                assert torch.equal(values[m], (source(m, dtype) + STAGES) * 2**doublings)
            case Backward(m):
                values[m] = values[m].detach() * 2
            case SendGradient(m):
                up.send(values[m])


def test_both_schedules_carry_every_micro_batch_in_every_dtype(tmp_path: Path) -> None:
    run_ranks(STAGES, tmp_path, three_stages_run_both_schedules)


def a_message_is_finished_twice(rank: int) -> None:
    link = channel(send_to=1 if rank == 0 else None, receive_from=0 if rank == 1 else None)
    if rank == 0:
        for value in (1.0, 2.0, 3.0):  # the third waits for the first, as two may be in flight
            link.send(torch.full((2, 3), value))
        link.finish_oldest_send()  # the first once more: rank 1 has not received the second yet
        assert link.sends_in_flight == 2
    assert rank == 0 or link.receive().unique().tolist() == [1.0]
    dist.barrier()
    if rank == 1:
        assert [link.receive().unique().tolist() for _ in range(2)] == [[2.0], [3.0]]
    link.drain()


def test_to_finish_a_message_that_has_gone_waits_for_no_later_one(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, a_message_is_finished_twice)


# --- what is refused ------------------------------------------------------------------------------


def two_stages_disagree(rank: int) -> None:
    announced = [
        ((2, 4), torch.float32, "float32 of shape (2, 4)"),
        ((6,), torch.float32, "float32 of shape (6,)"),
        ((2, 3), torch.bfloat16, "bfloat16 of shape (2, 3)"),
    ]
    alive = []  # a channel outlives its unreceived sends
    for shape, dtype, described in announced:
        if rank == 0:
            sender = channel(send_to=1, shape=shape, dtype=dtype)
            sender.send(torch.zeros(shape, dtype=dtype))
            alive.append(sender)
        else:
            with pytest.raises(PipelineProtocolError) as error:
                channel(receive_from=0, shape=(2, 3), dtype=torch.float32).receive()
            assert f"Rank 0 sends {described}" in str(error.value)
            assert "rank 1 expects float32 of shape (2, 3)" in str(error.value)
    dist.barrier()


def test_a_receiver_that_expects_another_shape_or_dtype_names_both_sides(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, two_stages_disagree)


def a_sender_changes_its_mind(rank: int) -> None:
    link = channel(send_to=1 if rank == 0 else None, receive_from=0 if rank == 1 else None)
    if rank == 0:
        link.send(torch.full((2, 3), 1.0))
        for other in (torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.bfloat16)):
            with pytest.raises(PipelineProtocolError, match=r"Rank 0 was to send .* to rank 1"):
                link.send(other)
        for value in (2.0, 3.0, 4.0):
            link.send(torch.full((2, 3), value))
            assert link.sends_in_flight <= 2
        link.drain()
    else:
        received = [link.receive() for _ in range(4)]
        assert [tensor.unique().tolist() for tensor in received] == [[1.0], [2.0], [3.0], [4.0]]

    with pytest.raises(PipelineProtocolError, match="not int64 of shape"):
        channel(send_to=1 - rank, dtype=torch.int64)
    with pytest.raises(PipelineProtocolError, match="up to 8 dims"):
        channel(send_to=1 - rank, shape=(1,) * 9)


def test_a_later_tensor_of_another_shape_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, a_sender_changes_its_mind)
