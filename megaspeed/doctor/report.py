"""The output of the doctor: a table, a line for each problem of a rank, and JSON."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from megaspeed.doctor.diagnosis import Findings, Problem, most_common, nvlinks, rate
from megaspeed.units import counted, readable_memory

_MOST_LINES = 40
_NOT_CHECKED = "not checked"


def doctor_table(findings: Findings, problems: Sequence[Problem]) -> Table:
    """One row for each check, then one for each axis."""
    table = Table(title="doctor", title_justify="left")
    for name in ("check", "found", "verdict"):
        table.add_column(name, overflow="fold")
    ranks_of: dict[str, set[int]] = {}
    for problem in problems:
        ranks_of.setdefault(problem.check, set()).add(problem.rank)
    found = _found(findings)
    for check, text in (found | {name: "" for name in ranks_of if name not in found}).items():
        verdict = "" if text == _NOT_CHECKED else "fine"
        if check in ranks_of:
            verdict = f"[red]wrong on {counted(len(ranks_of[check]), 'rank')}[/red]"
        table.add_row(check, text, verdict)
    for axis, links in findings.groups.items():
        slowest = min(links, key=lambda link: link.bytes_per_second)
        latency = max(link.latency_seconds for link in links)
        crossing = sum(map(findings.crosses_nodes, links))
        place = f"{crossing} across nodes" if crossing else "within a node"
        table.add_row(
            axis,
            f"{counted(len(links), 'group')} of {len(slowest.ranks)}, {place}: latency "
            f"{latency * 1e6:,.0f} us, {rate(slowest.bytes_per_second)} a rank in the slowest",
            "",
        )
    return table


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """A line for each problem of a rank."""
    lines = [f"rank {p.rank} ({p.host}), {p.check}: {p.text}" for p in problems[:_MOST_LINES]]
    more = len(problems) - len(lines)
    return [*lines, f"and {more} more; --json FILE lists all"] if more else lines


def as_json(
    findings: Findings, problems: Sequence[Problem], remarks: Sequence[str]
) -> dict[str, Any]:
    """All findings, problems and remarks as JSON values."""
    return {
        "fine": not problems,
        "problems": [problem._asdict() for problem in problems],
        "remarks": list(remarks),
        "nodes": findings.nodes,
        "clock_seconds": findings.clocks or {},
        "groups": [
            {**asdict(link), "crosses_nodes": findings.crosses_nodes(link)}
            for links in findings.groups.values()
            for link in links
        ],
        "ranks": [record and asdict(record) for record in findings.records],
    }


def _found(findings: Findings) -> dict[str, str]:
    """What each check found, in words."""
    records, run = findings.answered, findings.run
    nodes = ", ".join(f"{host} ({_span(ranks)})" for host, ranks in findings.nodes.items())
    versions = most_common([record.versions for record in records])
    data = most_common([record.data for record in records])
    free = [each.shared_memory_bytes for each in records if each.shared_memory_bytes is not None]
    found = {
        "ranks": f"{len(records)} of {len(findings.records)} answered, from "
        f"{records[0].launcher}, on {counted(len(findings.nodes), 'node')}: {nodes}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "configuration": _NOT_CHECKED,
        "data": ", ".join(f"{name} {value[:12]}" for name, value in data.items()) or _NOT_CHECKED,
        "clock": _NOT_CHECKED,
        "run folder": _NOT_CHECKED,
        "ports": _NOT_CHECKED,
        "open files": f"a rank needs up to {max(each.open_files[0] for each in records):,}",
        "shared memory": f"at least {readable_memory(min(free))} free in /dev/shm"
        if free
        else "there is no /dev/shm",
        "device": _devices(findings),
    }
    if run is not None:
        settings = most_common([record.settings for record in records])
        digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:12]
        spare = f"{counted(run.spare_ranks, 'spare rank')}, " if run.spare_ranks else ""
        found["configuration"] = (
            f"{run.name}: {run.grid}, {spare}ZeRO-{run.zero_stage}, hash {digest}"
        )
    if run is not None and findings.links is not None:  # all checks between ranks were made
        offsets = [abs(each) for each in (findings.clocks or {}).values() if each is not None]
        found["clock"] = f"at most {max(offsets) * 1e3:.2f} ms apart" if offsets else "one node"
        found["run folder"] = f"{run.run_dir}: written and read by all ranks"
        several = len(findings.nodes) > 1
        found["ports"] = (
            f"each of {len(findings.nodes)} nodes connects to the next" if several else "one node"
        )
    return found


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _devices(findings: Findings) -> str:
    counts = Counter(record.device for record in findings.answered)
    text = ", ".join(f"{count} x {name}" for name, count in counts.items())
    nodes = [nvlinks(record.gpu_links) for record in findings.answered if record.gpu_links]
    pairs = sum(links.pairs for links in nodes)
    if pairs:
        linked = sum(links.linked for links in nodes)
        text += f"; NVLink between {linked} of {pairs} pairs within nodes"
    return text
