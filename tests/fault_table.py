"""Measures the table of `docs/operations.md`: faults at the ranks of (2, 2, 2), by launcher.

python -m tests.fault_table RESULTS.jsonl [--ranks 0 5]     goes on from what RESULTS.jsonl has
python -m tests.fault_table RESULTS.jsonl --show            prints the table
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

from tests.test_faults import HOST, Job

LAYOUT = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.data=2")
LAUNCHERS = ("deepspeed", "torchrun")

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
        r"not finite on rank (?!{{)",
    ),
    "slow": (
        "slow rank={} step=4 work=Forward seconds=1",
        ("training.steps=8", "training.log_interval=1"),
        r"step +4  slowest: rank {rank} \(",
    ),
}
"""Fault -> what is injected, the run's settings, and what the console must say."""


def measure(fault: str, launcher: str, rank: int) -> dict[str, Any]:
    """One launch with one fault."""
    injected, changes, named = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), launcher, *LAYOUT, *changes, fault=injected.format(rank), ranks=8)
        job.wait_until_training()
        ended = job.ended()
    said = re.search(named.format(host=re.escape(HOST), rank=rank), ended.out + ended.err)
    return {
        "fault": fault,
        "launcher": launcher,
        "rank": rank,
        "seconds": round(ended.seconds, 1),
        "code": ended.code,
        "named": said is not None,
    }


def missing(results: Path, ranks: list[int]) -> Iterator[tuple[str, str, int]]:
    """What has not been measured yet."""
    known = {(r["fault"], r["launcher"], r["rank"]) for r in read(results)}
    for rank in ranks:
        for fault in FAULTS:
            for launcher in LAUNCHERS:
                if (fault, launcher, rank) not in known:
                    yield fault, launcher, rank


def read(results: Path) -> list[dict[str, Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of the table, as Markdown."""
    yield "| fault | launcher | ranks | seconds to the end, median (most) | exit code | named |"
    yield "|---|---|---|---|---|---|"
    for fault, launcher in product(FAULTS, LAUNCHERS):
        found = [r for r in results if (r["fault"], r["launcher"]) == (fault, launcher)]
        if not found:
            continue
        seconds = [r["seconds"] for r in found]
        ranks = ", ".join(str(r["rank"]) for r in found)
        codes = ", ".join(map(str, sorted({r["code"] for r in found})))
        named = f"{sum(r['named'] for r in found)} of {len(found)}"
        ended = f"{median(seconds):.0f} ({max(seconds):.0f})"
        yield f"| {fault} | {launcher} | {ranks} | {ended} | {codes} | {named} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 5, 2, 1, 4, 7, 3, 6])
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if not options.show:
        for fault, launcher, rank in missing(options.results, options.ranks):
            result = measure(fault, launcher, rank)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    sys.stdout.writelines(f"{line}\n" for line in table(read(options.results)))


if __name__ == "__main__":
    main()
