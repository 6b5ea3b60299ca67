"""``megaspeed verify``: a layout and one plain process, trained and compared."""

import argparse
from typing import Any

from rich.console import Console

from megaspeed.cli.common_options import EXIT_DONE, EXIT_FAILED, add_command, load, positive
from megaspeed.cli.output import write_json
from megaspeed.data import prepare_corpus


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    parser = add_command(commands, "verify", run, "compare a layout with one plain process")
    parser.add_argument("--steps", type=positive, default=10, help="optimizer steps (10)")


def run(options: argparse.Namespace) -> int:
    """Trains the layout and one plain process, and prints their numbers side by side."""
    # Imported here: torch and DeepSpeed take seconds, which `check` need not wait for.
    from megaspeed.analysis.verification.report import gradient_table, step_table, verdict
    from megaspeed.analysis.verification.verify import verify

    run = load(options)
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    comparison = verify(run, corpus, options.steps)
    console = Console()
    console.print(step_table(run, comparison))
    console.print(gradient_table(comparison))
    console.print(verdict(comparison), highlight=False)
    write_json(options, comparison.as_json())
    return EXIT_DONE if comparison.equal else EXIT_FAILED
