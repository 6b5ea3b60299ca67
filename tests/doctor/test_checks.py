"""The conclusions of the checks from the records of ranks, including those of GPUs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaspeed.doctor.checks import Findings, make_checks, make_remarks, nvlinks
from megaspeed.doctor.record import Link, Record
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
LINKED = """
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\t0-55\t0
GPU1\tNV18\t X \tNV18\t0-55\t0
GPU2\tNV18\tNV18\t X \t0-55\t0
NIC0\tPIX\tNODE\tNODE\t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
OVER_PCIE = LINKED.replace("GPU2\tNV18\tNV18", "GPU2\tSYS\tNV18")


def record(rank: int, host: str = "gpu17") -> Record:
    return Record(
        rank=rank,
        world_size=4,
        host=host,
        process=100 + rank,
        first_of_node=rank % 2 == 0,
        launcher="RANK/WORLD_SIZE",
        versions={"torch": "2.13.0", "NCCL": "2.27.3"},
        settings={"gradient_clipping": "1.0"},
        data={"training text": "aa", "tokenizer": "bb"},
        degrees=(2, 1, 2),
        device="NVIDIA H100 80GB HBM3",
        open_files=(520, 65_536),
        shared_memory_bytes=8 * 2**30,
        gpu_links=LINKED if rank % 2 == 0 else None,
    )


def findings(*changed: Record | None, **others: Any) -> Findings:
    """Return findings of four ranks on two machines. ``changed`` replaces the records of the last
    ones.
    """
    records: list[Record | None] = [record(0), record(1), record(2, "gpu18"), record(3, "gpu18")]
    records[4 - len(changed) :] = changed
    return Findings(records=records, waited_seconds=60.0, **others)


def problems(findings: Findings) -> list[tuple[int, str, str]]:
    """Return rank, check and text of each problem."""
    checks = make_checks(findings)
    return [(rank, check.name, text) for check in checks for rank, text in check.wrong.items()]


def test_equal_ranks_have_no_problem() -> None:
    assert problems(findings()) == []
    assert list(make_remarks(findings())) == []


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"versions": {"torch": "2.11.0", "NCCL": "2.27.3"}}, "versions", "torch is 2.11.0"),
        ({"versions": {"torch": "2.13.0"}}, "versions", "NCCL is missing, but 2.27.3"),
        ({"settings": {"gradient_clipping": "0.5"}}, "configuration", "clipping is 0.5"),
        ({"data": {"training text": "cc", "tokenizer": "bb"}}, "data", "text is cc"),
        ({"wrong_input": "1 problem"}, "configuration", "1 problem"),
        ({"too_slow": ["nvidia-smi"]}, "time limit", "nvidia-smi did not end in time"),
        ({"open_files": (9000, 4096)}, "open files", "may open 4,096"),
        ({"shared_memory_bytes": 2**26}, "shared memory", "0.06 GiB free in /dev/shm"),
        ({"device": "cpu"}, "device", "runs on cpu"),
        ({"device": "cpu", "unusable_gpu": "torch finds no GPU"}, "device", "finds no GPU"),
        ({"world_size": 8}, "ranks", "has world size 8, but rank 0 has 4"),
        ({"clock_seconds": 7.25}, "clock", "7.2 s ahead of that of rank 0"),
        ({"folder_problem": "No such file"}, "run folder", "No such file"),
        ({"port_problem": (2, "cannot connect")}, "ports", "cannot connect"),
        ({"group_problem": "was stuck"}, "process groups", "was stuck"),
    ],
)
def test_a_rank_that_differs_is_one_line(changes: dict[str, Any], check: str, text: str) -> None:
    changed = findings(replace(record(2, "gpu18"), **changes), record(3, "gpu18"))
    ((rank, name, found),) = problems(changed)
    assert (rank, changed.host_of(rank), name) == (2, "gpu18", check)
    assert text in found


def test_a_rank_0_that_differs_is_the_one_that_is_named() -> None:
    odd = replace(record(0), versions={"torch": "2.11.0"})
    one = findings(odd, record(1), record(2, "gpu18"), record(3, "gpu18"))
    assert [rank for rank, _, _ in problems(one)] == [0]


def test_a_rank_that_did_not_answer_is_named() -> None:
    ((rank, _, text),) = problems(findings(None))
    assert rank == 3 and "did not answer within 60 s" in text
    ((rank, check, _),) = problems(findings(silent=[3]))
    assert (rank, check) == (3, "process groups")


def test_nvlinks_are_counted_in_what_nvidia_smi_prints() -> None:
    assert nvlinks(LINKED) == (3, 3)
    assert nvlinks(OVER_PCIE) == (3, 2)
    assert nvlinks("unknown") == (0, 0)


def test_gpus_without_nvlink_and_unequal_gpus_are_remarks() -> None:
    other = replace(record(2, "gpu18"), gpu_links=OVER_PCIE, device="NVIDIA A100-SXM4-80GB")
    without, unequal = make_remarks(findings(other, record(3, "gpu18")))
    assert without.startswith("gpu18: 1 of 3 pairs of GPUs have no NVLink")
    assert "A100" in unequal and "H100" in unequal


def linked(axis: str, *groups: tuple[int, ...], speeds: Sequence[float], **others: Any) -> Findings:
    """Return findings of four ranks, each with one group of this axis."""
    records = [
        replace(each, links=[Link(axis, group, 1e-5, speed)])
        for each, group, speed in zip(findings().answered, groups, speeds, strict=True)
    ]
    return findings(*records, **others)


def test_two_machines_with_one_host_name_are_two_nodes() -> None:
    """An earlier version counted them as one node, so it did not report tp across them."""
    four = [(0, 1, 2, 3)] * 4
    one = linked("tp", *four, speeds=[1e6] * 4, run=tiny_run(TEXT, tp=4))
    boots = [f"{rank // 2}" * 36 for rank in range(4)]
    same = [replace(e, host="gpu17", boot=b) for e, b in zip(one.answered, boots, strict=True)]
    one = replace(one, records=same)
    assert one.nodes == {"gpu17/00000000": [0, 1], "gpu17/11111111": [2, 3]}
    name, crossing = make_remarks(one)
    assert name.startswith("2 machines have the host name gpu17, ")
    assert crossing.startswith("tp crosses nodes in 1 group, ")


def test_a_tensor_axis_across_nodes_is_a_remark_with_what_it_costs() -> None:
    run = tiny_run(TEXT, tp=4)
    slow = linked("tp", *[(0, 1, 2, 3)] * 4, speeds=(2e6, 1e6, 2e6, 2e6), run=run)
    (remark,) = make_remarks(slow)
    assert "tp crosses nodes in 1 group, such as ranks [0, 1, 2, 3]" in remark
    assert "at the measured 1.00 MB/s" in remark and "divides the 2 ranks of a node" in remark
    within = linked("tp", (0, 1), (0, 1), (2, 3), (2, 3), speeds=[1e6] * 4, run=run)
    assert list(make_remarks(within)) == []


def test_a_group_much_slower_than_most_is_a_remark() -> None:
    (remark,) = make_remarks(linked("dp", (0,), (1,), (2,), (3,), speeds=(1e9, 1e9, 1e9, 1e8)))
    assert "the dp group of ranks [3] is slow: 100.00 MB/s" in remark
