"""``megaspeed plan``: memory, traffic, bubble and rank map of a run, worked out; runs nothing."""

import argparse
import sys
from typing import Any

from rich.console import Console

from megaspeed.analysis.planning.devices import (
    GPUS_PER_NODE,
    Device,
    DeviceError,
    device_named,
)
from megaspeed.cli.options import EXIT_DONE, add_command, load, positive, write_json
from megaspeed.config.loading import read_config

WIDTH = 120
"""Columns of the report where it does not go to a terminal."""


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    parser = add_command(commands, "plan", run, "work out memory and traffic before a run starts")
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
        help="widest tensor groups of --what-if (as wide as a node)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the plan. It informs: the exit code is 0 whether the run fits or not."""
    # Imported here: the pipeline's and the model's packages load torch, which takes seconds.
    from megaspeed.analysis.planning.plan import plan
    from megaspeed.analysis.planning.report import report, what_if_report
    from megaspeed.analysis.planning.variants import Training
    from megaspeed.analysis.planning.what_if import what_if

    training = Training(
        run=load(options, device_type="cuda"),
        stated=read_config(options.config, options.overrides),
    )
    planned = plan(training, options.device, options.gpus_per_node)
    figures = planned.as_json()
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for part in report(planned):
        console.print(part, soft_wrap=isinstance(part, str))
    if options.what_if:
        found = what_if(training, options.device, options.gpus_per_node, options.largest_tensor)
        figures["what_if"] = found.as_json()
        for part in what_if_report(found, planned):
            console.print(part, soft_wrap=isinstance(part, str))
    write_json(options, figures)
    return EXIT_DONE


def _device(name: str) -> Device:
    try:
        return device_named(name)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
