"""Remarks on settings and links that work, but are slow."""

import statistics
from collections.abc import Iterator

from megaspeed.analysis.costs.traffic import predict_traffic
from megaspeed.analysis.doctor.findings import Findings
from megaspeed.analysis.doctor.gpu_links import nvlinks
from megaspeed.analysis.doctor.links import Link
from megaspeed.analysis.units import GB, MB, counted, traffic_unit
from megaspeed.config.resolve import Run

_MANY_GROUPS = 3
_SLOW = 0.5


def make_remarks(findings: Findings, run: Run | None) -> list[str]:
    """One sentence for each."""
    groups = measured_groups(findings)
    crossing = [] if run is None else _tensor_axis_across_nodes(findings, run, groups)
    return [
        *_shared_names(findings),
        *crossing,
        *_without_nvlink(findings),
        *_different_gpus(findings),
        *_slow_groups(groups),
    ]


def _shared_names(findings: Findings) -> Iterator[str]:
    for host, count in findings.shared_names.items():
        yield (
            f"{count} machines have the host name {host}, so messages and log files of a run do "
            "not show which of them is meant: give each its own name"
        )


def measured_groups(findings: Findings) -> dict[str, list[Link]]:
    """The groups of each axis, each with the figures of its slowest rank."""
    slowest: dict[tuple[str, tuple[int, ...]], Link] = {}
    for answer in findings.links or []:
        for link in () if answer is None else answer.links:
            known = slowest.get((link.axis, link.ranks), link)
            slowest[link.axis, link.ranks] = min(known, link, key=lambda one: one.bytes_per_second)
    axes: dict[str, list[Link]] = {}
    for (axis, _), link in sorted(slowest.items()):
        axes.setdefault(axis, []).append(link)
    return axes


def _tensor_axis_across_nodes(
    findings: Findings, run: Run, groups: dict[str, list[Link]]
) -> Iterator[str]:
    crossing = [link for link in groups.get("tp", []) if findings.crosses_nodes(link.ranks)]
    if not crossing:
        return
    slowest = min(link.bytes_per_second for link in crossing)
    sent = max(
        sum(sent for (axis, _), sent in predict_traffic(run, stage).items() if axis == "tp")
        for stage in range(run.grid.pp)
    )
    fewest = min(len(ranks) for ranks in findings.nodes.values())
    yield (
        f"tp crosses nodes in {counted(len(crossing), 'group')}, such as ranks "
        f"{list(crossing[0].ranks)}. A rank sends {traffic_unit((sent,)).named(sent)} a step over "
        f"tp, which takes {sent / slowest:.2g} s at the measured {rate(slowest)}. Choose "
        f"parallel.tensor so that it divides the {counted(fewest, 'rank')} of a node, and let pp "
        "or dp cross"
    )


def _without_nvlink(findings: Findings) -> Iterator[str]:
    for record in findings.came:
        links = nvlinks(record.gpu_links or "")
        if links.linked < links.pairs:
            yield (
                f"{findings.node_of(record)}: {links.pairs - links.linked} of {links.pairs} pairs "
                "of GPUs have no NVLink, so what they exchange goes over PCIe; see nvidia-smi "
                "topo -m"
            )


def _different_gpus(findings: Findings) -> Iterator[str]:
    names = sorted({record.device for record in findings.came})
    if len(names) > 1:
        yield f"the ranks have different devices ({', '.join(names)}); the slowest sets the pace"


def _slow_groups(groups: dict[str, list[Link]]) -> Iterator[str]:
    for axis, links in groups.items():
        middle = statistics.median(link.bytes_per_second for link in links)
        for link in links:
            if len(links) >= _MANY_GROUPS and link.bytes_per_second < _SLOW * middle:
                yield (
                    f"the {axis} group of ranks {list(link.ranks)} is slow: "
                    f"{rate(link.bytes_per_second)}, but half of the groups reach {rate(middle)}"
                )


def rate(bytes_per_second: float) -> str:
    """Bytes a second in a unit that suits them."""
    unit = GB if bytes_per_second >= GB.size else MB
    return f"{unit.of(round(bytes_per_second))} {unit.name}/s"
