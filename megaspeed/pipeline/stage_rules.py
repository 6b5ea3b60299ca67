"""Rules for the instructions of one pipeline stage, whatever the other stages do.

For each micro-batch, each of these runs exactly once, in the order of the arrows:

    load --------> forward ----> send activation        (no send on the last stage)
    receive ------>   |                                 (no receive on the first)
                      v
    receive gradient -> backward -> send gradient       (training only)

After the last of them come reduce gradients, reduce tied gradients and, at the very end, the
optimizer step.
"""

from collections.abc import Sequence
from itertools import product

from megaspeed.pipeline.instructions import (
    Backward,
    BackwardInstruction,
    Forward,
    Instruction,
    LoadMicroBatch,
    MicroBatchInstruction,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceTiedGradients,
    SendActivation,
    SendGradient,
    StepInstruction,
)
from megaspeed.pipeline.schedules import ScheduleError

_Kind = type[MicroBatchInstruction]


def trains(programs: Sequence[Sequence[Instruction]]) -> bool:
    """Whether any stage runs a backward or a step. An evaluation has neither."""
    return any(
        isinstance(instruction, BackwardInstruction | StepInstruction)
        for program in programs
        for instruction in program
    )


def check_stage(
    program: Sequence[Instruction],
    *,
    pipeline_stages: int,
    pipeline_stage: int,
    micro_batches: int,
    training: bool,
) -> None:
    """Raise `ScheduleError` if the instructions of one stage break a rule of this file."""
    where = f"pipeline stage {pipeline_stage} of {pipeline_stages}"
    needs = _kinds_and_their_needs(pipeline_stages, pipeline_stage, training)
    done: set[MicroBatchInstruction] = set()
    finishing: list[StepInstruction] = []

    for position, instruction in enumerate(program):
        at = f"{where}, instruction {position}: {instruction!r}"
        if isinstance(instruction, StepInstruction):
            finishing.append(instruction)
            continue
        if finishing:
            raise ScheduleError(
                f"{at} comes after {finishing[0]!r}. Gradients are reduced, and the step is "
                "taken, after the last micro-batch."
            )
        _check_place(at, instruction, needs, micro_batches)
        if instruction in done:
            raise ScheduleError(f"{at} comes twice. A stage runs each instruction once.")
        for kind in needs[type(instruction)]:
            if (needed := kind(instruction.micro_batch)) not in done:
                raise ScheduleError(f"{at} comes before {needed!r}, which it needs.")
        done.add(instruction)

    _check_complete(where, done, needs, micro_batches)
    if training:
        _check_finish(where, finishing)


def _kinds_and_their_needs(
    pipeline_stages: int, pipeline_stage: int, training: bool
) -> dict[_Kind, tuple[_Kind, ...]]:
    """Each kind of instruction of this stage -> the kinds that must come before it."""
    absent: set[_Kind] = set()
    if pipeline_stage == 0:
        absent |= {ReceiveActivation, SendGradient}
    if pipeline_stage == pipeline_stages - 1:
        absent |= {SendActivation, ReceiveGradient}
    if not training:
        absent |= {ReceiveGradient, Backward, SendGradient}
    arrows: dict[_Kind, tuple[_Kind, ...]] = {
        LoadMicroBatch: (),
        ReceiveActivation: (),
        Forward: (LoadMicroBatch, ReceiveActivation),
        SendActivation: (Forward,),
        ReceiveGradient: (Forward,),
        Backward: (Forward, ReceiveGradient),
        SendGradient: (Backward,),
    }
    return {
        kind: tuple(need for need in needs if need not in absent)
        for kind, needs in arrows.items()
        if kind not in absent
    }


def _check_place(
    at: str,
    instruction: MicroBatchInstruction,
    needs: dict[_Kind, tuple[_Kind, ...]],
    micro_batches: int,
) -> None:
    if type(instruction) not in needs:
        raise ScheduleError(
            f"{at} is not possible here: there is no stage before the first one and none after "
            "the last one, and an evaluation has no backward."
        )
    if not 0 <= instruction.micro_batch < micro_batches:
        raise ScheduleError(
            f"{at} names micro-batch {instruction.micro_batch}, but the step has "
            f"{micro_batches}, numbered from 0."
        )


def _check_complete(
    where: str,
    done: set[MicroBatchInstruction],
    needs: dict[_Kind, tuple[_Kind, ...]],
    micro_batches: int,
) -> None:
    for micro_batch, kind in product(range(micro_batches), needs):
        instruction = kind(micro_batch)
        if instruction in done:
            continue
        if kind is Backward and Forward(micro_batch) in done:
            raise ScheduleError(
                f"{where} never frees the activations of micro-batch {micro_batch}: "
                f"{Forward(micro_batch)!r} has no {instruction!r}."
            )
        raise ScheduleError(
            f"{where} never runs {instruction!r}. It must, once for each of the "
            f"{micro_batches} micro-batches."
        )


def _check_finish(where: str, finishing: list[StepInstruction]) -> None:
    for required in (ReduceGradients(), ReduceTiedGradients(), OptimizerStep()):
        if finishing.count(required) != 1:
            raise ScheduleError(
                f"{where} runs {type(required).__name__} {finishing.count(required)} times a "
                "step. A training step runs it once, after the last backward."
            )
    if finishing[-1] != OptimizerStep():
        raise ScheduleError(
            f"{where} ends with {type(finishing[-1]).__name__}. OptimizerStep is the last "
            "instruction of a training step."
        )
