"""No schedule deadlocks on GPUs, wherever the device is synchronised.

The executor and its links run here unchanged. Only ``batch_isend_irecv`` is replaced: it notes its
arguments. Then the simulator of ``nccl_simulator.py`` runs the notes of all ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain, count, pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaspeed.data_axis import orthogonalization
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.executor import Executor
from megaspeed.pipeline.p2p import Links
from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    SCHEDULES,
    End,
    Instruction,
    Pipeline,
    ScheduleError,
    Send,
    Transfer,
    peer,
)
from megaspeed.pipeline.simulation import check_programs
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import muon
from megaspeed.zero.reductions import add_gradients_of_other_end
from tests.paper_gpu.fake_world import LLAMA, fake_rank, paper_run
from tests.paper_gpu.nccl_simulator import (
    Action,
    Batch,
    Collective,
    Compute,
    Group,
    Program,
    Synchronize,
    Wait,
    find_stuck,
)
from tests.pipeline.shapes import shape
from tests.support.rank_pool import RankPool

ALL_SCHEDULES = [*SCHEDULES, "forward_only"]
MICRO_BATCHES = (1, 2, 3, 4, 7, 8, 16)
DATA_RANKS = 2


# --- what a rank's host does ----------------------------------------------------------------------


class Notes:
    """The actions of one rank's host. Pipeline stage s of data index d is rank s * dp + d."""

    def __init__(self, stages: int, stage: int, data_rank: int, data_ranks: int) -> None:
        self.actions: list[Action] = []

        def rank_of(stage: int) -> int:
            return stage * data_ranks + data_rank

        self.pipeline: Group = ("pp", tuple(map(rank_of, range(stages))))
        self.data: Group = ("dp", tuple(stage * data_ranks + d for d in range(data_ranks)))
        self.world: Group = ("world", tuple(range(stages * data_ranks)))

    def start(self, group: Group, name: str) -> int:
        """Note an asynchronous collective. Return its position."""
        self.actions.append(Collective(group, name))
        return len(self.actions) - 1

    def collective(self, group: Group, name: str) -> None:
        """Note an asynchronous collective, and that the compute stream waits for it."""
        self.actions.append(Wait(self.start(group, name)))

    def batch_isend_irecv(self, messages: list[dist.P2POp]) -> list["NotedWork"]:
        """Replace torch's function. A peer is a pipeline stage, because this fake world is one
        pipeline.
        """

        def ranks(operation: Any) -> tuple[int, ...]:
            _, pipeline = self.pipeline
            return tuple(pipeline[m.group_peer] for m in messages if m.op is operation)

        self.actions.append(
            Batch(self.pipeline, send_to=ranks(dist.isend), receive_from=ranks(dist.irecv))
        )
        return [NotedWork(self, len(self.actions) - 1)]


class NotedWork:
    """A work of NCCL. Waiting for it is an action of the compute stream."""

    def __init__(self, notes: Notes, position: int) -> None:
        self._notes, self._position = notes, position

    def wait(self) -> None:
        self._notes.actions.append(Wait(self._position))


class NotingEngine:
    """A stage that notes its kernels and collectives, including those of ZeRO within a backward.

    Args:
        notes: the notes of its rank.
        group: the pipeline of the fake world.
        other_end: the last stage if this is the first one, and the first if this is the last. Both
            have a tied embedding.
        gathers_layers: whether each pass gathers and reduces, and not each visit.
    """

    def __init__(
        self,
        notes: Notes,
        group: dist.ProcessGroup,
        other_end: int | None,
        *,
        gathers_layers: bool,
    ) -> None:
        self._notes = notes
        self._gathers_layers = gathers_layers
        self._group = group
        self._other_end = other_end
        self._backwards = count()
        # Gathers of what the step before has changed: the first forward waits for them, as its
        # layers do one after the other.
        self._arriving = [notes.start(notes.data, f"gather parameters {n}") for n in range(2)]

    def forward(self, x: Tensor, batch: MicroBatch, chunk: int, instead_of_loss: object) -> Tensor:
        micro_batch = f"{int(batch.samples)} of chunk {chunk}"
        self._notes.actions.append(Compute(f"forward {micro_batch}"))
        while self._arriving:
            self._notes.actions.append(Wait(self._arriving.pop(0)))
            self._notes.actions.append(Compute(f"forward {micro_batch}"))
        if self._gathers_layers:
            self._notes.collective(self._notes.data, f"gather for forward {micro_batch}")
        self._notes.actions.append(Compute(f"forward {micro_batch}"))
        return x * torch.ones((), requires_grad=True)

    def backward(
        self, output: Tensor | GradientEdge, gradient: Tensor | None, chunk: int, end: End
    ) -> None:
        micro_batch = next(self._backwards)
        self._notes.actions.append(Compute(f"backward {micro_batch}"))
        if self._gathers_layers or end != "micro_batch":
            self._notes.collective(self._notes.data, f"reduce after backward {micro_batch}")
        torch.autograd.backward(output, gradient)

    def gather(self, chunk: int, *, forward: bool) -> None:
        self._notes.collective(self._notes.data, f"gather chunk {chunk}")

    def release(self, chunk: int) -> None:
        pass

    def reduce_gradients(self) -> None:
        self._notes.collective(self._notes.data, "reduce")

    def reduce_tied_gradients(self) -> None:
        if self._other_end is not None:
            add_gradients_of_other_end(
                [torch.zeros(2)], self._group, peer=self._other_end, device=torch.device("cpu")
            )


@contextmanager
def fake_pipeline(stages: int, stage: int) -> Iterator[dist.ProcessGroup]:
    """Create a default group where this process is one of ``stages`` ranks and no other answers."""
    dist.init_process_group("fake", rank=stage, world_size=stages, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def noted(
    pipeline: Pipeline, stage: int, program: Iterable[Instruction], notes: Notes
) -> list[Action]:
    """Return the actions of a rank's host in one step, until it reads the global norm."""

    def load(micro_batch: int) -> MicroBatch:
        notes.actions.append(Compute(f"copy micro-batch {micro_batch} to the device"))
        samples = torch.tensor(micro_batch)
        return MicroBatch(tokens=torch.ones(1), targets=torch.ones(1), samples=samples)

    patch = pytest.MonkeyPatch()
    stages = pipeline.stages
    is_end = stages > 1 and stage in (0, stages - 1)
    other_end = stages - 1 - stage if is_end else None
    with fake_pipeline(stages, stage) as group, patch.context() as patched:
        links = Links.connect(group, shape=(1,), dtype=torch.float32, device=torch.device("cpu"))
        patched.setattr(dist, "batch_isend_irecv", notes.batch_isend_irecv)
        by_layer = pipeline.gather_policy == "layers"
        engine = NotingEngine(notes, group, other_end, gathers_layers=by_layer)
        executor = Executor(engine, links, pipeline, stage, load=load)
        with torch.set_grad_enabled(pipeline.schedule != "forward_only"):
            executor.run(program)
            executor.finish()
    notes.collective(notes.world, "loss and norm")
    notes.actions.append(Synchronize())
    return notes.actions


@cache
def programs_of(pipeline: Pipeline, *, data_ranks: int = 1) -> dict[int, Program]:
    """Return every rank's actions."""
    return {
        stage * data_ranks + data_rank: noted(
            pipeline,
            stage,
            stage_program(pipeline, stage),
            Notes(pipeline.stages, stage, data_rank, data_ranks),
        )
        for stage, data_rank in product(range(pipeline.stages), range(data_ranks))
    }


# --- with a device synchronisation ----------------------------------------------------------------


def synchronised(program: Program, after: Iterable[int]) -> list[Action]:
    """Return the program with a Synchronize after each of these positions."""
    places = set(after)
    moved: list[int] = []  # the new position of each action of the program
    actions: list[Action] = []
    for position, action in enumerate(program):
        moved.append(len(actions))
        actions.append(Wait(moved[action.position]) if isinstance(action, Wait) else action)
        if position in places:
            actions.append(Synchronize())
    return actions


def synchronised_everywhere(programs: dict[int, Program]) -> dict[int, Program]:
    return {rank: synchronised(program, range(len(program))) for rank, program in programs.items()}


def synchronised_on_one_rank(programs: dict[int, Program]) -> Iterator[dict[int, Program]]:
    for rank, program in programs.items():
        yield {**programs, rank: synchronised(program, range(len(program)))}


def synchronised_at_one_place(programs: dict[int, Program]) -> Iterator[dict[int, Program]]:
    for rank, program in programs.items():
        for position in range(len(program)):
            yield {**programs, rank: synchronised(program, [position])}


def chunked(stages: int) -> list[Pipeline]:
    """Return interleaved pipelines with several chunks and numbers of groups."""
    return [
        shape("1f1b", stages, micro_batches, chunks, groups)
        for chunks in (2, 3)
        for micro_batches in (stages, stages + 1, 2 * stages, 3 * stages + 1)
        for groups in range(1, micro_batches // stages + 1)
    ]


def pipelines(schedule: str, stages: int) -> list[Pipeline]:
    if schedule == "chunks":
        return chunked(stages)
    if schedule == "visits":
        return [replace(each, gather_policy="chunks_ahead") for each in chunked(stages)]
    return [shape(schedule, stages, micro_batches) for micro_batches in MICRO_BATCHES]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [*product(ALL_SCHEDULES, (2, 3, 4, 6, 8)), *product(["chunks"], (2, 3, 4))],
)
def test_no_schedule_is_stuck_with_a_synchronisation_everywhere_or_nowhere_or_on_one_rank(
    schedule: str, stages: int
) -> None:
    # A run with one synchronised rank tests all places of the rank. The other ranks advance while
    # its host waits at a place. How far they can get does not depend on how long the host waited at
    # earlier places.
    for pipeline in pipelines(schedule, stages):
        programs = programs_of(pipeline)
        assert find_stuck(programs) == {}
        assert find_stuck(synchronised_everywhere(programs)) == {}
        for on_one in synchronised_on_one_rank(programs):
            assert find_stuck(on_one) == {}


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_one_run_for_each_place_finds_nothing_more(schedule: str) -> None:
    for stages, micro_batches in product((2, 3), (1, 2, 4)):
        whole = programs_of(shape(schedule, stages, micro_batches))
        for programs in synchronised_at_one_place(whole):
            assert find_stuck(programs) == {}


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [*product(ALL_SCHEDULES, (2, 3, 4)), *product(["chunks", "visits"], (2, 3))],
)
def test_no_schedule_is_stuck_with_the_collectives_of_the_data_axis(
    schedule: str, stages: int
) -> None:
    for pipeline in pipelines(schedule, stages)[::2]:
        programs = programs_of(pipeline, data_ranks=DATA_RANKS)
        assert find_stuck(programs) == {}
        assert find_stuck(synchronised_everywhere(programs)) == {}
        # Only some of the ranks synchronise: those of one data index, or those of one stage.
        for some in (lambda rank: rank % DATA_RANKS == 0, lambda rank: rank < DATA_RANKS):
            everywhere = synchronised_everywhere(programs)
            mixed = {r: everywhere[r] if some(r) else programs[r] for r in programs}
            assert find_stuck(mixed) == {}


def test_a_step_of_1f1b_sends_and_receives_in_batches() -> None:
    """The notes contain the batches of the middle stage of three, with three micro-batches."""
    batches = [a for a in programs_of(shape("1f1b", 3, 3))[1] if isinstance(a, Batch)]
    assert [(batch.send_to, batch.receive_from) for batch in batches] == [
        ((), (0,)),
        ((2,), (0,)),
        ((2,), (0,)),
        ((), (2,)),
        ((0,), ()),
        ((2,), (2,)),
        ((0,), ()),
        ((), (2,)),
        ((0,), ()),
    ]


# --- Muon -----------------------------------------------------------------------------------------


def _actions_of_muon(launch: LaunchEnvironment, changes: dict[str, Any]) -> list[Action]:
    """Return the actions of a rank's host while it computes Muon's updates in several rounds."""
    run = paper_run(model=LLAMA, optimizer={"type": "Muon"}, **changes)
    notes, compute = Notes(1, 0, 0, 1), muon.orthogonalized

    def started(name: str) -> Any:
        def start(*_: Any, group: dist.ProcessGroup, async_op: bool) -> NotedWork:
            assert async_op
            ranks = tuple(dist.get_process_group_ranks(group))
            return NotedWork(notes, notes.start((group.group_desc, ranks), name))

        return start

    def orthogonalized(*arguments: Any) -> Tensor:
        notes.actions.append(Compute("Newton-Schulz"))
        return compute(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonalization, "_MOST_SECTIONS", 1)
        with fake_rank(run, launch.rank) as worker:
            patch.setattr(muon, "orthogonalized", orthogonalized)
            patch.setattr(muon, "all_gather_tensor", started("gather"))
            patch.setattr(dist, "all_to_all_single", started("exchange"))
            assert worker.engine.muon is not None
            worker.engine.muon.compute(1.0)
    return [*notes.actions, Synchronize()]


@pytest.mark.parametrize(
    ("tp", "stage", "groups"), [(2, 0, 4), (2, 1, 1), (1, 3, 1)], ids=["shared", "both", "data"]
)
def test_the_exchanges_of_muon_are_never_stuck(
    pool: RankPool, tp: int, stage: int, groups: int
) -> None:
    """With one shard, exchanges over the tensor axis alternate with gathers over the replicas."""
    changes = {"tp": tp, "dp": 4 // tp, "zero_optimization": {"stage": stage}}
    programs: dict[int, Program] = dict(enumerate(pool.run(4, _actions_of_muon, changes)))
    collectives = [each for each in chain(*programs.values()) if isinstance(each, Collective)]
    assert len({each.group for each in collectives}) == groups
    assert len(collectives) == 4 * (2 + (groups > 1)) * 4, "in four rounds"
    assert find_stuck(programs) == {}
    assert find_stuck(synchronised_everywhere(programs)) == {}
    for on_one in synchronised_on_one_rank(programs):
        assert find_stuck(on_one) == {}


# --- programs with other batches ------------------------------------------------------------------


def one_message_each(program: Iterable[Instruction]) -> list[Instruction]:
    """Return the program with a batch for each message."""
    return [
        alone
        for one in program
        for alone in (
            [Transfer((message,)) for message in one.messages]
            if isinstance(one, Transfer)
            else [one]
        )
    ]


def in_another_order(program: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the program with two neighbouring transfers exchanged, for all of them."""
    places = [at for at, one in enumerate(program) if isinstance(one, Transfer)]
    for first, second in pairwise(places):
        damaged = list(program)
        damaged[first], damaged[second] = program[second], program[first]
        yield damaged


def actions_of(pipeline: Pipeline, programs: Sequence[Iterable[Instruction]]) -> dict[int, Program]:
    """Return the actions of all ranks; a message is not compared with what its receiver expects."""
    return {
        stage: [
            Batch(
                ("pp", tuple(range(pipeline.stages))),
                send_to=tuple(
                    peer(pipeline, stage, each) for each in one.messages if isinstance(each, Send)
                ),
                receive_from=tuple(
                    peer(pipeline, stage, each)
                    for each in one.messages
                    if not isinstance(each, Send)
                ),
            )
            for one in program
            if isinstance(one, Transfer)
        ]
        for stage, program in enumerate(programs)
    }


def test_what_the_check_accepts_is_never_stuck() -> None:
    """Of programs with damaged transfers, the check refuses each one that deadlocks."""
    refused = accepted = 0
    for pipeline in (shape("1f1b", 3, 5), shape("1f1b", 2, 5, 2, 2), shape("1f1b", 3, 7, 2, 1)):
        programs = [stage_program(pipeline, stage) for stage in range(pipeline.stages)]
        for stage, program in enumerate(programs):
            for damaged in [one_message_each(program), *in_another_order(program)]:
                changed = [*programs[:stage], damaged, *programs[stage + 1 :]]
                try:
                    check_programs(pipeline, changed)
                except ScheduleError:
                    refused += 1
                    continue
                accepted += 1
                assert find_stuck(synchronised_everywhere(actions_of(pipeline, changed))) == {}
    assert refused > 100 and accepted > 10


@pytest.mark.parametrize("pipeline", [shape("1f1b", 2, 4), shape("1f1b", 3, 6, 2, 2)], ids=str)
def test_a_batch_for_each_message_is_stuck(pipeline: Pipeline) -> None:
    """In the steady state two neighbours send to each other: if both start their send first, both
    wait.
    """
    alone = [one_message_each(stage_program(pipeline, stage)) for stage in range(pipeline.stages)]
    assert find_stuck(actions_of(pipeline, alone)) != {}
    with pytest.raises(ScheduleError, match="Deadlock"):
        check_programs(pipeline, alone)


# --- what the simulator finds ---------------------------------------------------------------------


def test_sends_that_face_each_other_in_one_group_are_stuck() -> None:
    pp: Group = ("pp", (0, 1))
    alone = {r: [Batch(pp, send_to=(1 - r,)), Batch(pp, receive_from=(1 - r,))] for r in (0, 1)}
    assert set(find_stuck(alone)) == {0, 1}
    together = {r: [Batch(pp, send_to=(1 - r,), receive_from=(1 - r,))] for r in (0, 1)}
    assert find_stuck(together) == {}


def test_sends_that_face_each_other_in_two_groups_are_stuck_if_the_device_is_synchronised() -> None:
    down: Group = ("activations", (0, 1))
    up: Group = ("gradients", (0, 1))
    programs: dict[int, list[Action]] = {
        0: [Batch(down, send_to=(1,)), Batch(up, receive_from=(1,))],
        1: [Batch(up, send_to=(0,)), Batch(down, receive_from=(0,))],
    }
    assert find_stuck(programs) == {}
    stuck = find_stuck({rank: synchronised(program, [0]) for rank, program in programs.items()})
    assert stuck == {0: "host at 1: Synchronize()", 1: "host at 1: Synchronize()"}


def test_a_collective_is_stuck_if_a_member_never_begins_it() -> None:
    world: Group = ("world", (0, 1))
    collective = Collective(world, "norm")
    assert find_stuck({0: [collective], 1: [collective, Synchronize()]}) == {}
    assert find_stuck({0: [collective, Synchronize()], 1: []}) == {0: "host at 1: Synchronize()"}


def test_an_operation_begins_after_what_was_on_the_compute_stream() -> None:
    # Rank 0's send comes after a wait for rank 1's send, and rank 1's after a wait for rank 0's.
    one: Group = ("one", (0, 1))
    two: Group = ("two", (0, 1))
    programs: dict[int, list[Action]] = {
        0: [Batch(one, receive_from=(1,)), Wait(0), Batch(two, send_to=(1,))],
        1: [Batch(two, receive_from=(0,)), Wait(0), Batch(one, send_to=(0,))],
    }
    end = "the end of its program, with work on its streams"
    assert find_stuck(programs) == {0: end, 1: end}
