"""``megaspeed bench``: the step time of a run beside other libraries that train the same task."""

import argparse
from functools import partial
from typing import Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.measuring import (
    add_results_options,
    device_type_here,
    results_folder,
    show_results,
    write_results,
)
from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, add_command, load, positive, say

_PEERS = ("plain", "hf-deepspeed", "fsdp2", "ddp", "deepspeed-pipeline")


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
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
    parser.add_argument("--turns", type=positive, default=5, help="turns of each contestant (5)")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps of each turn (10)")
    add_results_options(parser, "bench", each="turn")


def run(options: argparse.Namespace) -> int:
    """Lets the contestants take their turns, then shows and writes the figures."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    from megaspeed.measurement.bench.contest import choose_peers, contestants_of, hold_contest
    from megaspeed.measurement.bench.report import as_json, as_markdown, draw_chart
    from megaspeed.measurement.bench.result import BenchResult
    from megaspeed.measurement.turns import share_of_others

    device_type = device_type_here()
    run = load(options, device_type)
    reasons = choose_peers(run, options.peers)
    folder = results_folder(options, run, device_type, command="bench", what="benchmark")
    folder.mkdir(parents=True, exist_ok=True)
    peers = [peer for peer, reason in reasons.items() if reason is None]
    share = share_of_others()
    with BarOrLines(options.turns * len(contestants_of(peers, options.omit))) as bar:
        contestants, runs, stopped = hold_contest(
            run,
            peers,
            omitted=options.omit,
            turns=options.turns,
            steps=options.steps,
            device_type=device_type,
            folder=folder,
            timeout_seconds=options.timeout,
            on_turn=bar.show,
        )
    result = BenchResult(
        runs=runs,
        turns=options.turns,
        steps=options.steps,
        contestants=contestants,
        stopped=stopped,
        share_of_others=max(share, share_of_others()),
        not_run={peer: reason for peer, reason in reasons.items() if reason is not None},
    )
    pictures = {"bench.png": partial(draw_chart, result)} if result.device is not None else {}
    text = as_markdown(result, next(iter(pictures), None))
    files = write_results(folder, "bench", as_json(result), text, pictures)
    show_results(options, as_json(result), as_markdown(result, None).rstrip(), files)
    failed = any(each.failure is not None for each in result.contestants)
    if result.stopped:
        say(f"stopped after {result.turns_taken} turns; all ranks have ended", error=True)
    return EXIT_FAILED if failed or result.stopped else EXIT_DONE
