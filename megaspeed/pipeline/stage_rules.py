"""The laws that the instructions of one pipeline stage obey, whatever the other stages do.

For each micro-batch, each of these exactly once and in the order of the arrows:

    load --------> forward ----> send activation        (no send on the last stage)
    receive ------>   |                                 (no receive on the first)
                      v
    receive gradient -> backward -> send gradient       (training only)

and after the last of them reduce gradients, reduce tied gradients and, as the very last, the
optimizer step.
"""

from collections.abc import Iterator, Sequence

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
    """Whether any stage runs a backward or a step; an evaluation schedule has neither."""
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
    """Raise `ScheduleError` where one stage's instructions break a law of this file."""
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
                f"{at} comes after {finishing[0]!r}. Every micro-batch is done before the "
                "gradients are reduced and the step is taken."
            )
        _check_place(at, instruction, needs, micro_batches)
        if instruction in done:
            raise ScheduleError(f"{at} is there twice. A stage runs each instruction once.")
        for needed in _needed(instruction, needs):
            if needed not in done:
                raise ScheduleError(f"{at} comes before {needed!r}, which it needs.")
        done.add(instruction)

    _check_complete(where, done, needs, micro_batches)
    if training:
        _check_finish(where, finishing)


def _kinds_and_their_needs(
    pipeline_stages: int, pipeline_stage: int, training: bool
) -> dict[_Kind, tuple[_Kind, ...]]:
    """What this stage does with a micro-batch -> what it must have done with it before."""
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
            f"{at} has no meaning here: the first stage has none before it, the last none after "
            "it, and an evaluation has no backward."
        )
    if not 0 <= instruction.micro_batch < micro_batches:
        raise ScheduleError(
            f"{at} names micro-batch {instruction.micro_batch}, but the step has "
            f"{micro_batches}, numbered from 0."
        )


def _needed(
    instruction: MicroBatchInstruction, needs: dict[_Kind, tuple[_Kind, ...]]
) -> Iterator[MicroBatchInstruction]:
    for kind in needs[type(instruction)]:
        yield kind(instruction.micro_batch)


def _check_complete(
    where: str,
    done: set[MicroBatchInstruction],
    needs: dict[_Kind, tuple[_Kind, ...]],
    micro_batches: int,
) -> None:
    for micro_batch in range(micro_batches):
        for kind in needs:
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
