"""All ranks that hold a copy of one value compare it bit by bit. A rank that differs is named."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.replicas import Replicas, ReplicasDiffer
from megaspeed.training.worker import Worker
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, LLAMA, MOE, tiny_corpus, tiny_run
from tests.zero.one_rank import OFFLOAD, one_rank

TEXT = Path(__file__).parents[2] / "LICENSE"
STEPS = 3
TIED = {**GPT2, "num_hidden_layers": 3, "tie_word_embeddings": True}
SHARED_HEADS = {**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 1, "qk_norm": True}


class Layout(NamedTuple):
    """The layout of a run of small ranks. Everything else is as in every tiny run."""

    pp: int
    dp: int
    tp: int
    stage: int
    changes: dict[str, Any]

    def run(self) -> Run:
        pp, dp, tp, stage, changes = self
        zero = {"stage": stage, **changes.get("zero_optimization", {})}
        values = {"gradient_accumulation_steps": 2, **changes, "zero_optimization": zero}
        return tiny_run(TEXT, pp=pp, dp=dp, tp=tp, **values)


BF16 = {"bf16": {"enabled": True}}
SEQUENCE = {"parallel": {"sequence_parallel": True}}
LAYOUTS = [
    Layout(1, 3, 1, 0, {"model": TIED}),
    Layout(1, 2, 2, 0, {"model": SHARED_HEADS, **SEQUENCE}),
    Layout(2, 1, 2, 1, {"model": TIED}),
    Layout(1, 2, 2, 1, {"model": SHARED_HEADS, **BF16}),
    Layout(2, 2, 2, 2, {"model": TIED, **BF16}),
    Layout(2, 2, 2, 3, {"model": TIED, **SEQUENCE}),
    Layout(2, 2, 1, 0, {"model": TIED, **BF16}),
    Layout(1, 2, 2, 3, {"model": SHARED_HEADS, **BF16}),
    Layout(1, 2, 1, 2, {"model": TIED, "zero_optimization": OFFLOAD, **BF16}),
    Layout(1, 4, 1, 1, {"model": TIED, "parallel": {"replicate": 2}}),
    Layout(
        1, 6, 1, 3, {"model": TIED, "parallel": {"replicate": 3}, "train_batch_size": 48, **BF16}
    ),
    Layout(1, 2, 2, 0, {"model": {**SHARED_HEADS, "qk_norm": "all_heads"}}),
    Layout(2, 3, 1, 3, {"model": {**MOE, "router_bias_rate": 0.01}}),
]
SHARED_EXPERTS = {
    stage: Layout(1, 4, 1, stage, {"model": MOE, "parallel": {"expert": 2, "replicate": replicate}})
    for stage, replicate in ((0, 1), (1, 1), (3, 2))
}
"""Two of four ranks hold the same experts."""


def trained(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, damages: "Sequence[Damage]"
) -> list[str]:
    """Train a little, check that copies are equal, and return this rank's message by damage."""
    torch.set_num_threads(1)
    messages = []
    with one_rank(launch, run, corpus) as rank:
        replicas = Replicas(rank.worker, 0)
        for step in range(STEPS):
            rank.train_step(step)
            replicas.check(step + 1)
        for damage in damages:
            if launch.rank == damage.rank:
                damage.do(rank.worker)
            with pytest.raises(ReplicasDiffer) as differ:
                replicas.check(STEPS + 1)
            messages.append(str(differ.value))
            if launch.rank == damage.rank:
                damage.do(rank.worker)  # a second time, which undoes the damage
        replicas.check(STEPS + 1)
    return messages


class Damage(NamedTuple):
    """Damage of a parameter: flips the lowest bit of the last element that a rank holds.

    Or it exchanges the first two elements, which changes no sum over the elements.
    """

    rank: int
    kind: str
    name: str
    exchanges: bool = False

    def do(self, worker: Worker) -> None:
        engine, balance = worker.engine, worker.balance
        held: Iterable[tuple[str, Tensor]] = () if balance is None else balance.named_biases()
        if self.kind == "parameter":
            held = ((part.name, part.values) for part in engine.parameter_fragments())
        elif self.kind == "master weight":
            held = ((part.name, part.weights) for part in engine.state_fragments())
        (values,) = (values for name, values in held if name == self.name and len(values))
        if self.exchanges:
            first_two = values.detach()[:2]
            first_two.copy_(first_two.flip(0))
            return
        bits = values.detach()[-1:].view(torch.int32 if values.element_size() == 4 else torch.int16)
        bits ^= 1


NORM = "blocks.0.attention_norm.weight"
QKV = "blocks.1.attention.qkv.weight"
KEY_NORM = "blocks.0.attention.key_norm.weight"
HEAD = "head.output.weight"
ROUTER = "blocks.2.mlp.router.weight"
EXPERTS = "blocks.1.mlp.gate_up.weight"

DAMAGES: list[tuple[Layout, dict[Damage, str]]] = [
    (
        LAYOUTS[-1],
        {Damage(4, "router bias", ROUTER): f"router bias {ROUTER} on rank 4, unlike 2"},
    ),
    (
        LAYOUTS[0],
        {
            Damage(1, "master weight", QKV): f"master weight {QKV} on rank 1, unlike 2",
            Damage(2, "parameter", NORM): f"parameter {NORM} on rank 2, unlike 2",
            Damage(1, "parameter", QKV, exchanges=True): f"{QKV} on rank 1, unlike 2",
        },
    ),
    (
        LAYOUTS[1],
        {
            Damage(3, "parameter", NORM): f"parameter {NORM} on rank 3, unlike 3",
            Damage(3, "parameter", QKV): f"parameter {QKV} on rank 3, unlike 3",
        },
    ),
    (
        LAYOUTS[2],
        {
            Damage(2, "master weight", HEAD): (
                "master weight embedding.tokens.weight on ranks 0, 2, which do not agree"
            ),
        },
    ),
    (
        LAYOUTS[4],
        {
            Damage(7, "master weight", "head.norm.weight"): (
                "master weight head.norm.weight on ranks 6, 7, which do not agree"
            ),
            Damage(7, "parameter", HEAD): "embedding.tokens.weight on rank 7, unlike 3",
        },
    ),
    (
        LAYOUTS[5],
        {Damage(1, "parameter", NORM): f"parameter {NORM} on ranks 0, 1, which do not agree"},
    ),
    (
        LAYOUTS[9],
        {
            Damage(3, "parameter", QKV): f"parameter {QKV} on rank 3, unlike 3",
            Damage(2, "master weight", QKV): (
                f"master weight {QKV} on ranks 0, 2, which do not agree"
            ),
        },
    ),
    (
        LAYOUTS[10],
        {
            Damage(5, "parameter", QKV): f"parameter {QKV} on rank 5, unlike 2",
            Damage(4, "master weight", QKV): f"master weight {QKV} on rank 4, unlike 2",
        },
    ),
    (
        LAYOUTS[11],
        {Damage(3, "parameter", KEY_NORM): f"parameter {KEY_NORM} on rank 3, unlike 3"},
    ),
    (
        SHARED_EXPERTS[0],
        {
            Damage(3, "parameter", EXPERTS): (
                f"parameter {EXPERTS} on ranks 1, 3, which do not agree"
            ),
            Damage(0, "master weight", EXPERTS): (
                f"master weight {EXPERTS} on ranks 0, 2, which do not agree"
            ),
            Damage(3, "parameter", QKV): f"parameter {QKV} on rank 3, unlike 3",
        },
    ),
    (
        SHARED_EXPERTS[1],
        {
            Damage(2, "parameter", EXPERTS): (
                f"parameter {EXPERTS} on ranks 0, 2, which do not agree"
            ),
            Damage(1, "parameter", QKV): f"parameter {QKV} on rank 1, unlike 3",
        },
    ),
    (
        SHARED_EXPERTS[3],
        {
            Damage(3, "master weight", EXPERTS): (
                f"master weight {EXPERTS} on ranks 1, 3, which do not agree"
            ),
            Damage(0, "parameter", EXPERTS): (
                f"parameter {EXPERTS} on ranks 0, 2, which do not agree"
            ),
        },
    ),
    *((LAYOUTS[number], {}) for number in (3, 6, 7, 8)),
]


@pytest.mark.parametrize(
    ("layout", "damages"), DAMAGES, ids=[str(layout[:4]) for layout, _ in DAMAGES]
)
def test_ranks_that_train_well_hold_equal_copies_and_what_differs_is_named(
    pool: RankPool, tmp_path: Path, layout: Layout, damages: dict[Damage, str]
) -> None:
    """Data ranks, tensor ranks, groups of heads and both ends of the pipeline have copies."""
    run = layout.run()
    ranks = pool.run(run.grid.world_size, trained, run, tiny_corpus(run, tmp_path), [*damages])
    assert all(messages == ranks[0] for messages in ranks), "all ranks end with the same message"
    for message, named in zip(ranks[0], damages.values(), strict=True):
        assert message.startswith(f"after step {STEPS + 1}, copies that must be equal differ: the ")
        assert named in message
        assert f"They were last equal after step {STEPS}" in message
