"""The doctor's table, a line for each bad rank, and the same as JSON."""

import hashlib
from typing import Any

from rich.table import Table

from megaspeed.analysis.doctor.diagnosis import Problem, usual
from megaspeed.analysis.doctor.examination import Examined
from megaspeed.analysis.doctor.findings import Findings
from megaspeed.analysis.doctor.gpu_links import nvlinks
from megaspeed.analysis.doctor.remarks import measured_groups, rate
from megaspeed.analysis.units import counted, readable_memory
from megaspeed.config.resolve import Run

_LINES = 40


def doctor_table(examined: Examined, problems: list[Problem]) -> Table:
    """One row for each check, then one for each axis."""
    findings = examined.findings
    table = Table(title="doctor", title_justify="left")
    for name in ("check", "found", "verdict"):
        table.add_column(name, overflow="fold")
    wrong = {
        check: len({p.rank for p in problems if p.check == check}) for _, _, check, _ in problems
    }
    rows = _rows(examined)
    for check in wrong:
        rows.setdefault(check, "")
    for check, found in rows.items():
        count = wrong.get(check, 0)
        verdict = f"[red]wrong on {counted(count, 'rank')}[/red]" if count else "fine"
        table.add_row(check, found, verdict if found != _NOT_TRIED or count else "")
    for axis, links in measured_groups(findings).items():
        slowest = min(links, key=lambda link: link.bytes_per_second)
        latency = max(link.latency_seconds for link in links)
        crossing = sum(findings.crosses_nodes(link.ranks) for link in links)
        groups = f"{counted(len(links), 'group')} of {len(slowest.ranks)}"
        place = f"{crossing} across nodes" if crossing else "within a node"
        table.add_row(
            axis,
            f"{groups}, {place}: latency {latency * 1e6:,.0f} us, "
            f"{rate(slowest.bytes_per_second)} a rank in the slowest",
            "",
        )
    return table


def problem_lines(problems: list[Problem]) -> list[str]:
    """A line for each bad rank and check."""
    lines = [f"rank {p.rank} ({p.host}), {p.check}: {p.text}" for p in problems[:_LINES]]
    more = len(problems) - len(lines)
    return [*lines, f"and {more} more; --json FILE lists all"] if more else lines


def as_json(examined: Examined, problems: list[Problem], remarks: list[str]) -> dict[str, Any]:
    """All figures."""
    findings = examined.findings
    return {
        "fine": not problems,
        "problems": [problem._asdict() for problem in problems],
        "remarks": remarks,
        "nodes": findings.nodes,
        "clock_seconds": findings.clocks,
        "groups": [
            {**link.as_json(), "crosses_nodes": findings.crosses_nodes(link.ranks)}
            for links in measured_groups(findings).values()
            for link in links
        ],
        "ranks": [None if each is None else each.as_json() for each in findings.records],
    }


_NOT_TRIED = "not tried"


def _rows(examined: Examined) -> dict[str, str]:
    findings = examined.findings
    first = findings.came[0]
    nodes = ", ".join(f"{host} ({_span(ranks)})" for host, ranks in findings.nodes.items())
    versions = usual([record.versions for record in findings.came])
    data = usual([record.data for record in findings.came])
    clocks = [abs(offset) for offset in findings.clocks.values() if offset is not None]
    free = [record.shared_memory_bytes for record in findings.came]
    run = examined.run
    return {
        "ranks": f"{len(findings.came)} of {len(findings.records)} answered, from "
        f"{first.launcher}, on {counted(len(findings.nodes), 'node')}: {nodes}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "configuration": _NOT_TRIED
        if run is None
        else f"{run.name}: {run.grid}, {_spare(run)}ZeRO-{run.zero_stage}, hash {_hash(findings)}",
        "data": ", ".join(f"{name} {value[:12]}" for name, value in data.items()) or _NOT_TRIED,
        "clock": _NOT_TRIED
        if findings.folder is None
        else f"at most {max(clocks) * 1e3:.2f} ms apart"
        if clocks
        else "one node",
        "run folder": _NOT_TRIED
        if run is None or findings.folder is None
        else f"{run.run_dir}: written and read by all ranks",
        "ports": _ports(findings),
        "open files": f"a rank needs up to {max(each.open_files[0] for each in findings.came):,}",
        "shared memory": f"at least {readable_memory(min(free_here))} free in /dev/shm"
        if (free_here := [each for each in free if each is not None])
        else "there is no /dev/shm",
        "device": _devices(findings),
    }


def _spare(run: Run) -> str:
    return f"{counted(run.spare_ranks, 'spare rank')}, " if run.spare_ranks else ""


def _hash(findings: Findings) -> str:
    settings = usual([record.settings for record in findings.came])
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:12]


def _span(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"


def _ports(findings: Findings) -> str:
    if findings.ports is None:
        return _NOT_TRIED
    if len(findings.nodes) == 1:
        return "one node"
    return f"each of {len(findings.nodes)} nodes connects to the next"


def _devices(findings: Findings) -> str:
    counts: dict[str, int] = {}
    for record in findings.came:
        counts[record.device] = counts.get(record.device, 0) + 1
    text = ", ".join(f"{count} x {name}" for name, count in counts.items())
    matrices = [nvlinks(record.gpu_links) for record in findings.came if record.gpu_links]
    if any(links.pairs for links in matrices):
        linked, pairs = sum(one.linked for one in matrices), sum(one.pairs for one in matrices)
        text += f"; NVLink between {linked} of {pairs} pairs within nodes"
    return text
