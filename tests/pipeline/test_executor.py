"""The executor over real pipelines of gloo ranks: what it computes, and what it keeps in memory.

The stages are plain modules with plain autograd, so plain torch computes the expected numbers.
"""

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megaspeed.model.documents import Documents
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.executor import Executor
from megaspeed.pipeline.p2p import Links
from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    End,
    Forward,
    Instruction,
    SendActivation,
    Transfer,
)
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.pipeline.shapes import shape
from tests.support.machine import limit
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


Key = tuple[int, int]
"""(micro-batch, chunk)"""


class PlainEngine:
    """A stage that torch alone runs. It keeps weak references to every tensor of each forward.

    Args:
        chunks: of the stage.
        has_loss: whether its last chunk is the last one of all.
        sleep_seconds: of a forward; a backward sleeps twice as long.
    """

    def __init__(
        self, chunks: nn.ModuleList, *, has_loss: bool, sleep_seconds: float = 0.0
    ) -> None:
        self.chunks = chunks
        self.sleep_seconds = sleep_seconds
        self.has_loss = has_loss
        self.tensors: dict[Key, list[weakref.ref[Tensor]]] = {}
        self.outputs: dict[Key, weakref.ref[torch.UntypedStorage]] = {}
        self.samples: list[Tensor] = []
        self.documents: list[Documents | None] = []
        self.ends: list[End] = []
        self.gathers: list[tuple[int, bool | None]] = []
        self.reductions: list[str] = []

    def forward(self, x: Tensor, batch: MicroBatch, chunk: int, instead_of_loss: object) -> Tensor:
        time.sleep(self.sleep_seconds)
        key, module = (int(batch.samples[0]) // 2, chunk), self.chunks[chunk]
        seen: list[Tensor] = [x]
        hooks = [
            layer.register_forward_hook(lambda _layer, _inputs, output: seen.append(output))
            for layer in module.children()
        ]
        output: Tensor = module(x)
        for hook in hooks:
            hook.remove()
        if self.has_loss and chunk == len(self.chunks) - 1:
            output = loss_function(output, batch.targets)
        self.samples.append(batch.samples)
        self.documents.append(batch.documents)
        self.tensors[key] = [weakref.ref(tensor) for tensor in seen]
        self.outputs[key] = weakref.ref(output.untyped_storage())
        return output

    def backward(
        self, output: Tensor | GradientEdge, gradient: Tensor | None, chunk: int, end: End
    ) -> None:
        time.sleep(2 * self.sleep_seconds)
        self.ends.append(end)
        torch.autograd.backward(output, gradient)

    def gather(self, chunk: int, *, forward: bool) -> None:
        self.gathers.append((chunk, forward))

    def release(self, chunk: int) -> None:
        self.gathers.append((chunk, None))

    def reduce_gradients(self) -> None:
        self.reductions.append("data axis")

    def reduce_tied_gradients(self) -> None:
        self.reductions.append("tied")

    def alive(self) -> set[Key]:
        """Return the forwards of which any tensor still exists."""
        return {k for k, tensors in self.tensors.items() if any(t() is not None for t in tensors)}

    def outputs_alive(self) -> set[Key]:
        """Return the forwards whose output still occupies memory."""
        return {k for k, storage in self.outputs.items() if storage() is not None}


@dataclass(frozen=True)
class Held:
    """After one instruction: the forwards that still have any tensor, or their output."""

    instruction: Instruction
    alive: set[Key]
    outputs: set[Key]


@dataclass(frozen=True)
class StageRecord:
    """The record of one stage."""

    loss_sum: Tensor | None
    gradients: list[list[Tensor | None]]  # of each chunk
    held: list[Held]
    samples: list[Tensor]
    documents: list[Documents | None]
    ends: list[End]
    gathers: list[tuple[int, bool | None]]
    reductions: list[str]
    seconds: float


def run_stage(
    launch: LaunchEnvironment,
    schedule: str,
    micro_batches: int,
    chunks: int = 1,
    groups: int = 1,
    sleep_seconds: float = 0.0,
) -> StageRecord:
    """Run one step of a schedule, or an evaluation."""
    pipeline = shape(schedule, launch.world_size, micro_batches, chunks, groups)
    if chunks > 1:
        pipeline = replace(pipeline, gather_policy="chunks")
    grid = Grid(pp=launch.world_size, dp=1, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        stage, stages = context.pp_rank, context.grid.pp
        links = None
        if context.pp_group is not None:
            links = Links.connect(
                context.pp_group,
                shape=(ROWS, WIDTH),
                dtype=torch.float32,
                device=context.device,
            )
        own = nn.ModuleList(make_stage(pipeline.virtual(stage, chunk)) for chunk in range(chunks))
        has_loss = stage == stages - 1
        engine = PlainEngine(own, has_loss=has_loss, sleep_seconds=sleep_seconds)
        executor = Executor(engine, links, pipeline, stage, load=load)
        held: list[Held] = []

        def watched() -> Iterator[Instruction]:
            for instruction in program:
                yield instruction
                held.append(Held(instruction, engine.alive(), engine.outputs_alive()))

        program = list(stage_program(pipeline, stage))
        dist.barrier()
        start = time.perf_counter()
        with torch.set_grad_enabled(schedule != "forward_only"):
            executor.run(watched())
            executor.finish()
        seconds = time.perf_counter() - start
        assert engine.alive() == set()
        return StageRecord(
            loss_sum=executor.loss_sum,
            gradients=[[p.grad for p in chunk.parameters()] for chunk in own],
            held=held,
            samples=engine.samples,
            documents=engine.documents,
            ends=engine.ends,
            gathers=engine.gathers,
            reductions=engine.reductions,
            seconds=seconds,
        )


def one_process(stages: int, micro_batches: int) -> tuple[Tensor, list[Tensor | None]]:
    """Run all stages in one process. Return (sum of the losses, gradients of all parameters)."""
    model = nn.Sequential(*map(make_stage, range(stages)))
    batches = [load(m) for m in range(micro_batches)]
    losses = [loss_function(model(batch.tokens), batch.targets) for batch in batches]
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "chunks", "groups"),
    [
        *((schedule, *sizes, 1, 1) for schedule in SCHEDULES for sizes in [(1, 3), (2, 1), (3, 5)]),
        *[("1f1b", 2, 2, 2, 1), ("1f1b", 2, 5, 3, 2), ("1f1b", 3, 7, 2, 1), ("1f1b", 4, 9, 2, 2)],
    ],
)
def test_a_step_has_the_loss_and_the_gradients_of_one_process(
    pool: RankPool, schedule: str, stages: int, micro_batches: int, chunks: int, groups: int
) -> None:
    records = pool.run(stages, run_stage, schedule, micro_batches, chunks, groups)
    loss, gradients = one_process(stages * chunks, micro_batches)
    assert [r.loss_sum is None for r in records] == [True] * (stages - 1) + [False]
    torch.testing.assert_close(records[-1].loss_sum, loss)
    own = [each for chunk in range(chunks) for r in records for each in r.gradients[chunk]]
    torch.testing.assert_close(own, gradients)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_receives_samples_documents_the_last_micro_batch_and_when_to_reduce(
    pool: RankPool, schedule: str
) -> None:
    for record in pool.run(2, run_stage, schedule, 3):
        assert [s.tolist() for s in record.samples] == [[0, 1], [2, 3], [4, 5]]
        for m, documents in enumerate(record.documents):
            assert documents is not None
            torch.testing.assert_close(vars(documents), vars(load(m).documents))
        assert record.ends == ["micro_batch", "micro_batch", "step"]
        assert record.reductions == ["data axis", "tied"]


def test_chunks_are_gathered_for_a_visit_and_reduced_at_its_end(pool: RankPool) -> None:
    """Groups of three and two micro-batches, on the last stage: it gathers chunk 0 once for the
    forwards of the second group and the backwards of the first one.
    """
    *_, last = pool.run(2, run_stage, "1f1b", 5, 2, 2)
    order = ["+0", "-0", "+1", "-1", "+0", "+1", "-0", "-1", "backward+0", "-0"]
    names = {True: "+", None: "-", False: "backward+"}
    assert [f"{names[how]}{chunk}" for chunk, how in last.gathers] == order
    first_group = ["micro_batch", "micro_batch", "visit"]
    assert last.ends == [*first_group, *first_group, *["micro_batch", "step"] * 2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_takes_as_long_as_the_bubble_says(pool: RankPool, groups: int) -> None:
    """Four stages of two chunks run eight micro-batches, whose layers sleep. Messages are small.

    On a slow or busy machine, all else takes longer, too. Its share is smaller if layers sleep
    longer.
    """
    for forward in (0.08, 0.16, 0.32, 0.64, 1.28):
        ideal = 3 * forward * (2 * 8 + 3)
        records = pool.run(4, run_stage, "1f1b", 8, 2, groups, forward)
        seconds = max(record.seconds for record in records)
        assert seconds >= ideal
        if seconds <= 1.05 * ideal:
            return
    pytest.fail(f"the last step took {seconds:.2f} s, ideal are {ideal:.2f} s")


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
        done: set[Key] = set()
        for held in record.held:
            if isinstance(held.instruction, Backward):
                done.add((held.instruction.micro_batch, held.instruction.chunk))
            assert held.alive & done == set(), held.instruction
        assert len(done) == 6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_output_is_freed_once_it_is_sent(pool: RankPool, schedule: str) -> None:
    # Version 0.1 kept the output of every micro-batch in flight until its backward.
    for record in pool.run(3, run_stage, schedule, 6)[:-1]:
        sent: set[Key] = set()
        for held in record.held:
            match held.instruction:
                case Transfer((SendActivation(m, chunk), *_)):
                    sent.add((m, chunk))
                    assert held.outputs == {(m, chunk)}  # being sent; the one before has arrived
                case Transfer():
                    assert held.outputs == set()
                case Forward(m, chunk):
                    assert held.outputs <= {(m - 1, chunk), (m, chunk)}
        assert len(sent) == 6


@pytest.mark.parametrize(("chunks", "groups"), [(1, 1), (2, 1)])
def test_an_evaluation_sums_the_losses_and_keeps_nothing(
    pool: RankPool, chunks: int, groups: int
) -> None:
    records = pool.run(3, run_stage, "forward_only", 6, chunks, groups)
    loss, _ = one_process(3 * chunks, 6)
    torch.testing.assert_close(records[-1].loss_sum, loss)
    for record in records:
        assert record.gradients == [[None] * 4] * chunks
        assert record.ends == [] and record.reductions == []
    for record in records[:-1]:  # what is computed, and what is being sent
        assert max(len(held.outputs) for held in record.held) <= 2
