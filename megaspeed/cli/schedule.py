"""``megaspeed schedule``: the pipeline's timetable."""

import argparse
from typing import Any

from megaspeed.cli.options import EXIT_DONE, add_command, load, say, write_json


def add_to(commands: Any) -> None:
    """Adds the command."""
    add_command(commands, "schedule", run, "print the pipeline's timetable")


def run(options: argparse.Namespace) -> int:
    """Prints the timetable of the run's pipeline: rows are pipeline stages, columns are time."""
    from megaspeed.pipeline.schedules import SCHEDULES
    from megaspeed.pipeline.simulation import bubble_fraction, check_schedule, format_grid

    run = load(options)
    stages, micro_batches = run.grid.pp, run.batch.gradient_accumulation_steps
    schedule = SCHEDULES[run.config.parallel.schedule]
    check_schedule(schedule, stages, micro_batches)
    bubble = bubble_fraction(schedule, stages, micro_batches)
    say(format_grid(schedule, stages, micro_batches))
    say(f"ideal bubble: {bubble:.1%} of the step (a backward takes twice a forward's time)")
    write_json(options, {"bubble_fraction": bubble})
    return EXIT_DONE
