"""Links between real processes over gloo."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.pipeline.p2p import Links, PipelineProtocolError
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool


def pipeline(launch: LaunchEnvironment) -> ParallelContext:
    return ParallelContext.create(
        Grid(pp=launch.world_size, dp=1, tp=1), launch, timeout_seconds=limit(30)
    )


def connect(
    context: ParallelContext, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32
) -> Links:
    assert context.pp_group is not None
    return Links.connect(context.pp_group, shape=shape, dtype=dtype, device=context.device)


# --- what arrives ---------------------------------------------------------------------------------


def passed_around(launch: LaunchEnvironment) -> None:
    """Each stage sends to the next one of the ring and to the one before, in one batch."""
    with pipeline(launch) as context:
        own, stages = context.pp_rank, context.grid.pp
        before, after = (own - 1) % stages, (own + 1) % stages
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            links = connect(context, dtype=dtype)
            # Small integers, exact in bf16, and not contiguous.
            sent = (torch.arange(6).reshape(3, 2).t() + 10 * own).to(dtype)
            for _ in range(3):
                if stages == 2:
                    received = links.start([(sent, after)], [before])
                else:
                    received = links.start([(sent, after), (sent, before)], [before, after])
                links.finish()
                for tensor, stage in zip(received, (before, after), strict=False):
                    assert torch.equal(tensor, sent + 10 * (stage - own))
                    assert tensor.is_contiguous() and not tensor.requires_grad


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_batch_carries_messages_of_every_dtype_around_a_ring(pool: RankPool, stages: int) -> None:
    pool.run(stages, passed_around)


def lone_sends(launch: LaunchEnvironment) -> None:
    with pipeline(launch) as context:
        links = connect(context)
        if context.rank == 0:
            sent = [torch.full((2, 3), float(value)) for value in range(3)]
            alive = []
            for tensor in sent:
                links.start([(tensor, 1)])
                alive.append(weakref.ref(tensor.untyped_storage()))
            del tensor
            sent.clear()
            # A send starts when the previous one has been received, so only the last is in flight.
            assert [storage() is not None for storage in alive] == [False, False, True]
            links.finish()
            assert alive[-1]() is None
        else:
            for value in range(3):
                (received,) = links.start([], [0])
                links.finish()
                assert received.unique().tolist() == [value]


def test_links_keep_what_they_send_until_it_is_received(pool: RankPool) -> None:
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
        links = connect(context, dtype=torch.bfloat16)
        other = 1 - context.rank
        tensor = torch.full((2, 3), float(context.rank), dtype=torch.bfloat16)
        (received,) = links.start([(tensor, other)], [other])
        alive = [weakref.ref(message.untyped_storage()) for message in seen]
        for message, own in zip(seen, (tensor, received), strict=True):
            assert message.data_ptr() == own.data_ptr()
            assert message.untyped_storage()._cdata != own.untyped_storage()._cdata
        seen.clear()
        del message
        assert all(storage() is not None for storage in alive), "kept until the batch is done"
        links.finish()
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
        links = connect(context)
        if context.rank == 0:
            links.start([(torch.full((2, 3), 1.0), 1)])
            for other in (torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.bfloat16)):
                with pytest.raises(PipelineProtocolError, match=r"Rank 0 tried .* to rank 1"):
                    links.start([(other, 1)], [1])
            links.start([(torch.full((2, 3), 2.0), 1)])
            links.finish()
        else:
            received = []
            for _ in range(2):
                received += links.start([], [0])
                links.finish()
            assert [tensor.unique().tolist() for tensor in received] == [[1.0], [2.0]]


def test_a_later_tensor_of_another_shape_is_refused_before_it_is_sent(pool: RankPool) -> None:
    pool.run(2, a_sender_changes_its_mind)


def gpu_that_the_watch_asks(launch: LaunchEnvironment) -> torch.device:
    """Return the GPU that another thread makes its own before it asks about messages."""
    taken: list[torch.device] = []
    with pipeline(launch) as context, pytest.MonkeyPatch.context() as patch:
        links = connect(context)
        links._device = torch.device("cuda", 3)
        patch.setattr(torch.cuda, "set_device", taken.append)
        assert links.pending() == []
    (device,) = taken
    return device


def test_the_watch_asks_about_messages_on_the_ranks_gpu(pool: RankPool) -> None:
    """A new thread would use GPU 0, and open a context there."""
    assert pool.run(2, gpu_that_the_watch_asks) == [torch.device("cuda", 3)] * 2
