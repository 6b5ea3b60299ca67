"""Measure the table of ``docs/operations.md``: faults at the ranks of (2, 2, 2), by launcher.

python -m tests.support.fault_table RESULTS.jsonl [--ranks 0 5]   measures what is missing
python -m tests.support.fault_table RESULTS.jsonl --show          prints the table
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.nodes import deepspeed, torchrun, two_nodes
from tests.test_faults import HOST, Job, Launcher
from tests.test_two_nodes import lay_out, run_with_a_cut

LAYOUT = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.data=2")
LAUNCHERS: tuple[Launcher, ...] = ("deepspeed", "torchrun")

FAULTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "raise": ("raise rank={} step=4 work=Backward", (), r"\[{host}, rank {rank} \(.*step 4, Backw"),
    "kill -9": ("kill rank={} step=4 work=Forward", (), r"\[{host}, rank {rank} \(.* was killed"),
    "out of memory": (
        "memory rank={} step=4 work=Forward",
        (),
        r"\[{host}, rank {rank} \(.*step 4, Forward(.|\n)*Memory of rank {rank} ",
    ),
    "STOP": ("stop rank={} step=4 work=Forward", (), r"no progress for \d+ s: rank {rank} did not"),
    "NaN": (
        "nan rank={} step=4 work=Forward",
        ("training.max_skipped_steps=1",),
        r"the loss is not finite on rank {computes_the_loss} \(.*micro-batch 0 \(samples ",
    ),
    "slow": (
        "slow rank={} step=4 work=Forward seconds=1",
        ("training.steps=8", "training.log_interval=1"),
        r"step +4  slowest: rank {rank} \(",
    ),
    "full disk": (
        "disk rank={} step=4 work=Forward",
        ("training.steps=8", "training.save_interval=4", "zero_optimization.stage=1"),
        r"step +4  no checkpoint: rank {rank}: File too large",
    ),
}
"""Fault -> (the injected fault, the run's settings, a pattern that the console must match)."""

CUT = "network cut"
RANKS_CUT_OFF = "4 to 7"


def measure(fault: str, launcher: Launcher, rank: int) -> dict[str, Any]:
    """Launch once with one fault."""
    injected, changes, named = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), launcher, *LAYOUT, *changes, fault=injected.format(rank), ranks=8)
        job.wait_until_training()
        ended = job.ended()
    computes_the_loss = 4 + rank // 2 % 2 * 2  # tp 0 of the last pipeline stage, at this rank's dp
    pattern = named.format(host=re.escape(HOST), rank=rank, computes_the_loss=computes_the_loss)
    said = re.search(pattern, ended.out + ended.err)
    return {"seconds": round(ended.seconds, 1), "code": ended.code, "named": said is not None}


def measure_cut(launcher: Launcher) -> dict[str, Any]:
    """Launch once on two nodes of four ranks each. The second node loses its network."""
    start = {"deepspeed": deepspeed, "torchrun": torchrun}[launcher]
    with tempfile.TemporaryDirectory() as folder, two_nodes(Path(folder), ranks=4) as nodes:
        lay_out(nodes)
        cut = run_with_a_cut(start, nodes, Path(folder) / "run", *LAYOUT)
    named = "ranks 4, 5, 6, 7 did not answer" in cut.outs[0] and "not answer (node0" in cut.outs[1]
    return {"seconds": round(cut.seconds, 1), "code": max(cut.codes), "named": named}


def missing(results: Path, ranks: list[int]) -> Iterator[tuple[str, Launcher, int | str]]:
    """Yield (fault, launcher, ranks) of each measurement that the results lack."""
    known = {(r["fault"], r["launcher"], r["rank"]) for r in read(results)}
    wanted: list[tuple[str, Launcher, int | str]]
    wanted = [*product(FAULTS, LAUNCHERS, ranks), *product([CUT], LAUNCHERS, [RANKS_CUT_OFF])]
    yield from (one for one in wanted if one not in known)


def read(results: Path) -> list[dict[str, Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table, as Markdown."""
    yield "| fault | launcher | ranks | seconds to the end, median (most) | exit code | named |"
    yield "|---|---|---|---|---|---|"
    for fault, launcher in product((*FAULTS, CUT), LAUNCHERS):
        found = [r for r in results if (r["fault"], r["launcher"]) == (fault, launcher)]
        if not found:
            continue
        seconds = [r["seconds"] for r in found]
        ranks = "0 to 7" if len(found) == 8 else ", ".join(str(r["rank"]) for r in found)
        codes = ", ".join(map(str, sorted({r["code"] for r in found})))
        named = f"{sum(r['named'] for r in found)} of {len(found)}"
        ended = f"{median(seconds):.0f} ({max(seconds):.0f})"
        yield f"| {fault} | {launcher} | {ranks} | {ended} | {codes} | {named} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if not options.show:
        for fault, launcher, rank in missing(options.results, options.ranks):
            if isinstance(rank, str):
                result = measure_cut(launcher)
            else:
                result = measure(fault, launcher, rank)
            key = {"fault": fault, "launcher": launcher, "rank": rank}
            with options.results.open("a") as file:
                file.write(json.dumps(key | result) + "\n")
    sys.stdout.writelines(f"{line}\n" for line in table(read(options.results)))


if __name__ == "__main__":
    main()
