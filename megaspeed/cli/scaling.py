"""``megaspeed scaling``: tokens/s at several numbers of ranks, and where the rest goes."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megaspeed.checked_run import load_checked_run
from megaspeed.cli.measuring import (
    add_measuring_options,
    device_type_here,
    measure,
    results_folder,
)
from megaspeed.cli.options import add_parser, world_size
from megaspeed.config.document import add_config_options
from megaspeed.config.layout import World
from megaspeed.topology.launch import usable_processors

if TYPE_CHECKING:
    from megaspeed.measurement.report import Report
    from megaspeed.measurement.scaling import ScaledRow

_SIZES = "--world-sizes"


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    text = "tokens/s and efficiency at several numbers of ranks"
    parser = add_parser(commands, "scaling", run, text)
    add_config_options(parser)
    add_option = parser.add_argument
    add_option(
        _SIZES,
        type=world_size,
        nargs="+",
        required=True,
        metavar="N",
        help="numbers of processes; the others are compared with the smallest",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--strong",
        dest="mode",
        action="store_const",
        const="strong",
        default="strong",
        help="train_batch_size stays: fewer micro-batches for each data rank (default)",
    )
    mode.add_argument(
        "--weak",
        dest="mode",
        action="store_const",
        const="weak",
        help="each data rank keeps its micro-batches: train_batch_size grows",
    )
    add_option(
        "--no-prediction",
        action="store_true",
        help="do not predict; on a CPU, each prediction measures the machine for some 15 seconds",
    )
    add_measuring_options(parser, "scaling", turns=None, steps=10)


def run(options: argparse.Namespace) -> int:
    """Train every number of ranks, then show and write the figures."""
    sizes = sorted(set(options.world_sizes))
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    from megaspeed.data.corpus import prepare_corpus
    from megaspeed.measurement.scaling import ScalingResult, part_of_turn, scaled_rows
    from megaspeed.measurement.scaling_report import report
    from megaspeed.measurement.timed_steps import WARM_UP_STEPS, Steps

    device_type = device_type_here()
    overrides = [*options.overrides, "parallel.spare_ranks=false"]
    base = load_checked_run(options.config, overrides, World(sizes[0], _SIZES, device_type))
    rows = scaled_rows(base, sizes, options.mode, device_type)
    folder = results_folder(options, rows[-1].run, size_option=_SIZES)
    corpus = prepare_corpus(base.config.data, base.config.model.vocab_size)
    steps = Steps(
        warm_up=WARM_UP_STEPS, timed=options.steps, timeout_seconds=options.timeout, extra="parts"
    )

    def report_of(*, rows: "Sequence[ScaledRow]", stopped: bool, **measured: Any) -> "Report":
        try:
            if not options.no_prediction and not stopped:
                rows = [row.with_prediction() for row in rows]
        except KeyboardInterrupt:
            stopped = True
        shared = {"mode": options.mode, "processors": usable_processors()}
        return report(ScalingResult(rows=rows, stopped=stopped, **shared, **measured))

    return measure(options, folder, rows, partial(part_of_turn, corpus, steps), report_of)
