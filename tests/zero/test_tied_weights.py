"""A tied embedding is on the first and on the last pipeline stage, and stays one weight."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero.reductions import add_gradients_of_other_end
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16_IN_FP32, merge, tiny_corpus
from tests.zero.one_rank import OFFLOAD, OneRank, one_rank, small_run


def own_copy(rank: OneRank) -> Tensor | None:
    weights = rank.weights()
    return weights.get("embedding.tokens.weight", weights.get("head.output.weight"))


def copies_before_and_after(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[Tensor | None, Tensor | None]:
    with one_rank(launch, run, corpus) as rank:
        before = own_copy(rank)
        for step in range(4):
            assert not rank.train_step(step).skipped
        return before, own_copy(rank)


@pytest.mark.parametrize(
    ("layout", "stage", "changes"),
    [
        ((2, 2, 1), 0, {}),
        ((3, 1, 2), 1, BF16_IN_FP32),
        ((2, 3, 1), 2, {}),
        ((2, 2, 1), 2, {"zero_optimization": OFFLOAD}),
        ((3, 2, 1), 3, {"parallel": {"gradient_reduction": "per_step"}}),
    ],
)
def test_both_copies_of_a_tied_weight_are_bitwise_equal_after_training(
    pool: RankPool,
    text: Path,
    cache: Path,
    layout: tuple[int, int, int],
    stage: int,
    changes: dict[str, Any],
) -> None:
    pp, dp, tp = layout
    zero = {"zero_optimization": {"stage": stage}}
    run = small_run(text, pp=pp, dp=dp, tp=tp, **merge(zero, changes))
    copies = pool.run(pp * dp * tp, copies_before_and_after, run, tiny_corpus(run, cache))
    stage_ranks = dp * tp
    first, last = copies[:stage_ranks], copies[-stage_ranks:]
    assert all(after is None for _, after in copies[stage_ranks:-stage_ranks])
    for (before, on_first), (_, on_last) in zip(first, last, strict=True):
        assert before is not None and on_first is not None and on_last is not None
        assert torch.equal(on_first, on_last)
        assert not torch.equal(on_first, before), "it was trained"


def messages_of_the_exchange(launch: LaunchEnvironment) -> list[bool]:
    """Return whether each message shares its storage with the tensor whose memory it has."""
    own, others = [torch.ones(3), torch.ones(4)], [torch.zeros(3), torch.zeros(4)]
    seen: list[Tensor] = []
    empty = iter(others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda _: next(empty))
        patch.setattr(dist, "P2POp", lambda kind, tensor, *rest: seen.append(tensor))
        patch.setattr(dist, "batch_isend_irecv", lambda messages: [])
        group: Any = None
        add_gradients_of_other_end(own, group, peer=1, device=torch.device("cpu"))
    made = [own[0], others[0], own[1], others[1]]
    assert [tensor.data_ptr() for tensor in seen] == [tensor.data_ptr() for tensor in made]
    return [
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        for one, other in zip(seen, made, strict=True)
    ]


def test_the_allocator_does_not_know_the_memory_of_exchanged_gradients(pool: RankPool) -> None:
    """The messages of a pipeline have this property, too. See ``as_message``."""
    assert pool.run(1, messages_of_the_exchange) == [[False] * 4]
