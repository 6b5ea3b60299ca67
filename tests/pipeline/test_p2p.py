"""Links between real processes over gloo."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.pipeline.p2p import Link, Neighbours, PipelineProtocolError
from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    Exchange,
    Forward,
    LoadMicroBatch,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
    stage_program,
)
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool

STAGES, MICRO_BATCHES = 3, 6


def pipeline(launch: LaunchEnvironment) -> ParallelContext:
    return ParallelContext.create(
        Grid(pp=launch.world_size, dp=1, tp=1), launch, timeout_seconds=30
    )


def connect(
    context: ParallelContext, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32
) -> Neighbours:
    assert context.pp_group is not None
    return Neighbours.connect(
        context.pp_group,
        before=context.previous_rank,
        after=context.next_rank,
        shape=shape,
        dtype=dtype,
        device=context.device,
    )


# --- what a pipeline does -------------------------------------------------------------------------


def source(micro_batch: int, dtype: torch.dtype) -> Tensor:
    """Return (2, 3) small integers, exact in bf16, and not contiguous."""
    return (torch.arange(6).reshape(3, 2).t() + 10 * micro_batch).to(dtype)


def run_both_schedules(launch: LaunchEnvironment) -> None:
    with pipeline(launch) as context:
        for schedule in SCHEDULES.values():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                neighbours = connect(context, dtype=dtype)
                run_stage(context.pp_rank, schedule, neighbours, dtype)
                neighbours.drain()


def run_stage(rank: int, schedule: Schedule, neighbours: Neighbours, dtype: torch.dtype) -> None:
    """Add 1 to the activation and double the gradient. The first gradient is the output."""
    values: dict[int, Tensor] = {}
    before, after = neighbours.before, neighbours.after
    for instruction in stage_program(schedule, STAGES, rank, MICRO_BATCHES):
        match instruction:
            case LoadMicroBatch(m) if rank == 0:
                values[m] = source(m, dtype)
            case ReceiveActivation(m):
                assert before is not None
                values[m] = before.receive()
            case Exchange(SendGradient(m), ReceiveActivation(k)):
                assert before is not None
                values[k] = before.exchange(values.pop(m))
            case Forward(m):
                if before is not None:
                    before.finish()
                assert torch.equal(values[m], source(m, dtype) + rank)
                assert rank == 0 or values[m].is_contiguous()
                assert not values[m].requires_grad
                values[m] = values[m].requires_grad_() + 1
            case SendActivation(m):
                assert after is not None
                after.send(values[m])
            case Exchange(SendActivation(m), ReceiveGradient(k)):
                assert after is not None
                values[k] = after.exchange(values[m])
            case ReceiveGradient(m):
                assert after is not None
                values[m] = after.receive()
            case Backward(m):
                if after is not None:
                    after.finish()
                doublings = STAGES - 1 - rank
                assert torch.equal(values[m], (source(m, dtype) + STAGES) * 2**doublings)
                values[m] = values[m].detach() * 2
            case SendGradient(m):
                assert before is not None
                before.send(values.pop(m))


def test_both_schedules_carry_every_micro_batch_in_every_dtype(pool: RankPool) -> None:
    pool.run(STAGES, run_both_schedules)


def lone_sends(launch: LaunchEnvironment) -> None:
    with pipeline(launch) as context:
        neighbours = connect(context)
        link = neighbours.after or neighbours.before
        assert link is not None
        if context.rank == 0:
            sent = [torch.full((2, 3), float(value)) for value in range(3)]
            alive = []
            for tensor in sent:
                link.send(tensor)
                alive.append(weakref.ref(tensor.untyped_storage()))
            del tensor
            sent.clear()
            # A send starts when the previous one has been received, so only the last is in flight.
            assert [storage() is not None for storage in alive] == [False, False, True]
            link.finish()
            assert alive[-1]() is None
        else:
            for value in range(3):
                received = link.receive()
                link.finish()
                assert received.unique().tolist() == [value]


def test_a_link_keeps_what_it_sends_until_it_is_received_and_no_longer(pool: RankPool) -> None:
    pool.run(2, lone_sends)


def storages_of_messages(launch: LaunchEnvironment) -> None:
    """torch gets the memory of a message to send or receive, but in another storage.

    This test sends nothing, because gloo keeps what it sends, and NCCL does not.
    """
    seen: list[Tensor] = []

    def noted(messages: list[dist.P2POp]) -> list[dist.Work]:
        seen.extend(message.tensor for message in messages)
        return []

    with pipeline(launch) as context, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", noted)
        neighbours = connect(context, dtype=torch.bfloat16)
        link = neighbours.after or neighbours.before
        assert link is not None
        tensor = torch.full((2, 3), float(context.rank), dtype=torch.bfloat16)
        received = link.exchange(tensor)
        alive = [weakref.ref(message.untyped_storage()) for message in seen]
        for message, own in zip(seen, (tensor, received), strict=True):
            assert message.data_ptr() == own.data_ptr()
            assert message.untyped_storage()._cdata != own.untyped_storage()._cdata
        seen.clear()
        del message
        assert all(storage() is not None for storage in alive), "kept until the batch is done"
        link.finish()
        assert all(storage() is None for storage in alive)


def test_the_allocator_does_not_know_the_memory_of_messages(pool: RankPool) -> None:
    """torch's NCCL calls recordStream for each message, which keeps freed memory from being reused.

    Only a GPU can show this effect. torch ignores the call for a storage that it did not allocate.
    """
    pool.run(2, storages_of_messages)


# --- what is refused ------------------------------------------------------------------------------


def three_stages_disagree(launch: LaunchEnvironment) -> None:
    announced = [
        ((2, 4), torch.float32, "float32 of shape (2, 4)"),
        ((6,), torch.float32, "float32 of shape (6,)"),
        ((2, 3), torch.bfloat16, "bfloat16 of shape (2, 3)"),
    ]
    with pipeline(launch) as context:
        for shape, dtype, described in announced:
            own = (shape, dtype) if context.rank == 1 else ((2, 3), torch.float32)
            # The third stage agrees with neither of the others, but it does not wait for them.
            with pytest.raises(PipelineProtocolError) as error:
                connect(context, *own)
            assert "Rank 0 sends float32 of shape (2, 3)" in str(error.value)
            assert f"rank 1 expects {described}" in str(error.value)


def test_stages_that_expect_another_shape_or_dtype_all_name_both_sides(pool: RankPool) -> None:
    pool.run(3, three_stages_disagree)


def a_sender_changes_its_mind(launch: LaunchEnvironment) -> None:
    with pipeline(launch) as context:
        neighbours = connect(context)
        link = neighbours.after or neighbours.before
        assert isinstance(link, Link)
        if context.rank == 0:
            link.send(torch.full((2, 3), 1.0))
            for other in (torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.bfloat16)):
                for start in (link.send, link.exchange):
                    with pytest.raises(PipelineProtocolError, match=r"Rank 0 tried .* to rank 1"):
                        start(other)
            link.send(torch.full((2, 3), 2.0))
            link.finish()
        else:
            received = []
            for _ in range(2):
                received.append(link.receive())
                link.finish()
            assert [tensor.unique().tolist() for tensor in received] == [[1.0], [2.0]]


def test_a_later_tensor_of_another_shape_is_refused_before_it_is_sent(pool: RankPool) -> None:
    pool.run(2, a_sender_changes_its_mind)
