"""Commands that compute figures of a run without starting it: ``plan`` and ``schedule``."""

import argparse
import shutil
from collections.abc import Iterator
from typing import Any

from megaspeed.analysis.planning.machines import GPUS_PER_NODE
from megaspeed.cli.options import EXIT_DONE, add_command, load, positive, say, write_json
from megaspeed.config.loading import read_config
from megaspeed.topology.devices import Device, DeviceError, device_named

_NARROWEST = 80
"""The width of the terminal that is assumed, in columns."""


def add_to(commands: Any) -> None:
    """Adds both commands and their options."""
    parser = add_command(commands, "plan", run_plan, "predict memory and traffic of a run")
    parser.add_argument(
        "--device", type=_device, metavar="NAME", help="accelerator, such as h100-80gb"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=positive,
        default=GPUS_PER_NODE,
        metavar="K",
        help=f"devices of one node ({GPUS_PER_NODE})",
    )
    parser.add_argument(
        "--what-if", action="store_true", help="rank every layout of this world size that fits"
    )
    parser.add_argument(
        "--largest-tensor",
        type=positive,
        metavar="T",
        help="largest tensor group of --what-if, in ranks (--gpus-per-node)",
    )
    add_command(commands, "schedule", run_schedule, "print the pipeline's timetable")


def _device(name: str) -> Device:
    try:
        return device_named(name)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_plan(options: argparse.Namespace) -> int:
    """Prints the plan. The exit code is 0 whether the run fits or not."""
    # Imported here, because other commands do not need them.
    from megaspeed.analysis.planning.plan import plan, what_if
    from megaspeed.analysis.planning.report import report, what_if_report
    from megaspeed.analysis.planning.variants import Training
    from megaspeed.analysis.units import show

    training = Training(
        run=load(options, device_type="cuda"),
        stated=read_config(options.config, options.overrides),
    )
    planned = plan(training, options.device, options.gpus_per_node)
    figures = planned.as_json()
    show(report(planned))
    if options.what_if:
        found = what_if(training, options.device, options.gpus_per_node, options.largest_tensor)
        figures["what_if"] = found.as_json()
        show(what_if_report(found, planned))
    write_json(options, figures)
    return EXIT_DONE


def run_schedule(options: argparse.Namespace) -> int:
    """Prints the timetable of the run's pipeline: rows are pipeline stages, columns are time."""
    from megaspeed.pipeline.schedules import SCHEDULES
    from megaspeed.pipeline.simulation import bubble_fraction, check_schedule, format_grid

    run = load(options)
    stages, micro_batches = run.grid.pp, run.batch.gradient_accumulation_steps
    schedule = SCHEDULES[run.config.parallel.schedule]
    check_schedule(schedule, stages, micro_batches)
    bubble = bubble_fraction(schedule, stages, micro_batches)
    columns = max(_NARROWEST, shutil.get_terminal_size((_NARROWEST, 0)).columns)
    for line in _fold(format_grid(schedule, stages, micro_batches).splitlines(), columns):
        say(line)
    say(f"ideal bubble: {bubble:.1%} of the step (a backward takes twice a forward's time)")
    write_json(options, {"bubble_fraction": bubble})
    return EXIT_DONE


def _fold(grid: list[str], columns: int) -> Iterator[str]:
    """The lines of a timetable, cut between ticks into parts of at most ``columns`` characters."""
    ticks = grid[0]
    start = ticks.index("0")
    width = ticks.index("1") - start  # a pipeline has at least three ticks
    part = (columns - start + 1) // width * width  # the last tick needs no space after it
    for begin in range(start, max(map(len, grid)), part):
        if begin > start:
            yield ""
        for line in grid:
            yield (line[:start] + line[begin : begin + part]).rstrip()
