"""Which sends and receives go out together.

In the steady state of 1f1b two neighbours send to each other at the same time:

    stage s        ... Forward(m)   SendActivation(m)  ReceiveGradient(k)     Backward(k) ...
                                            |                 ^
                                            v                 |
    stage s + 1    ... Backward(k)  ReceiveActivation(m)  SendGradient(k)     Forward(m)  ...

NCCL completes a send only when the other side receives, and runs the messages of a communicator in
the order of the calls. If both stages start their send first, both wait: on one communicator
always, on two communicators if the device is synchronised between the send and the receive. As one
batch, a send and a receive complete together, in any order.
"""

from collections.abc import Sequence
from itertools import pairwise

from megaspeed.pipeline.instructions import (
    Exchange,
    Instruction,
    ReceiveInstruction,
    SendInstruction,
    other_end,
    peer,
)
from megaspeed.pipeline.schedules import Schedule

StageProgram = list[Instruction | Exchange]


def stage_program(
    schedule: Schedule, pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> StageProgram:
    """One stage's instructions for one step, with its exchanges formed."""
    programs = {
        stage: list(schedule(pipeline_stages, stage, micro_batches))
        for stage in (pipeline_stage - 1, pipeline_stage, pipeline_stage + 1)
        if 0 <= stage < pipeline_stages
    }
    return form_exchanges(
        programs[pipeline_stage],
        pipeline_stage,
        before=programs.get(pipeline_stage - 1, ()),
        after=programs.get(pipeline_stage + 1, ()),
    )


def form_exchanges(
    program: Sequence[Instruction],
    pipeline_stage: int,
    *,
    before: Sequence[Instruction],
    after: Sequence[Instruction],
) -> StageProgram:
    """Join each send with the receive directly after it, if the neighbour can do the same.

    They become an exchange if both have the same neighbour, and if on that neighbour the matching
    receive also comes directly after the matching send. The condition is symmetric, so both
    neighbours form the same exchanges.

    Args:
        program: the stage's own instructions.
        pipeline_stage: its number.
        before, after: the instructions of the stages before and after; empty if there is none.
    """
    neighbours = {
        pipeline_stage - 1: frozenset(pairwise(before)),
        pipeline_stage + 1: frozenset(pairwise(after)),
    }
    joined: StageProgram = []
    for instruction in program:
        last = joined[-1] if joined else None
        if (
            isinstance(last, SendInstruction)
            and isinstance(instruction, ReceiveInstruction)
            and peer(pipeline_stage, last) == peer(pipeline_stage, instruction)
            and (other_end(instruction), other_end(last)) in neighbours[peer(pipeline_stage, last)]
        ):
            joined[-1] = Exchange(last, instruction)
        else:
            joined.append(instruction)
    return joined
