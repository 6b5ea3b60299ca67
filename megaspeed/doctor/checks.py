"""The list of checks: what was found, and what is wrong on which rank; and what works but is slow.

Each rank is compared with the value that most ranks have. So if one rank differs, only this rank is
reported.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaspeed.config.errors import shortened
from megaspeed.config.resolve import Run
from megaspeed.doctor.record import Link, Record
from megaspeed.model.bf16_on_cpu import bf16_warning
from megaspeed.planning.costs.traffic import axis_totals, predict_traffic
from megaspeed.topology.store import ranks_named
from megaspeed.units import counted, traffic_unit

_KEYS_SHOWN = 3
_ENOUGH_GROUPS = 3
_SLOW = 0.5


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What rank 0 collected."""

    records: Sequence[Record | None]  # the last record of every rank; None if there is none
    waited_seconds: float  # how long rank 0 waited for the first records
    run: Run | None = None  # the run of rank 0; None if its configuration is wrong
    # The ranks that did not report the checks between ranks; None if these were not made, because
    # an earlier step failed.
    silent: Sequence[int] | None = None

    @property
    def answered(self) -> list[Record]:
        """The records of the ranks that answered."""
        return [record for record in self.records if record is not None]

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each machine, by its host name."""
        ranks: dict[str, list[int]] = {}
        for record in self.answered:
            ranks.setdefault(record.host, []).append(record.rank)
        return ranks

    @property
    def groups(self) -> dict[str, list[Link]]:
        """The groups of each axis, each with the figures of its slowest rank."""
        slowest: dict[tuple[str, tuple[int, ...]], Link] = {}
        for link in (link for record in self.answered for link in record.links):
            group = link.axis, tuple(link.ranks)
            known = slowest.get(group, link)
            slowest[group] = min(known, link, key=lambda each: each.bytes_per_second)
        axes: dict[str, list[Link]] = {}
        for (axis, _), link in sorted(slowest.items()):
            axes.setdefault(axis, []).append(link)
        return axes

    def host_of(self, rank: int) -> str:
        """The machine of a rank; "?" if the rank did not answer."""
        record = self.records[rank]
        return "?" if record is None else record.host

    def crosses_nodes(self, link: Link) -> bool:
        """Whether the ranks of the group are on more than one machine."""
        return len({self.host_of(rank) for rank in link.ranks}) > 1


class Check(NamedTuple):
    """One check of all ranks."""

    name: str
    found: str | None  # in words; None if the check was not made, "" if there is nothing to say
    wrong: dict[int, str]  # rank -> what is wrong there


def make_checks(findings: Findings) -> list[Check]:
    """Make all checks, in the order of the report."""
    run, answered, together = findings.run, findings.answered, findings.silent is not None
    versions, differing_versions = _compare(findings, "versions")
    _, differing_keys = _compare(findings, "configuration")
    data, differing_data = _compare(findings, "data")
    devices = Counter(record.device for record in answered)
    device_names = ", ".join(f"{count} x {name}" for name, count in devices.items())
    common = devices.most_common(1)[0][0]
    differing_devices = {
        record.rank: f"runs on {record.device}, but most ranks on {common}"
        for record in answered
        if (record.device == "cpu") != (common == "cpu")
    }
    answers = f"{len(answered)} of {len(findings.records)}"
    nodes = "; ".join(f"{host}: {ranks_named(ranks)}" for host, ranks in findings.nodes.items())
    silent = "did not report the checks between ranks: it has ended or hangs"
    checks = (
        Check("ranks", f"{answers} answered ({nodes})", _missing_ranks(findings)),
        Check("versions", _listed(versions), differing_versions),
        Check("configuration", None if run is None else _layout(run), differing_keys),
        Check("data", _listed(data) or None, differing_data),
        Check("time limit", "", {}),
        Check("shared memory", "", {}),
        Check("device", device_names, differing_devices),
        Check("run folder", f"{run.run_dir}: shared" if run and together else None, {}),
        Check("process groups", "", dict.fromkeys(findings.silent or (), silent)),
    )
    for check in checks:
        for record in answered:
            if check.name in record.problems:
                check.wrong[record.rank] = record.problems[check.name]
    return list(checks)


def _missing_ranks(findings: Findings) -> dict[int, str]:
    world = len(findings.records)
    missing = (
        f"did not answer within {findings.waited_seconds:g} s: it is not running, or it cannot "
        "reach MASTER_ADDR and MASTER_PORT; look for its output on its machine"
    )
    wrong = {rank: missing for rank, record in enumerate(findings.records) if record is None}
    for record in findings.answered:
        if record.world_size != world:
            wrong[record.rank] = f"has world size {record.world_size}, but rank 0 has {world}"
    return wrong


def _layout(run: Run) -> str:
    spare = f", {counted(run.spare_ranks, 'spare rank')}" if run.spare_ranks else ""
    return f"{run.name}: {run.grid}{spare}, ZeRO-{run.zero_stage}"


def _listed(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _compare(findings: Findings, part: str) -> tuple[dict[str, str], dict[int, str]]:
    """Return the part of the records that most ranks have, and how other ranks differ.

    Empty parts are ignored. In a tie, the lowest rank's value is taken.
    """
    parts: dict[int, dict[str, str]] = {
        record.rank: getattr(record, part) for record in findings.answered if getattr(record, part)
    }
    counts = Counter(tuple(sorted(each.items())) for each in parts.values())
    common = dict(counts.most_common(1)[0][0]) if parts else {}
    wrong = {}
    for rank, own in parts.items():
        differences = [
            f"{key} is {_short(own.get(key))}, but {_short(common.get(key))} on most ranks"
            for key in sorted(common | own)
            if common.get(key) != own.get(key)
        ]
        if differences:
            wrong[rank] = "; ".join(shortened(differences, _KEYS_SHOWN))
    return common, wrong


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 40 else f"{value[:16]}..."


def make_remarks(findings: Findings) -> Iterator[str]:
    """Yield a sentence for each device or link that works, but is slow."""
    yield from _tensor_axis_across_nodes(findings)
    if findings.run is not None:
        yield from bf16_warning(findings.run.config, findings.answered[0].device)
    names = sorted({record.device for record in findings.answered})
    if len(names) > 1:
        yield f"the ranks have different devices ({', '.join(names)}); the slowest sets the pace"
    for axis, groups in findings.groups.items():
        median = statistics.median(link.bytes_per_second for link in groups)
        for link in groups:
            if len(groups) >= _ENOUGH_GROUPS and link.bytes_per_second < _SLOW * median:
                yield (
                    f"the {axis} group of ranks {list(link.ranks)} is slow: "
                    f"{_rate(link.bytes_per_second)}, but half of the groups reach {_rate(median)}"
                )


def _tensor_axis_across_nodes(findings: Findings) -> Iterator[str]:
    run = findings.run
    crossing = [link for link in findings.groups.get("tp", []) if findings.crosses_nodes(link)]
    if run is None or not crossing:
        return
    slowest = min(link.bytes_per_second for link in crossing)
    sent = max(axis_totals(predict_traffic(run, stage))["tp"] for stage in range(run.grid.pp))
    fewest = min(len(ranks) for ranks in findings.nodes.values())
    yield (
        f"tp crosses nodes in {counted(len(crossing), 'group')}, such as ranks "
        f"{list(crossing[0].ranks)}. A rank sends {traffic_unit((sent,)).named(sent)} a step over "
        f"tp, which takes {sent / slowest:.2g} s at the measured {_rate(slowest)}. Choose "
        f"parallel.tensor so that it divides the {counted(fewest, 'rank')} of a node, and let pp "
        "or dp cross"
    )


def _rate(bytes_per_second: float) -> str:
    """Return bytes per second with their unit, such as "1.50 GB/s"."""
    number = round(bytes_per_second)
    return f"{traffic_unit((number,)).named(number)}/s"


def print_report(findings: Findings) -> dict[str, Any]:
    """Print table, problems and remarks. Returns all findings as JSON values."""
    checks, remarks = make_checks(findings), list(make_remarks(findings))
    problems = [
        {"rank": rank, "host": findings.host_of(rank), "check": check.name, "text": text}
        for check in checks
        for rank, text in sorted(check.wrong.items())
    ]
    console = Console()
    console.print(_table(findings, checks))
    for each in problems:
        place = f"rank {each['rank']} ({each['host']}), {each['check']}: {each['text']}"
        console.print(f"[red]wrong:[/red] {escape(place)}", highlight=False, soft_wrap=True)
    for remark in remarks:
        line = f"[yellow]remark:[/yellow] {escape(remark)}"
        console.print(line, highlight=False, soft_wrap=True)
    return {
        "fine": not problems,
        "problems": problems,
        "remarks": remarks,
        "nodes": findings.nodes,
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
            f"{latency * 1e6:,.0f} us, {_rate(slowest.bytes_per_second)} a rank in the slowest",
            "",
        )
    return table
