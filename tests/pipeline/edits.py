"""Edits that put a mistake into the program of one pipeline stage."""

from collections.abc import Callable
from typing import Any

from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import Instruction, Pipeline, StageProgram, Transfer

Edit = Callable[[StageProgram], StageProgram]


def edited(pipeline: Pipeline, stage: int, *edits: Edit) -> list[StageProgram]:
    """Return the programs of all stages, with those of one stage changed.

    Each message of this stage is a transfer of its own, so that an edit can name it.
    """
    programs = [stage_program(pipeline, each) for each in range(pipeline.stages)]
    program: StageProgram = []
    for one in programs[stage]:
        messages = one.messages if isinstance(one, Transfer) else ()
        program += [Transfer((message,)) for message in messages] or [one]
    for edit in edits:
        program = edit(program)
    programs[stage] = program
    return programs


def alone(message: Any) -> Transfer:
    """Return a transfer of one message."""
    return Transfer((message,))


def without(*dropped: Instruction) -> Edit:
    """Remove these instructions."""
    return lambda program: [one for one in program if one not in dropped]


def swapped(first: Instruction, second: Instruction) -> Edit:
    """Exchange two instructions."""
    exchange = {first: second, second: first}
    return lambda program: [exchange.get(one, one) for one in program]


def moved(what: Instruction, *, before: Instruction) -> Edit:
    """Move one instruction to the place before another one."""

    def edit(program: StageProgram) -> StageProgram:
        rest = [one for one in program if one != what]
        at = rest.index(before)
        return [*rest[:at], what, *rest[at:]]

    return edit


def inserted(what: Instruction, *, before: Instruction) -> Edit:
    """Insert an instruction before another one."""

    def edit(program: StageProgram) -> StageProgram:
        at = program.index(before)
        return [*program[:at], what, *program[at:]]

    return edit
