"""Finds what is wrong and on which rank, and what works but is slow.

Each rank is compared with the value that most ranks have. So if one rank differs, only this rank is
reported.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megaspeed.config.resolve import Run
from megaspeed.doctor.record import Record
from megaspeed.planning.costs.traffic import axis_totals, predict_traffic
from megaspeed.units import GB, GIB, MB, counted, traffic_unit

_CLOCK_SECONDS = 1.0
_SHARED_MEMORY_BYTES = 2**30
_KEYS_SHOWN = 3
_ENOUGH_GROUPS = 3
_SLOW = 0.5


@dataclass(frozen=True, kw_only=True)
class Link:
    """One process group, as measured by one of its ranks."""

    axis: str  # pp, dp, tp or world
    ranks: Sequence[int]  # of the group
    latency_seconds: float  # median time for a message of 8 bytes
    bytes_per_second: float  # bytes that a rank sends for a large message / the median time


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """What one rank measured, and the problem that ended the measurement, if any."""

    links: list[Link] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What rank 0 collected. None means not measured, because an earlier step failed."""

    records: Sequence[Record | None]  # the record of every rank; None if the rank did not answer
    waited_seconds: float  # how long rank 0 waited for the records
    run: Run | None = None  # the run of rank 0; None if its configuration is wrong
    # First rank of a machine -> how many seconds its clock is ahead of rank 0's; None if it did
    # not answer.
    clocks: dict[int, float | None] | None = None
    folder: dict[int, str] | None = None  # rank -> what is wrong with training.run_dir there
    # Rank -> why it cannot connect to the next machine, or why it cannot be reached.
    ports: dict[int, str] | None = None
    # The measurements of every rank; None if the rank did not answer.
    links: Sequence[LinkReport | None] | None = None

    @property
    def answered(self) -> list[Record]:
        """The records of the ranks that answered."""
        return [record for record in self.records if record is not None]

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each machine, by its name."""
        ranks: dict[str, list[int]] = {}
        for record in self.answered:
            ranks.setdefault(self.node_of(record), []).append(record.rank)
        return ranks

    @cached_property
    def shared_names(self) -> dict[str, int]:
        """Host names that several machines share, and the number of these machines."""
        machines = {(record.host, record.boot) for record in self.answered}
        counts = Counter(host for host, _ in machines)
        return {host: count for host, count in counts.items() if count > 1}

    @property
    def groups(self) -> dict[str, list[Link]]:
        """The groups of each axis, each with the figures of its slowest rank."""
        slowest: dict[tuple[str, tuple[int, ...]], Link] = {}
        for report in self.links or ():
            for link in () if report is None else report.links:
                group = link.axis, tuple(link.ranks)
                known = slowest.get(group, link)
                slowest[group] = min(known, link, key=lambda each: each.bytes_per_second)
        axes: dict[str, list[Link]] = {}
        for (axis, _), link in sorted(slowest.items()):
            axes.setdefault(axis, []).append(link)
        return axes

    def node_of(self, record: Record) -> str:
        """The machine's name: its host name, with its boot id if others have the same name."""
        name = record.host
        return f"{name}/{record.boot[:8]}" if name in self.shared_names else name

    def host_of(self, rank: int) -> str:
        """The machine of a rank; "?" if the rank did not answer."""
        record = self.records[rank]
        return "?" if record is None else self.node_of(record)

    def crosses_nodes(self, link: Link) -> bool:
        """Whether the ranks of the group are on more than one machine."""
        return len({self.host_of(rank) for rank in link.ranks}) > 1


class Problem(NamedTuple):
    """A problem that a check found on one rank."""

    rank: int
    host: str
    check: str
    text: str


_CHECKS = (
    "ranks",
    "versions",
    "configuration",
    "data",
    "time limit",
    "clock",
    "run folder",
    "ports",
    "open files",
    "shared memory",
    "device",
    "process groups",
)

_Problems = Iterator[tuple[int, str, str]]
"""Rank, check and text of each problem."""


def find_problems(findings: Findings) -> list[Problem]:
    """All problems, in the order of the checks."""
    sources = (_missing_ranks, _own_problems, _differences, _problems_between_ranks)
    problems = [
        Problem(rank, findings.host_of(rank), check, text)
        for source in sources
        for rank, check, text in source(findings)
    ]
    return sorted(problems, key=lambda problem: _CHECKS.index(problem.check))


def _missing_ranks(findings: Findings) -> _Problems:
    for rank, record in enumerate(findings.records):
        if record is None:
            text = (
                f"did not answer within {findings.waited_seconds:g} s: it is not running, or it "
                "cannot reach MASTER_ADDR and MASTER_PORT; look for its output on its machine"
            )
            yield rank, "ranks", text


def _own_problems(findings: Findings) -> _Problems:
    """Problems that the record of a rank shows."""
    world = len(findings.records)
    common = most_common([{"device": record.device} for record in findings.answered])["device"]
    for record in findings.answered:
        rank = record.rank
        if record.world_size != world:
            text = f"has world size {record.world_size}, but rank 0 has {world}"
            yield rank, "ranks", text
        if record.wrong_input is not None:
            yield rank, "configuration", record.wrong_input
        for step in record.too_slow:
            text = f"{step} did not end in time; --timeout SECONDS allows more"
            yield rank, "time limit", text
        needed, allowed = record.open_files
        if 0 <= allowed < needed:
            text = (
                f"may open {allowed:,} files and connections, but needs up to {needed:,}: raise "
                "the hard limit (ulimit -Hn, or nofile in /etc/security/limits.conf)"
            )
            yield rank, "open files", text
        # NCCL exchanges data between GPUs of a machine in /dev/shm.
        free = record.shared_memory_bytes
        several = len(findings.nodes[findings.node_of(record)]) > 1
        if record.device != "cpu" and several and free is not None and free < _SHARED_MEMORY_BYTES:
            text = (
                f"has {GIB.named(free)} free in /dev/shm, but NCCL needs up to 1 GiB: "
                "docker run --shm-size=8g, or in Kubernetes a volume with medium: Memory"
            )
            yield rank, "shared memory", text
        if record.unusable_gpu is not None:
            yield rank, "device", record.unusable_gpu
        elif (record.device == "cpu") != (common == "cpu"):
            yield rank, "device", f"runs on {record.device}, but most ranks on {common}"


def _differences(findings: Findings) -> _Problems:
    """Ranks with other values than most ranks. Empty parts of a record are ignored."""
    parts: dict[str, Callable[[Record], dict[str, str]]] = {
        "versions": lambda record: record.versions,
        "configuration": lambda record: record.settings,
        "data": lambda record: record.data,
    }
    for check, part in parts.items():
        common = most_common([part(record) for record in findings.answered])
        for record in findings.answered:
            own = part(record)
            keys = [key for key in sorted(common | own) if common.get(key) != own.get(key)]
            if own and keys:
                shown = [
                    f"{key} is {_short(own.get(key))}, but {_short(common.get(key))} on most ranks"
                    for key in keys[:_KEYS_SHOWN]
                ]
                more = len(keys) - len(shown)
                text = "; ".join(shown) + (f"; and {more} more" if more else "")
                yield record.rank, check, text


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 40 else f"{value[:16]}..."


def _problems_between_ranks(findings: Findings) -> _Problems:
    for rank, offset in (findings.clocks or {}).items():
        if offset is None:
            yield rank, "clock", "did not answer when its clock was measured"
        elif abs(offset) > _CLOCK_SECONDS:
            where = "ahead of" if offset > 0 else "behind"
            text = (
                f"its clock is {abs(offset):.1f} s {where} that of rank 0: start a time service "
                "(chrony, systemd-timesyncd) on its machine"
            )
            yield rank, "clock", text
    for rank, text in sorted((findings.folder or {}).items()):
        yield rank, "run folder", text
    for rank, text in sorted((findings.ports or {}).items()):
        yield rank, "ports", text
    for rank, report in enumerate(findings.links or ()):
        if report is None:
            text = "did not report its process groups: it has ended or hangs"
            yield rank, "process groups", text
        elif report.problem is not None:
            yield rank, "process groups", report.problem


def most_common(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """The most frequent value of a part of the records; in a tie, the lowest rank's."""
    filled = [tuple(sorted(part.items())) for part in parts if part]
    return dict(Counter(filled).most_common(1)[0][0]) if filled else {}


def make_remarks(findings: Findings) -> Iterator[str]:
    """A sentence for each setting or link that works, but is slow or confusing."""
    for host, count in findings.shared_names.items():
        yield (
            f"{count} machines have the host name {host}, so messages and log files of a run do "
            "not show which of them is meant: give each its own name"
        )
    yield from _tensor_axis_across_nodes(findings)
    for record in findings.answered:
        links = nvlinks(record.gpu_links or "")
        if links.linked < links.pairs:
            yield (
                f"{findings.node_of(record)}: {links.pairs - links.linked} of {links.pairs} pairs "
                "of GPUs have no NVLink, so they exchange data over PCIe; see nvidia-smi "
                "topo -m"
            )
    names = sorted({record.device for record in findings.answered})
    if len(names) > 1:
        yield f"the ranks have different devices ({', '.join(names)}); the slowest sets the pace"
    for axis, groups in findings.groups.items():
        median = statistics.median(link.bytes_per_second for link in groups)
        for link in groups:
            if len(groups) >= _ENOUGH_GROUPS and link.bytes_per_second < _SLOW * median:
                yield (
                    f"the {axis} group of ranks {list(link.ranks)} is slow: "
                    f"{rate(link.bytes_per_second)}, but half of the groups reach {rate(median)}"
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
        f"tp, which takes {sent / slowest:.2g} s at the measured {rate(slowest)}. Choose "
        f"parallel.tensor so that it divides the {counted(fewest, 'rank')} of a node, and let pp "
        "or dp cross"
    )


class NvLinks(NamedTuple):
    """How many pairs of GPUs there are, and how many of them have NVLink."""

    pairs: int
    linked: int


def nvlinks(matrix: str) -> NvLinks:
    """The pairs of GPUs of a machine, from the matrix that `nvidia-smi topo -m` prints.

            GPU0    GPU1    CPU Affinity
    GPU0     X      NV18    0-55            NV18: 18 NVLinks; SYS, NODE, PHB, PIX: over PCIe
    GPU1    NV18     X      0-55

    The result is (0, 0) if there is one GPU, or if the matrix cannot be read.
    """
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [row[1 + column] for index, row in enumerate(rows) for column in range(index)]
    return NvLinks(len(cells), sum(cell.startswith("NV") for cell in cells))


def rate(bytes_per_second: float) -> str:
    """Bytes per second in GB/s or MB/s."""
    unit = GB if bytes_per_second >= GB.size else MB
    return f"{unit.of(round(bytes_per_second))} {unit.name}/s"
