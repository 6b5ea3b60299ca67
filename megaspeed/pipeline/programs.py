"""The program of a stage: all its instructions, derived from the order in which it computes.

    order_of --timetable--> the tick at which each computation ends --> batches of messages
    order_of --visits-----> gathers and releases of chunks

**Messages.** NCCL runs the operations of a communicator in the order of the calls, and completes a
send only when the other side receives. So two stages that start their messages in different orders
can wait for each other forever. Here all stages use one order, that of the timetable: each message
has the tick at which its sender has computed it, and all messages of a stage at one tick are one
batch, in which they complete in any order (``Transfer``). The earliest batch that is not complete
then waits only for computations whose inputs are complete. So no program can deadlock, even if a
stage waits for every batch as soon as it has started it.

If a run's forwards and backwards take times in the ratio of the ticks, no batch waits for a stage
that still computes. ``simulation`` measures what another ratio costs.
"""

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from megaspeed.pipeline.schedules import (
    Backward,
    Compute,
    Forward,
    Gather,
    LoadMicroBatch,
    Message,
    OptimizerStep,
    Pipeline,
    ReduceGradients,
    ReduceTiedGradients,
    Release,
    ScheduleError,
    StageProgram,
    Transfer,
    input_of,
    order_of,
    output_of,
)
from megaspeed.pipeline.visits import holds_by_index


class Ticks(NamedTuple):
    """The tick at which a computation ends, and the one at which its input was computed on another
    stage; None if it needs no message."""

    end: int
    arrived: int | None


@lru_cache(maxsize=64)  # the programs of all stages read one timetable
def timetable(pipeline: Pipeline) -> list[list[Ticks]]:
    """For each stage, the ticks of each computation of its order. Messages take no time.

    Raises:
        ScheduleError: the stages wait for each other forever.
    """
    orders = [order_of(pipeline, stage) for stage in range(pipeline.stages)]
    found: list[list[Ticks]] = [[] for _ in orders]
    done: dict[tuple[type[Compute], int, int], int] = {}  # kind, virtual stage, micro-batch
    ready = deque(range(pipeline.stages))
    while ready:
        stage = ready.popleft()
        clock = found[stage][-1].end if found[stage] else 0
        for index in range(len(found[stage]), len(orders[stage])):
            compute = orders[stage][index]
            kind, virtual = type(compute), pipeline.virtual(stage, compute.chunk)
            direction = 1 if kind is Forward else -1
            arrived = done.get((kind, virtual - direction, compute.micro_batch))
            if arrived is not None:
                clock = max(clock, arrived)
            elif 0 <= virtual - direction < pipeline.virtual_stages:
                break
            clock += 1 if kind is Forward else pipeline.backward_ticks
            found[stage].append(Ticks(clock, arrived))
            done[kind, virtual, compute.micro_batch] = clock
            if 0 <= virtual + direction < pipeline.virtual_stages:  # another stage may wait for it
                ready.append((stage + direction) % pipeline.stages)
    stuck = [
        f"pipeline stage {stage} at {order[len(ticks)]!r}"
        for stage, (order, ticks) in enumerate(zip(orders, found, strict=True))
        if len(ticks) < len(order)
    ]
    if stuck:
        raise ScheduleError("\n  ".join(["Deadlock: no pipeline stage can continue.", *stuck]))
    return found


def stage_program(pipeline: Pipeline, stage: int) -> StageProgram:
    """All instructions of one stage for one step, or for one evaluation."""
    own = list(zip(order_of(pipeline, stage), timetable(pipeline)[stage], strict=True))
    batches: dict[int, list[Message]] = {}  # by tick; the send is the first one
    for compute, ticks in own:
        sent = output_of(pipeline, stage, compute)
        if sent is not None:
            batches[ticks.end] = [sent]
    for compute, ticks in own:
        received = input_of(pipeline, stage, compute)
        if received is not None and ticks.arrived is not None:
            batches.setdefault(ticks.arrived, []).append(received)

    begins, ends = holds_by_index(pipeline, stage)
    program: StageProgram = []
    transfers = deque((tick, Transfer(tuple(batches[tick]))) for tick in sorted(batches))
    for index, (compute, ticks) in enumerate(own):
        while transfers and transfers[0][0] < ticks.end:
            program.append(transfers.popleft()[1])
        program += [Gather(hold.chunk, hold.forward) for hold in begins[index]]
        if isinstance(compute, Forward) and compute.chunk == 0:
            program.append(LoadMicroBatch(compute.micro_batch))
        program.append(compute)
        program += [Release(hold.chunk) for hold in ends[index]]
    program += [transfer for _, transfer in transfers]
    if any(isinstance(compute, Backward) for compute, _ in own):
        program += [ReduceGradients(), ReduceTiedGradients(), OptimizerStep()]
    return program
