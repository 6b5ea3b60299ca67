"""Every rank of a grid calls the same collectives in the same order, and each send has a receive.

Over NCCL, a rank hangs without an error if it calls another collective than its peers or calls in
another order. Here each rank records its calls, from building the engine to the end of two steps.
The test compares the ledgers of all ranks.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.topology import context
from megaspeed.topology.launch import LaunchEnvironment
from tests.paper_gpu import fake_world
from tests.paper_gpu.accelerator import paper_accelerator
from tests.paper_gpu.fake_world import GPT2, LLAMA, MOE, batches, fake_rank, paper_run
from tests.paper_gpu.recorder import Message, Recorder
from tests.support.rank_pool import RankPool

TIED = {**GPT2, "num_hidden_layers": 4}
UNTIED = {**LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": False}
PER_MICRO_BATCH = {"gradient_reduction": "per_micro_batch"}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
CHUNKS = {"virtual_stages": 2}

ULYSSES = {"context": 2, "context_method": "ulysses"}
ALL_GATHER = {"context": 2, "context_method": "all_gather"}

TO_EXPERTS, TO_ALL = {"expert_exchange": "all_to_all"}, {"expert_exchange": "all_gather"}
LONG_MOE = {**MOE, "num_hidden_layers": 3}

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}

# (pp, dp, tp), ZeRO stage, model, parallel, and for some other keys of the JSON
CASES: list[tuple[Any, ...]] = [
    ((2, 2, 2), 0, TIED, {"schedule": "1f1b"}),
    ((2, 2, 2), 1, UNTIED, {"schedule": "gpipe", **SEQUENCE_PARALLEL}),
    ((2, 2, 2), 2, TIED, {"schedule": "1f1b", **PER_MICRO_BATCH, **SEQUENCE_PARALLEL}),
    ((2, 2, 2), 3, UNTIED, {"schedule": "gpipe", **PER_MICRO_BATCH}),
    ((4, 2, 1), 0, UNTIED, {"schedule": "gpipe"}),
    ((4, 2, 1), 1, TIED, {"schedule": "1f1b"}),
    ((4, 1, 2), 2, UNTIED, {"schedule": "gpipe"}),
    ((4, 2, 1), 3, TIED, {"schedule": "1f1b"}),
    ((4, 2, 1), 1, UNTIED, {"extra_in_flight": 3}),
    ((1, 4, 2), 3, TIED, {}),
    ((1, 2, 4), 1, UNTIED, {}),
    ((1, 4, 2), 1, TIED, {"replicate": 2, **SEQUENCE_PARALLEL}),
    ((2, 4, 1), 2, UNTIED, {"replicate": 2, **PER_MICRO_BATCH}),
    ((2, 4, 1), 3, TIED, {"replicate": 2, "schedule": "gpipe"}),
    ((1, 6, 1), 3, UNTIED, {"replicate": 3, "gradient_compression": {"type": "int8"}}),
    (
        (2, 4, 1),
        1,
        UNTIED,
        {"replicate": 2, "gradient_compression": {"type": "powersgd", "start_step": 2}},
    ),
    (
        (2, 2, 1),
        3,
        LONG_MOE,
        {**ULYSSES, "activation_checkpointing": "full"},
    ),
    ((2, 2, 2), 1, TIED, {"gradient_compression": {"type": "int8"}}),
    ((2, 2, 2), 3, TIED, {"gradient_compression": {"type": "powersgd", "start_step": 2}}),
    ((2, 2, 2), 1, TIED, {**CHUNKS, "micro_batch_groups": 1}),
    ((2, 2, 2), 2, UNTIED, {**CHUNKS, **SEQUENCE_PARALLEL}),
    ((2, 2, 2), 3, TIED, {**CHUNKS, "micro_batch_groups": 2, **SEQUENCE_PARALLEL}),
    ((2, 4, 1), 3, UNTIED, {**CHUNKS, "replicate": 2}),
    ((2, 2, 1), 3, {**UNTIED, "num_hidden_layers": 6}, {"virtual_stages": 3}),
    ((2, 2, 1), 3, UNTIED, ULYSSES),
    ((2, 1, 4), 1, {**UNTIED, "architecture": "olmo2"}, SEQUENCE_PARALLEL),
    ((1, 2, 2), 2, TIED, {**ULYSSES, "replicate": 2, **SEQUENCE_PARALLEL}),
    ((2, 1, 2), 3, TIED, {**ALL_GATHER, **SEQUENCE_PARALLEL}),
    ((2, 2, 1), 1, UNTIED, {**ALL_GATHER, "activation_checkpointing": "full"}),
    ((2, 2, 1), 3, UNTIED, {**CHUNKS, **ALL_GATHER}),
    ((1, 4, 1), 1, MOE, {"expert": 2, **TO_EXPERTS}),
    ((2, 2, 1), 3, LONG_MOE, {"expert": 2, **TO_ALL, "activation_checkpointing": "full"}),
    ((1, 2, 2), 2, MOE, {"expert": 4, **TO_EXPERTS, **PER_MICRO_BATCH}),
    ((1, 4, 2), 3, MOE, {"expert": 2, **TO_EXPERTS, "activation_checkpointing": "full"}),
    ((1, 2, 4), 0, {**MOE, "num_key_value_heads": 4}, {"expert": 8, **TO_ALL}),
    ((2, 2, 1), 1, {**MOE, "num_hidden_layers": 4}, {"expert": 2, **TO_EXPERTS, **CHUNKS}),
    ((1, 4, 1), 3, MOE, {"expert": 2, **TO_ALL, "replicate": 2}, MUON),
    ((1, 2, 1), 0, UNTIED, {}, MUON),
    ((1, 2, 4), 0, UNTIED, {}, MUON),
    ((2, 2, 2), 1, UNTIED, SEQUENCE_PARALLEL, MUON),
    ((1, 4, 1), 3, TIED, {}, MUON),
    ((2, 4, 1), 3, UNTIED, {"replicate": 2}, MUON),
    ((3, 2, 1), 2, TIED, {}, MUON),
]


def _ledger(
    launch: LaunchEnvironment, changes: dict[str, Any], shared: Path | None = None
) -> list[Message]:
    """Return the ledger of a rank. The ranks exchange numbers of rows in the file ``shared``."""
    run = paper_run(**changes)
    with (
        pytest.MonkeyPatch.context() as patch,
        paper_accelerator(),
        Recorder() as recorder,
        fake_rank(run, launch.rank) as worker,
    ):
        if shared is not None:
            patch.setattr(fake_world, "exchange_counts", _exchange_in(shared, launch.rank))
        for _ in range(2):
            assert not worker.train_step(batches(run), 1e-3).skipped
    return recorder.messages


def _exchange_in(file: Path, rank: int) -> Callable[[Tensor, Tensor, dist.ProcessGroup], None]:
    """Return an all-to-all of whole numbers through a file."""
    store, calls = dist.FileStore(str(file)), itertools.count()

    def exchange(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        ranks, call = dist.get_process_group_ranks(group), next(calls)
        store.set(f"{rank} {call}", json.dumps(sent.tolist()))
        for other, part in zip(ranks, received.chunk(len(ranks)), strict=True):
            numbers = torch.tensor(json.loads(store.get(f"{other} {call}")))
            part.copy_(numbers.chunk(len(ranks))[ranks.index(rank)])

    return exchange


def _describe(case: tuple[Any, ...]) -> str:
    (pp, dp, tp), stage, model, parallel, *more = case
    words = [f"pp{pp}-dp{dp}-tp{tp}-zero{stage}", model["architecture"], *("muon" for _ in more)]
    return "-".join([*words, *map(str, parallel.values())])


@pytest.mark.parametrize("case", CASES, ids=_describe)
def test_all_ranks_call_the_same_collectives_and_sends_meet_receives(
    pool: RankPool, case: tuple[Any, ...], tmp_path: Path
) -> None:
    (pp, dp, tp), stage, model, parallel, *more = case
    cp = parallel.get("context", 1)
    changes = {
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "tp": tp,
        "model": model,
        "parallel": parallel,
        "gradient_accumulation_steps": 4 if "virtual_stages" in parallel else min(pp + 1, 4),
        "zero_optimization": {"stage": stage},
        **dict(*more),
    }
    shared = tmp_path / "counts" if "expert" in parallel else None
    ledgers = pool.run(pp * dp * cp * tp, _ledger, changes, shared)
    _check_collectives(ledgers)
    _check_pairs(ledgers)
    sends = [m for ledger in ledgers for m in ledger if m.operator == "c10d::send"]
    assert bool(sends) == (pp > 1)
    if parallel.get("expert_exchange") == "all_to_all":
        splits = {message.splits for ledger in ledgers for message in ledger}
        assert len(splits) > 2, "ranks send different numbers of tokens"


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("stage", "buckets"), [(1, 4), (2, 9), (3, 9)])
def test_a_bucket_is_one_reduce_scatter_for_any_number_of_owners(
    pool: RankPool, stage: int, buckets: int, overlaps: bool
) -> None:
    """An earlier version sent a message to each owner. At dp 512 this took 1.4 s of a step, where
    one collective takes 0.1 s.

    At ZeRO-2 and 3, there are 4 buckets of matrices in each of 2 micro-batches, and one of vectors.
    """

    def collectives(dp: int) -> Counter[str]:
        zero = {"stage": stage, "overlap_comm": overlaps}
        changes = {"dp": dp, "model": UNTIED, "zero_optimization": zero}
        (ledger,) = pool.run(1, _ledger, changes)
        return Counter(message.operator for message in ledger)

    at_64 = collectives(64)
    assert at_64 == collectives(2)
    assert at_64["c10d::_reduce_scatter_base_"] == 2 * buckets, "in two steps"
    assert at_64["c10d::allreduce_"] == 2, "the reports"


def _groups_created(launch: LaunchEnvironment, changes: dict[str, Any]) -> list[list[str]]:
    """Return the names of the groups that a rank of each pipeline stage creates, in order."""
    run, create = paper_run(**changes), context._own_group
    names: dict[int, list[str]] = {0: [], run.grid.world_size - 1: []}
    with pytest.MonkeyPatch.context() as patch, paper_accelerator():
        for rank, created in names.items():

            def own_group(name: str, *more: Any, to: list[str] = created) -> dist.ProcessGroup:
                to.append(name)
                return create(name, *more)

            patch.setattr(context, "_own_group", own_group)
            with fake_rank(run, rank) as worker:
                worker.train_step(batches(run), 1e-3)
                assert worker.engine.muon is not None
                created.append(f"{len(worker.engine.muon._rounds)} rounds")
    return [*names.values()]


def test_a_stage_without_matrices_also_creates_muons_group(pool: RankPool) -> None:
    """On NCCL, a group is split from that of all ranks, and waits for all of them."""
    model = {**UNTIED, "num_hidden_layers": 2, "vocab_size": 4096}
    changes = {"pp": 2, "dp": 2, "tp": 2, "model": model, "zero_optimization": {"stage": 1}}
    ((first, last),) = pool.run(1, _groups_created, changes | MUON)
    assert first[:-1] == last[:-1] and first.count("stage") == 1
    assert (first[-1], last[-1]) == ("2 rounds", "0 rounds")


def _check_collectives(ledgers: list[list[Message]]) -> None:
    """Check that all members of a group have the same collectives in their ledgers, in the same
    order.
    """
    by_group: dict[tuple[int, ...], dict[int, list[Message]]] = defaultdict(dict)
    for rank, ledger in enumerate(ledgers):
        for message in ledger:
            if message.peer is None:
                by_group[message.group].setdefault(rank, []).append(message)
    for group, calls in by_group.items():
        assert set(calls) == set(group), f"ranks {sorted(calls)} call collectives of group {group}"
        first = list(map(_without_sizes, calls[group[0]]))
        for rank in group:
            own = list(map(_without_sizes, calls[rank]))
            assert own == first, f"rank {rank} and rank {group[0]} of group {group}"
        _check_sizes(group, [calls[rank] for rank in group])


def _without_sizes(message: Message) -> Message:
    """Leave out the sizes of an all-to-all with unequal parts, which differ between ranks."""
    if not message.splits:
        return message
    return replace(message, tensors=(((), message.tensors[0][1]),), splits=((),))


def _check_sizes(group: tuple[int, ...], ledgers: list[list[Message]]) -> None:
    """Check that in each all-to-all, each rank expects from the others what they send to it."""
    for together in zip(*ledgers, strict=True):
        if together[0].splits:
            received, sent = zip(*(message.splits for message in together), strict=True)
            assert received == tuple(zip(*sent, strict=True)), f"sizes in group {group}"


def _check_pairs(ledgers: list[list[Message]]) -> None:
    """Check that each rank receives what the other rank sends it, in the same order."""
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    received: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for rank, ledger in enumerate(ledgers):
        for message in ledger:
            if message.operator == "c10d::send" and message.peer is not None:
                sent[rank, message.peer].append(message.tensors)
            elif message.operator == "c10d::recv_" and message.peer is not None:
                received[message.peer, rank].append(message.tensors)
    assert sent == received


@pytest.mark.parametrize("mistake", ["another order", "another shape", "one call fewer"])
def test_a_ledger_that_differs_is_found(mistake: str) -> None:
    first = Message("c10d::allreduce_", (0, 1), (((4,), "float32"),))
    second = Message("c10d::_allgather_base_", (0, 1), (((8,), "float32"), ((4,), "float32")))
    other = Message("c10d::allreduce_", (0, 1), (((5,), "float32"),))
    wrong = {
        "another order": [second, first],
        "another shape": [other, second],
        "one call fewer": [first],
    }
    _check_collectives([[first, second], [first, second]])
    with pytest.raises(AssertionError, match="of group"):
        _check_collectives([[first, second], wrong[mistake]])


def test_an_all_to_all_whose_sizes_do_not_match_is_found() -> None:
    def exchange(received: tuple[int, int], sent: tuple[int, int]) -> Message:
        sizes = (((sum(received),), "bfloat16"), ((sum(sent),), "bfloat16"))
        return Message("c10d::alltoall_base_", (0, 1), sizes, splits=(received, sent))

    _check_collectives([[exchange((1, 2), (1, 3))], [exchange((3, 4), (2, 4))]])
    with pytest.raises(AssertionError, match="sizes in group"):
        _check_collectives([[exchange((1, 2), (1, 3))], [exchange((4, 3), (2, 4))]])


def test_a_send_that_nobody_receives_is_found() -> None:
    tensors = (((2, 16, 32), "bfloat16"),)
    send = Message("c10d::send", (0, 1), tensors, peer=1)
    receive = Message("c10d::recv_", (0, 1), tensors, peer=0)
    _check_pairs([[send], [receive]])
    for ledgers in ([[send], []], [[], [receive]], [[send, send], [receive]]):
        with pytest.raises(AssertionError):
            _check_pairs(ledgers)
