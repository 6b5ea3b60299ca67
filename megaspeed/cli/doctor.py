"""``megaspeed doctor``: checks on all ranks whether a run can start here.

torchrun --nproc-per-node 8 -m megaspeed.cli doctor --config F
deepspeed --num_accelerators 8 --module megaspeed.cli doctor --config F
srun / mpirun ... megaspeed doctor --config F
"""

import argparse
import os
from typing import TYPE_CHECKING, Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    add_parser,
    add_values,
    positive,
    say,
    write_json,
)
from megaspeed.config.document import add_config_options
from megaspeed.topology.launch import LaunchError, read_launch_environment

if TYPE_CHECKING:
    from megaspeed.doctor.checks import Findings


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    text = "check, under the run's launcher, whether the run can start here"
    parser = add_parser(commands, "doctor", run, text)
    add_config_options(parser)
    add_values(parser, ("--timeout", positive, "SECONDS", 30, "time limit of a step (30)"))


def run(options: argparse.Namespace) -> int:
    """Examine all ranks. Rank 0 reports. If there are several ranks, this ends the process."""
    try:
        launch = read_launch_environment(os.environ)
    except LaunchError as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    # Imported here: torch takes seconds to import, and other commands must not wait for it.
    from megaspeed.doctor.checks import print_report
    from megaspeed.doctor.examination import examine
    from megaspeed.supervision.process_end import end_process
    from megaspeed.topology.store import GroupError

    def report(findings: "Findings") -> int:
        wrong = [record.wrong_input for record in findings.answered]
        if wrong[0] is not None and all(wrong):
            say(wrong[0], error=True)
            return EXIT_WRONG_INPUT
        figures = print_report(findings)
        write_json(options, figures)
        return EXIT_DONE if figures["fine"] else EXIT_FAILED

    try:
        code = examine(options.config, options.overrides, launch, options.timeout, report)
    except GroupError as error:
        say(str(error), error=True)
        code = EXIT_FAILED
    if launch.world_size > 1:
        end_process(code)  # because threads may still wait for other ranks
    return code
