"""``megaspeed bench``: the step time of a run beside other libraries that train the same task."""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from megaspeed.cli.measuring import (
    add_measuring_options,
    device_type_here,
    measure,
    results_folder,
)
from megaspeed.cli.options import add_command, load

_PEERS = ("plain", "hf-deepspeed", "fsdp2", "ddp", "deepspeed-pipeline")


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    parser = add_command(commands, "bench", run, "step time beside other libraries, in turns")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=_PEERS,
        metavar="PEER",
        help=f"{', '.join(_PEERS)} (all that can train the run)",
    )
    parser.add_argument(
        "--omit",
        nargs="+",
        choices=("megaspeed", "host-bound"),
        default=[],
        metavar="PART",
        help="megaspeed: train only the peers; host-bound: leave out the host-bound workload",
    )
    add_measuring_options(parser, "bench", turns=5, steps=10)


def run(options: argparse.Namespace) -> int:
    """Let the contestants take their turns, then show and write the figures."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    from megaspeed.data.corpus import prepare_corpus
    from megaspeed.measurement.bench.contest import (
        choose_peers,
        contestants_of,
        part_of_turn,
        workloads_of,
    )
    from megaspeed.measurement.bench.report import report
    from megaspeed.measurement.bench.result import BenchResult
    from megaspeed.measurement.timed_steps import WARM_UP_STEPS, Steps

    run = load(options, device_type_here())
    reasons = choose_peers(run, options.peers)
    folder = results_folder(options, run)
    peers = [peer for peer, reason in reasons.items() if reason is None]
    steps = Steps(
        warm_up=WARM_UP_STEPS,
        timed=options.steps,
        timeout_seconds=options.timeout,
        extra="matmul",
    )
    with tempfile.TemporaryDirectory(prefix="megaspeed-bench-") as name:
        runs = workloads_of(run, steps, Path(name), options.omit)
        corpora = {
            workload: prepare_corpus(each.config.data, each.config.model.vocab_size)
            for workload, each in runs.items()
        }
        not_run = {peer: reason for peer, reason in reasons.items() if reason is not None}
        return measure(
            options,
            folder,
            list(contestants_of(runs, peers, options.omit)),
            partial(part_of_turn, corpora, Path(name), steps),
            lambda **measured: report(BenchResult(runs=runs, not_run=not_run, **measured)),
        )
