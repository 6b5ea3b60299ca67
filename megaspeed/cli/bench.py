"""``megaspeed bench``: the step time of a run beside other libraries that train the same task."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_command,
    load,
    positive,
    say,
    write_json,
    write_results,
)
from megaspeed.config.errors import ConfigError
from megaspeed.files.paths import folder_problem, path_argument

if TYPE_CHECKING:
    from megaspeed.analysis.bench.peers import PeerName
    from megaspeed.analysis.bench.result import BenchResult
    from megaspeed.analysis.local_ranks import DeviceType
    from megaspeed.config.resolve import Run

_PEERS = ("hf-deepspeed", "fsdp2", "ddp", "deepspeed-pipeline")


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
    parser.add_argument("--turns", type=positive, default=5, help="turns of each contestant (5)")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps of each turn (10)")
    parser.add_argument(
        "--output",
        type=path_argument,
        metavar="DIR",
        help="folder for the results (runs/<name>-bench)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=1800, help="seconds for each turn (1800)"
    )


def run(options: argparse.Namespace) -> int:
    """Lets the contestants take their turns, then shows and writes the figures."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    import torch

    from megaspeed.analysis.bench.contest import choose_peers
    from megaspeed.analysis.bench.report import as_json, as_markdown, draw_chart
    from megaspeed.analysis.local_ranks import too_many_ranks

    device_type: DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    run = load(options, device_type)
    folder = options.output or Path("runs") / f"{run.name}-bench"
    reasons = choose_peers(run, options.peers)
    problem = folder_problem("--output", folder)
    problems = [] if problem is None else [problem]
    problems += too_many_ranks(run.grid.world_size, device_type)
    if problems:
        raise ConfigError(problems, where=f"the benchmark of {options.config}")
    folder.mkdir(parents=True, exist_ok=True)
    result = _bench(run, reasons, options, folder, device_type)
    pictures = {"bench.png": partial(draw_chart, result)} if result.device is not None else {}
    text = as_markdown(result, next(iter(pictures), None))
    files = write_results(folder, "bench", as_json(result), text, pictures)
    say(as_markdown(result, None).rstrip())
    write_json(options, as_json(result))
    say("")
    say("wrote " + ", ".join(map(str, files)))
    failed = any(each.failure is not None for each in result.contestants)
    if result.stopped:
        say(f"stopped after {result.turns_taken} turns; all ranks have ended", error=True)
    return EXIT_FAILED if failed or result.stopped else EXIT_DONE


def _bench(
    run: "Run",
    reasons: "dict[PeerName, str | None]",
    options: argparse.Namespace,
    folder: Path,
    device_type: "DeviceType",
) -> "BenchResult":
    from megaspeed.analysis.bench.contest import hold_contest
    from megaspeed.analysis.bench.result import BenchResult
    from megaspeed.analysis.turns import share_of_others

    peers = [peer for peer, reason in reasons.items() if reason is None]
    share = share_of_others()
    with BarOrLines(options.turns * (1 + len(peers))) as bar:
        contestants, runs, stopped = hold_contest(
            run,
            peers,
            turns=options.turns,
            steps=options.steps,
            device_type=device_type,
            folder=folder,
            timeout_seconds=options.timeout,
            on_turn=bar.show,
        )
    return BenchResult(
        runs=runs,
        turns=options.turns,
        steps=options.steps,
        contestants=contestants,
        stopped=stopped,
        share_of_others=max(share, share_of_others()),
        not_run={peer: reason for peer, reason in reasons.items() if reason is not None},
    )
