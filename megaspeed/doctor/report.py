"""The output of the doctor: a table, a line for each problem of a rank, remarks, and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaspeed.doctor.checks import Check, Findings, make_checks, make_remarks, rate
from megaspeed.units import counted

_MOST_LINES = 40


def print_report(findings: Findings) -> dict[str, Any]:
    """Print table, problems and remarks. Returns all findings as JSON values."""
    checks, remarks = make_checks(findings), list(make_remarks(findings))
    problems: list[dict[str, Any]] = [
        {"rank": rank, "host": findings.host_of(rank), "check": check.name, "text": text}
        for check in checks
        for rank, text in sorted(check.wrong.items())
    ]
    console = Console()
    console.print(_table(findings, checks))
    lines = [
        f"[red]wrong:[/red] rank {each['rank']} ({escape(each['host'])}), {each['check']}: "
        f"{escape(each['text'])}"
        for each in problems[:_MOST_LINES]
    ]
    if len(problems) > _MOST_LINES:
        more = len(problems) - _MOST_LINES
        lines.append(f"[red]wrong:[/red] and {more} more; --json FILE lists all")
    lines += [f"[yellow]remark:[/yellow] {escape(remark)}" for remark in remarks]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return {
        "fine": not problems,
        "problems": problems,
        "remarks": remarks,
        "nodes": findings.nodes,
        "clock_seconds": findings.clocks,
        "groups": [
            {**asdict(link), "crosses_nodes": findings.crosses_nodes(link)}
            for links in findings.groups.values()
            for link in links
        ],
        "ranks": [record and asdict(record) for record in findings.records],
    }


def _table(findings: Findings, checks: Sequence[Check]) -> Table:
    """Return one row for each check, then one for each axis."""
    table = Table(title="doctor", title_justify="left")
    for name in ("check", "found", "verdict"):
        table.add_column(name, overflow="fold")
    for name, found, wrong in checks:
        if wrong:
            table.add_row(name, found, f"[red]wrong on {counted(len(wrong), 'rank')}[/red]")
        elif found != "":
            table.add_row(name, found or "not checked", "" if found is None else "fine")
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
