"""``megaspeed compare``: the ZeRO stages side by side, predicted and measured."""

import argparse
from functools import partial
from typing import Any

from megaspeed.cli.measuring import (
    add_measuring_options,
    device_type_here,
    measure,
    results_folder,
)
from megaspeed.cli.options import add_command, load


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    parser = add_command(
        commands, "compare", run, "train each ZeRO stage and compare memory, traffic and time"
    )
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=(0, 1, 2, 3),
        default=[0, 1, 2, 3],
        metavar="STAGE",
        help="ZeRO stages (0 1 2 3)",
    )
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=("ddp", "fsdp"),
        default=[],
        metavar="NAME",
        help="also train with torch's own ddp or fsdp; pipeline and tensor must be 1",
    )
    add_measuring_options(parser, "compare", turns=3, steps=4, option="--out")


def run(options: argparse.Namespace) -> int:
    """Train every row, then show and write the figures."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    from megaspeed.data.corpus import prepare_corpus
    from megaspeed.measurement.compare.report import report
    from megaspeed.measurement.compare.result import ComparisonResult
    from megaspeed.measurement.compare.rows import baseline_rows, part_of_turn, zero_rows
    from megaspeed.measurement.timed_steps import Steps

    device_type = device_type_here()
    run = load(options, device_type)
    rows = zero_rows(run, options.stages, device_type)
    rows += baseline_rows(run, options.baselines, device_type)
    folder = results_folder(options, run, option="--out")
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    steps = Steps(warm_up=1, timed=options.steps, timeout_seconds=options.timeout)
    return measure(
        options,
        folder,
        rows,
        partial(part_of_turn, corpus, steps),
        lambda **measured: report(ComparisonResult(run=run, **measured)),
    )
