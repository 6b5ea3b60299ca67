"""What is wrong, and on which rank.

Each rank is compared with the value that most ranks have. So if one rank differs, only this rank is
reported.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megaspeed.analysis.doctor.findings import Findings
from megaspeed.analysis.doctor.record import Record
from megaspeed.analysis.units import GIB

_CLOCK_SECONDS = 1.0
_SHARED_MEMORY_BYTES = 2**30
_KEYS_SHOWN = 3


class Problem(NamedTuple):
    """Something wrong with one rank."""

    rank: int
    host: str
    check: str
    text: str


def find_problems(findings: Findings) -> list[Problem]:
    """All problems, in the order of the checks."""
    return [
        Problem(rank, findings.host_of(rank), check, text)
        for check, finder in _CHECKS.items()
        for rank, text in finder(findings)
    ]


Found = Iterator[tuple[int, str]]


def _ranks(findings: Findings) -> Found:
    for rank, record in enumerate(findings.records):
        if record is None:
            yield (
                rank,
                f"did not answer within {findings.waited_seconds:g} s: it is not running, or it "
                "cannot reach MASTER_ADDR and MASTER_PORT; look for its output on its machine",
            )
    world = len(findings.records)
    for record in findings.came:
        if record.world_size != world:
            yield record.rank, f"has world size {record.world_size}, and rank 0 has {world}"


def _versions(findings: Findings) -> Found:
    yield from _odd(findings, lambda record: record.versions)


def _configuration(findings: Findings) -> Found:
    for record in findings.came:
        if record.wrong_input is not None:
            yield record.rank, record.wrong_input
    yield from _odd(findings, lambda record: record.settings)


def _data(findings: Findings) -> Found:
    yield from _odd(findings, lambda record: record.data)


def _odd(findings: Findings, part: Callable[[Record], dict[str, str]]) -> Found:
    """Ranks whose part differs from the usual one. An empty part was already reported."""
    common = usual([part(record) for record in findings.came])
    for record in findings.came:
        own = part(record)
        differing = [key for key in sorted(common | own) if common.get(key) != own.get(key)]
        if own and differing:
            shown = [
                f"{key} is {_short(own.get(key))}, and {_short(common.get(key))} on most ranks"
                for key in differing[:_KEYS_SHOWN]
            ]
            more = len(differing) - len(shown)
            yield record.rank, "; ".join(shown) + (f"; and {more} more" if more else "")


def usual(parts: list[dict[str, str]]) -> dict[str, str]:
    """The most frequent part; in a tie, the one of the lowest rank."""
    filled = [tuple(sorted(part.items())) for part in parts if part]
    return dict(Counter(filled).most_common(1)[0][0]) if filled else {}


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 40 else f"{value[:16]}..."


def _speed_of_a_step(findings: Findings) -> Found:
    for record in findings.came:
        for step in record.too_slow:
            yield record.rank, f"{step} did not end in time; --timeout SECONDS allows more"


def _clock(findings: Findings) -> Found:
    for rank, offset in findings.clocks.items():
        if offset is None:
            yield rank, "did not answer when its clock was measured"
        elif abs(offset) > _CLOCK_SECONDS:
            where = "ahead of" if offset > 0 else "behind"
            yield (
                rank,
                f"its clock is {abs(offset):.1f} s {where} that of rank 0: start a time service "
                "(chrony, systemd-timesyncd) on its machine",
            )


def _run_folder(findings: Findings) -> Found:
    yield from sorted((findings.folder or {}).items())


def _ports(findings: Findings) -> Found:
    yield from sorted((findings.ports or {}).items())


def _open_files(findings: Findings) -> Found:
    for record in findings.came:
        needed, allowed = record.open_files
        if 0 <= allowed < needed:
            yield (
                record.rank,
                f"may open {allowed:,} files and connections, and needs up to {needed:,}: raise "
                "the hard limit (ulimit -Hn, or nofile in /etc/security/limits.conf)",
            )


def _shared_memory(findings: Findings) -> Found:
    """NCCL exchanges data in /dev/shm between the GPUs of a machine."""
    for record in findings.came:
        free = record.shared_memory_bytes
        several = len(findings.nodes[findings.node_of(record)]) > 1
        if record.device != "cpu" and several and free is not None and free < _SHARED_MEMORY_BYTES:
            yield (
                record.rank,
                f"finds {GIB.named(free)} free in /dev/shm, but NCCL needs up to 1 GiB: "
                "docker run --shm-size=8g, or in Kubernetes a volume with medium: Memory",
            )


def _devices(findings: Findings) -> Found:
    common = usual([{"device": record.device} for record in findings.came]).get("device")
    for record in findings.came:
        if record.unusable_gpu is not None:
            yield record.rank, record.unusable_gpu
        elif (record.device == "cpu") != (common == "cpu"):
            yield record.rank, f"runs on {record.device}, and most ranks on {common}"


def _links(findings: Findings) -> Found:
    for rank, answer in enumerate(findings.links or []):
        if answer is None:
            yield rank, "did not report its process groups: it has ended or hangs"
        elif answer.problem is not None:
            yield rank, answer.problem


_CHECKS: dict[str, Callable[[Findings], Found]] = {
    "ranks": _ranks,
    "versions": _versions,
    "configuration": _configuration,
    "data": _data,
    "time limit": _speed_of_a_step,
    "clock": _clock,
    "run folder": _run_folder,
    "ports": _ports,
    "open files": _open_files,
    "shared memory": _shared_memory,
    "device": _devices,
    "process groups": _links,
}
