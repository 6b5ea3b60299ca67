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
from collections.abc import Iterator
from functools import lru_cache

from megaspeed.pipeline.schedules import (
    Backward,
    Forward,
    Gather,
    LoadMicroBatch,
    Message,
    OptimizerStep,
    Pipeline,
    Receive,
    ReduceGradients,
    ReduceTiedGradients,
    Release,
    ScheduleError,
    StageProgram,
    Transfer,
    input_of,
    order_of,
    output_of,
    peer,
    received_as,
)
from megaspeed.pipeline.visits import holds_by_index


@lru_cache(maxsize=64)
def timetable(pipeline: Pipeline) -> list[list[int]]:
    """For each stage, the tick at which each computation of its order ends. Messages take none.

    Raises:
        ScheduleError: the stages wait for each other forever.
    """
    orders = [order_of(pipeline, stage) for stage in range(pipeline.stages)]
    ends: list[list[int]] = [[] for _ in orders]
    arrived: dict[tuple[int, Receive], int] = {}
    ready = deque(range(pipeline.stages))
    while ready:
        stage = ready.popleft()
        clock = ends[stage][-1] if ends[stage] else 0
        for index in range(len(ends[stage]), len(orders[stage])):
            compute = orders[stage][index]
            needed = input_of(pipeline, stage, compute)
            if needed is not None:
                if (stage, needed) not in arrived:
                    break
                clock = max(clock, arrived.pop((stage, needed)))
            clock += 1 if isinstance(compute, Forward) else pipeline.backward_ticks
            ends[stage].append(clock)
            sent = output_of(pipeline, stage, compute)
            if sent is not None:
                receiver = peer(pipeline, stage, sent)
                arrived[receiver, received_as(pipeline, stage, sent)] = clock
                ready.append(receiver)
    stuck = [
        f"pipeline stage {stage} at {order[len(done)]!r}"
        for stage, (order, done) in enumerate(zip(orders, ends, strict=True))
        if len(done) < len(order)
    ]
    if stuck:
        raise ScheduleError("\n  ".join(["Deadlock: no pipeline stage can continue.", *stuck]))
    return ends


def arrivals(pipeline: Pipeline, stage: int) -> Iterator[tuple[Receive, int]]:
    """Each message that a stage receives, and the tick at which its sender has computed it."""
    for other in {(stage - 1) % pipeline.stages, (stage + 1) % pipeline.stages} - {stage}:
        for compute, end in zip(order_of(pipeline, other), timetable(pipeline)[other], strict=True):
            sent = output_of(pipeline, other, compute)
            if sent is not None and peer(pipeline, other, sent) == stage:
                yield received_as(pipeline, other, sent), end


def stage_program(pipeline: Pipeline, stage: int) -> StageProgram:
    """All instructions of one stage for one step, or for one evaluation."""
    own = list(zip(order_of(pipeline, stage), timetable(pipeline)[stage], strict=True))
    batches: dict[int, list[Message]] = {}  # by tick; the send is the first one
    for compute, end in own:
        sent = output_of(pipeline, stage, compute)
        if sent is not None:
            batches[end] = [sent]
    for received, end in arrivals(pipeline, stage):
        batches.setdefault(end, []).append(received)

    begins, ends = holds_by_index(pipeline, stage)
    program: StageProgram = []
    transfers = deque((tick, Transfer(tuple(batches[tick]))) for tick in sorted(batches))
    for index, (compute, end) in enumerate(own):
        while transfers and transfers[0][0] < end:
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
