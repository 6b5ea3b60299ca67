"""``megaspeed doctor``: checks on all ranks whether a run can start here.

torchrun --nproc-per-node 8 -m megaspeed.cli doctor --config F
deepspeed --num_accelerators 8 --module megaspeed.cli doctor --config F
srun / mpirun ... megaspeed doctor --config F
"""

import argparse
import os
from typing import Any

from rich.console import Console
from rich.markup import escape

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    add_parser,
    positive,
    say,
    write_json,
)
from megaspeed.config.document import add_config_options
from megaspeed.topology.launch import LaunchError, read_launch_environment


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "check, under the run's launcher, whether the run can start here"
    parser = add_parser(commands, "doctor", run, text)
    add_config_options(parser)
    parser.add_argument(
        "--timeout", type=positive, default=30, metavar="SECONDS", help="time limit of a step (30)"
    )


def run(options: argparse.Namespace) -> int:
    """Examines all ranks. Rank 0 reports. If there are several ranks, this ends the process."""
    try:
        launch = read_launch_environment(os.environ)
    except LaunchError as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    # Imported here: torch takes seconds to import, and other commands must not wait for it.
    from megaspeed.doctor.checks import Messages
    from megaspeed.doctor.diagnosis import Findings, find_problems, make_remarks
    from megaspeed.doctor.examination import examine
    from megaspeed.doctor.report import as_json, doctor_table, problem_lines
    from megaspeed.supervision.process_end import end_process
    from megaspeed.topology.process_settings import node_address
    from megaspeed.topology.store import GroupError, open_store

    def report(findings: Findings) -> int:
        wrong = [record.wrong_input for record in findings.answered]
        if wrong[0] is not None and all(wrong):
            say(wrong[0], error=True)
            return EXIT_WRONG_INPUT
        problems, remarks = find_problems(findings), list(make_remarks(findings))
        console = Console()
        console.print(doctor_table(findings, problems))
        lines = [
            *(f"[red]wrong:[/red] {escape(line)}" for line in problem_lines(problems)),
            *(f"[yellow]remark:[/yellow] {escape(remark)}" for remark in remarks),
        ]
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
        write_json(options, as_json(findings, problems, remarks))
        return EXIT_FAILED if problems else EXIT_DONE

    try:
        code = examine(
            options.config,
            options.overrides,
            launch,
            Messages(launch, open_store(launch, options.timeout)),
            address=node_address(launch, os.environ) or "127.0.0.1",
            seconds=options.timeout,
            report=report,
        )
    except GroupError as error:
        say(str(error), error=True)
        code = EXIT_FAILED
    if launch.world_size > 1:
        end_process(code)  # because threads may still wait for other ranks
    return code
