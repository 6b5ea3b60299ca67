"""The executor over real pipelines of gloo ranks: what it computes, and what it keeps in memory.

The stages are plain modules with plain autograd, so plain torch computes the expected numbers.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megaspeed.model.documents import Documents
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.executor import Executor
from megaspeed.pipeline.p2p import Neighbours
from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    Exchange,
    Forward,
    Instruction,
    SendActivation,
    forward_only,
    stage_program,
)
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool

ROWS, WIDTH = 2, 3


def make_stage(pipeline_stage: int) -> nn.Module:
    """Make a stage (ROWS, WIDTH) -> (ROWS, WIDTH). Only its graph holds the middle tensor."""
    torch.manual_seed(pipeline_stage)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def load(micro_batch: int) -> MicroBatch:
    """Return inputs instead of tokens. A target of 0 is not counted."""
    generator = torch.Generator().manual_seed(micro_batch)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    counted = torch.randint(0, 2, (ROWS, WIDTH), generator=generator)
    return MicroBatch(
        tokens=x,
        targets=counted,
        samples=torch.tensor([2 * micro_batch, 2 * micro_batch + 1]),
        documents=Documents.beginning_at(torch.arange(WIDTH).expand(ROWS, WIDTH) == micro_batch),
    )


def loss_function(output: Tensor, counted: Tensor) -> Tensor:
    return (output.square() * counted).sum()


class PlainEngine:
    """A stage that torch alone runs. It keeps weak references to every tensor of each forward."""

    def __init__(self, module: nn.Module, *, is_last: bool) -> None:
        self.module = module
        self.is_last = is_last
        self.tensors: dict[int, list[weakref.ref[Tensor]]] = {}
        self.outputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.samples: list[Tensor] = []
        self.documents: list[Documents | None] = []
        self.last_flags: list[bool] = []
        self.reductions: list[str] = []

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        micro_batch = int(batch.samples[0]) // 2
        seen: list[Tensor] = [x]
        hooks = [
            layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output))
            for layer in self.module.children()
        ]
        output: Tensor = self.module(x)
        for hook in hooks:
            hook.remove()
        if self.is_last:
            output = loss_function(output, batch.targets)
        self.samples.append(batch.samples)
        self.documents.append(batch.documents)
        self.tensors[micro_batch] = [weakref.ref(tensor) for tensor in seen]
        self.outputs[micro_batch] = weakref.ref(output.untyped_storage())
        return output

    def backward(
        self, output: Tensor | GradientEdge, gradient: Tensor | None, *, last: bool
    ) -> None:
        self.last_flags.append(last)
        torch.autograd.backward(output, gradient)

    def reduce_gradients(self) -> None:
        self.reductions.append("data axis")

    def reduce_tied_gradients(self) -> None:
        self.reductions.append("tied")

    def alive(self) -> set[int]:
        """Return the micro-batches of which any tensor still exists."""
        return {m for m, tensors in self.tensors.items() if any(t() is not None for t in tensors)}

    def outputs_alive(self) -> set[int]:
        """Return the micro-batches whose output still occupies memory."""
        return {m for m, storage in self.outputs.items() if storage() is not None}


@dataclass(frozen=True)
class Held:
    """After one instruction: the micro-batches that still have any tensor, or their output."""

    instruction: Instruction | Exchange
    alive: set[int]
    outputs: set[int]


@dataclass(frozen=True)
class StageRecord:
    """The record of one stage."""

    loss_sum: Tensor | None
    gradients: list[Tensor | None]
    held: list[Held]
    samples: list[Tensor]
    documents: list[Documents | None]
    last_flags: list[bool]
    reductions: list[str]


def run_stage(launch: LaunchEnvironment, schedule: str | None, micro_batches: int) -> StageRecord:
    """Run one step of the named schedule, or an evaluation if the name is None."""
    grid = Grid(pp=launch.world_size, dp=1, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=30) as context:
        stage, stages = context.pp_rank, context.grid.pp
        run: Callable[..., Any] = forward_only if schedule is None else SCHEDULES[schedule]
        neighbours = connect(context)
        engine = PlainEngine(make_stage(stage), is_last=stage == stages - 1)
        executor = Executor(
            engine,
            neighbours,
            load=load,
            micro_batches=micro_batches,
        )
        held: list[Held] = []

        def watched() -> Iterator[Instruction | Exchange]:
            for instruction in stage_program(run, stages, stage, micro_batches):
                yield instruction
                held.append(Held(instruction, engine.alive(), engine.outputs_alive()))

        with torch.set_grad_enabled(schedule is not None):
            executor.run(watched())
        assert engine.alive() == set()
        return StageRecord(
            loss_sum=executor.loss_sum,
            gradients=[p.grad for p in engine.module.parameters()],
            held=held,
            samples=engine.samples,
            documents=engine.documents,
            last_flags=engine.last_flags,
            reductions=engine.reductions,
        )


def connect(context: ParallelContext) -> Neighbours:
    if context.pp_group is None:
        return Neighbours(before=None, after=None)
    return Neighbours.connect(
        context.pp_group,
        before=context.previous_rank,
        after=context.next_rank,
        shape=(ROWS, WIDTH),
        dtype=torch.float32,
        device=context.device,
    )


def one_process(stages: int, micro_batches: int) -> tuple[Tensor, list[Tensor | None]]:
    """Run all stages in one process. Return (sum of the losses, gradients of all parameters)."""
    model = nn.Sequential(*map(make_stage, range(stages)))
    batches = [load(m) for m in range(micro_batches)]
    losses = [loss_function(model(batch.tokens), batch.targets) for batch in batches]
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 5)])
def test_a_step_has_the_loss_and_the_gradients_of_one_process(
    pool: RankPool, schedule: str, stages: int, micro_batches: int
) -> None:
    records = pool.run(stages, run_stage, schedule, micro_batches)
    loss, gradients = one_process(stages, micro_batches)
    assert [r.loss_sum is None for r in records] == [True] * (stages - 1) + [False]
    torch.testing.assert_close(records[-1].loss_sum, loss)
    torch.testing.assert_close([g for r in records for g in r.gradients], gradients)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_receives_samples_documents_the_last_micro_batch_and_when_to_reduce(
    pool: RankPool, schedule: str
) -> None:
    for record in pool.run(2, run_stage, schedule, 3):
        assert [s.tolist() for s in record.samples] == [[0, 1], [2, 3], [4, 5]]
        for m, documents in enumerate(record.documents):
            assert documents is not None
            torch.testing.assert_close(vars(documents), vars(load(m).documents))
        assert record.last_flags == [False, False, True]
        assert record.reductions == ["data axis", "tied"]


@pytest.mark.parametrize(("schedule", "peaks"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])])
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says_and_no_more(
    pool: RankPool, schedule: str, peaks: list[int]
) -> None:
    records = pool.run(3, run_stage, schedule, 6)
    assert [max(len(held.alive) for held in record.held) for record in records] == peaks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_of_a_micro_batch_is_freed_by_its_backward(
    pool: RankPool, schedule: str
) -> None:
    for record in pool.run(3, run_stage, schedule, 6):
        done: set[int] = set()
        for held in record.held:
            if isinstance(held.instruction, Backward):
                done.add(held.instruction.micro_batch)
            assert held.alive & done == set(), held.instruction
        assert done == set(range(6))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_output_is_freed_once_it_is_sent(pool: RankPool, schedule: str) -> None:
    # Version 0.1 kept the output of every micro-batch in flight until its backward.
    for record in pool.run(3, run_stage, schedule, 6)[:-1]:
        sent: set[int] = set()
        for held in record.held:
            match held.instruction:
                case SendActivation(m) | Exchange(SendActivation(m)):
                    sent.add(m)
                    assert held.outputs == {m}  # being sent; the one before has arrived
                case Forward(m):
                    assert held.outputs <= {m - 1, m}
                case Backward():
                    assert held.outputs == set()
        assert sent == set(range(6))


def test_an_evaluation_sums_the_losses_and_keeps_nothing(pool: RankPool) -> None:
    records = pool.run(3, run_stage, None, 6)
    loss, _ = one_process(3, 6)
    torch.testing.assert_close(records[-1].loss_sum, loss)
    for record in records:
        assert record.gradients == [None] * 4
        assert record.last_flags == [] and record.reductions == []
        assert max(len(held.alive) for held in record.held) <= 1
        for held, following in pairwise(record.held):
            if type(following.instruction) is not SendActivation:
                assert held.alive == set(), held.instruction
