"""The list of checks: what was found, and what is wrong on which rank; and what works but is slow.

Each rank is compared with the value that most ranks have. So if one rank differs, only this rank is
reported.
"""

import hashlib
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megaspeed.config.resolve import Run
from megaspeed.doctor.record import Link, Record
from megaspeed.planning.costs.traffic import axis_totals, predict_traffic
from megaspeed.topology.store import ranks_named
from megaspeed.units import GIB, counted, readable_memory, traffic_unit

_CLOCK_SECONDS = 1.0
_SHARED_MEMORY_BYTES = 2**30
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
        """The ranks of each machine, by its name."""
        ranks: dict[str, list[int]] = {}
        for record in self.answered:
            ranks.setdefault(self.host_of(record.rank), []).append(record.rank)
        return ranks

    @cached_property
    def shared_names(self) -> dict[str, int]:
        """Host names that several machines share, and the number of these machines."""
        machines = {(record.host, record.boot) for record in self.answered}
        counts = Counter(host for host, _ in machines)
        return {host: count for host, count in counts.items() if count > 1}

    @property
    def clocks(self) -> dict[int, float]:
        """First rank of a machine -> how many seconds its clock is ahead of rank 0's."""
        return {
            record.rank: record.clock_seconds
            for record in self.answered
            if record.first_of_node and record.clock_seconds is not None
        }

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
        """The machine of a rank: its host name, with its boot id if others have the same name.

        "?" if the rank did not answer.
        """
        record = self.records[rank]
        if record is None:
            return "?"
        is_shared = record.host in self.shared_names
        return f"{record.host}/{record.boot[:8]}" if is_shared else record.host

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
    between_ranks = (_clock, _run_folder, _ports)
    on_each_rank = (_open_files, _shared_memory, _device)
    checks = (_ranks, *_EQUAL, _time_limit, *between_ranks, *on_each_rank, _process_groups)
    return [check(findings) for check in checks]


def _ranks(findings: Findings) -> Check:
    world, records = len(findings.records), findings.answered
    nodes = ", ".join(f"{host} ({ranks_named(ranks)})" for host, ranks in findings.nodes.items())
    found = (
        f"{len(records)} of {world} answered, from {records[0].launcher}, on "
        f"{counted(len(findings.nodes), 'node')}: {nodes}"
    )
    missing = (
        f"did not answer within {findings.waited_seconds:g} s: it is not running, or it cannot "
        "reach MASTER_ADDR and MASTER_PORT; look for its output on its machine"
    )
    wrong = {rank: missing for rank, record in enumerate(findings.records) if record is None}
    for record in records:
        if record.world_size != world:
            wrong[record.rank] = f"has world size {record.world_size}, but rank 0 has {world}"
    return Check("ranks", found, wrong)


def _versions(findings: Findings) -> Check:
    common, wrong = _compare(findings, lambda record: record.versions)
    return Check(
        "versions", ", ".join(f"{name} {number}" for name, number in common.items()), wrong
    )


def _configuration(findings: Findings) -> Check:
    run, found = findings.run, None
    common, wrong = _compare(findings, lambda record: record.settings)
    if run is not None:
        digest = hashlib.sha256(repr(sorted(common.items())).encode()).hexdigest()[:12]
        spare = f"{counted(run.spare_ranks, 'spare rank')}, " if run.spare_ranks else ""
        found = f"{run.name}: {run.grid}, {spare}ZeRO-{run.zero_stage}, hash {digest}"
    for record in findings.answered:
        if record.wrong_input is not None:
            wrong[record.rank] = record.wrong_input
    return Check("configuration", found, wrong)


def _data(findings: Findings) -> Check:
    common, wrong = _compare(findings, lambda record: record.data)
    found = ", ".join(f"{name} {value[:12]}" for name, value in common.items())
    return Check("data", found or None, wrong)


_EQUAL = (_versions, _configuration, _data)


def _compare(
    findings: Findings, part: Callable[[Record], dict[str, str]]
) -> tuple[dict[str, str], dict[int, str]]:
    """Return the part of the records that most ranks have, and how other ranks differ.

    Empty parts are ignored. In a tie, the lowest rank's value is taken.
    """
    parts = {record.rank: part(record) for record in findings.answered if part(record)}
    counts = Counter(tuple(sorted(each.items())) for each in parts.values())
    common = dict(counts.most_common(1)[0][0]) if parts else {}
    wrong = {}
    for rank, own in parts.items():
        keys = [key for key in sorted(common | own) if common.get(key) != own.get(key)]
        shown = [
            f"{key} is {_short(own.get(key))}, but {_short(common.get(key))} on most ranks"
            for key in keys[:_KEYS_SHOWN]
        ]
        more = len(keys) - len(shown)
        if keys:
            wrong[rank] = "; ".join(shown) + (f"; and {more} more" if more else "")
    return common, wrong


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 40 else f"{value[:16]}..."


def _time_limit(findings: Findings) -> Check:
    wrong = {
        record.rank: f"{', '.join(record.too_slow)} did not end in time; --timeout SECONDS allows "
        "more"
        for record in findings.answered
        if record.too_slow
    }
    return Check("time limit", "", wrong)


def _clock(findings: Findings) -> Check:
    wrong = {}
    for rank, offset in findings.clocks.items():
        if abs(offset) > _CLOCK_SECONDS:
            wrong[rank] = (
                f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that "
                "of rank 0: start a time service (chrony, systemd-timesyncd) on its machine"
            )
    largest = max(map(abs, findings.clocks.values()), default=None)
    found = "one node" if largest is None else f"at most {largest * 1e3:.0f} ms apart"
    return Check("clock", None if findings.silent is None else found, wrong)


def _run_folder(findings: Findings) -> Check:
    found = None
    if findings.run is not None and findings.silent is not None:
        found = f"{findings.run.run_dir}: written and read by all ranks"
    problems = {record.rank: record.folder_problem for record in findings.answered}
    return Check("run folder", found, {rank: why for rank, why in problems.items() if why})


def _ports(findings: Findings) -> Check:
    nodes = len(findings.nodes)
    found = f"each of {nodes} nodes connects to the next" if nodes > 1 else "one node"
    problems = [record.port_problem for record in findings.answered if record.port_problem]
    wrong = {rank: text for rank, text in problems}
    return Check("ports", None if findings.silent is None else found, wrong)


def _open_files(findings: Findings) -> Check:
    wrong = {}
    for record in findings.answered:
        needed, allowed = record.open_files
        if 0 <= allowed < needed:
            wrong[record.rank] = (
                f"may open {allowed:,} files and connections, but needs up to {needed:,}: raise "
                "the hard limit (ulimit -Hn, or nofile in /etc/security/limits.conf)"
            )
    most = max(record.open_files[0] for record in findings.answered)
    return Check("open files", f"a rank needs up to {most:,}", wrong)


def _shared_memory(findings: Findings) -> Check:
    """NCCL exchanges data between GPUs of a machine in /dev/shm."""
    wrong, free = {}, []
    for record in findings.answered:
        if record.shared_memory_bytes is None:
            continue
        free.append(record.shared_memory_bytes)
        several = len(findings.nodes[findings.host_of(record.rank)]) > 1
        if record.device != "cpu" and several and free[-1] < _SHARED_MEMORY_BYTES:
            wrong[record.rank] = (
                f"has {GIB.named(free[-1])} free in /dev/shm, but NCCL needs up to 1 GiB: "
                "docker run --shm-size=8g, or in Kubernetes a volume with medium: Memory"
            )
    found = f"at least {readable_memory(min(free))} free in /dev/shm" if free else "no /dev/shm"
    return Check("shared memory", found, wrong)


def _device(findings: Findings) -> Check:
    counts = Counter(record.device for record in findings.answered)
    ((common, _),) = counts.most_common(1)
    found = ", ".join(f"{count} x {name}" for name, count in counts.items())
    nodes = [nvlinks(record.gpu_links) for record in findings.answered if record.gpu_links]
    if pairs := sum(links.pairs for links in nodes):
        linked = sum(links.linked for links in nodes)
        found += f"; NVLink between {linked} of {pairs} pairs within nodes"
    wrong = {}
    for record in findings.answered:
        if record.unusable_gpu is not None:
            wrong[record.rank] = record.unusable_gpu
        elif (record.device == "cpu") != (common == "cpu"):
            wrong[record.rank] = f"runs on {record.device}, but most ranks on {common}"
    return Check("device", found, wrong)


def _process_groups(findings: Findings) -> Check:
    silent = "did not report the checks between ranks: it has ended or hangs"
    problems = {record.rank: record.group_problem for record in findings.answered}
    wrong = {rank: why for rank, why in problems.items() if why is not None}
    return Check("process groups", "", wrong | dict.fromkeys(findings.silent or (), silent))


def make_remarks(findings: Findings) -> Iterator[str]:
    """Yield a sentence for each setting or link that works, but is slow or confusing."""
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
                f"{findings.host_of(record.rank)}: {links.pairs - links.linked} of {links.pairs} "
                "pairs of GPUs have no NVLink, so they exchange data over PCIe; see nvidia-smi "
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
    """Count the pairs of GPUs of a machine in the matrix that ``nvidia-smi topo -m`` prints.

            GPU0    GPU1    CPU Affinity
    GPU0     X      NV18    0-55            NV18: 18 NVLinks; SYS, NODE, PHB, PIX: over PCIe
    GPU1    NV18     X      0-55

    The result is (0, 0) if there is one GPU, or if the matrix cannot be read.
    """
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [row[1 + column] for index, row in enumerate(rows) for column in range(index)]
    return NvLinks(len(cells), sum(cell.startswith("NV") for cell in cells))


def rate(bytes_per_second: float) -> str:
    """Return bytes per second with their unit, such as "1.50 GB/s"."""
    number = round(bytes_per_second)
    return f"{traffic_unit((number,)).named(number)}/s"
