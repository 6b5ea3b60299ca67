"""What the doctor concludes from the records of ranks, including those of GPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaspeed.doctor.diagnosis import (
    Findings,
    Link,
    LinkReport,
    find_problems,
    make_remarks,
    nvlinks,
)
from megaspeed.doctor.record import Record
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
    """Of four ranks on two machines; `changed` replace the records of the last ones."""
    records: list[Record | None] = [record(0), record(1), record(2, "gpu18"), record(3, "gpu18")]
    records[4 - len(changed) :] = changed
    return Findings(records=records, waited_seconds=60.0, **others)


def test_equal_ranks_have_no_problem() -> None:
    assert find_problems(findings()) == []
    assert list(make_remarks(findings())) == []


LAST = record(3, "gpu18")


@pytest.mark.parametrize(
    ("changed", "check", "text"),
    [
        (
            replace(LAST, versions={"torch": "2.11.0", "NCCL": "2.27.3"}),
            "versions",
            "torch is 2.11.0",
        ),
        (replace(LAST, versions={"torch": "2.13.0"}), "versions", "NCCL is missing, but 2.27.3"),
        (replace(LAST, settings={"gradient_clipping": "0.5"}), "configuration", "clipping is 0.5"),
        (replace(LAST, data={"training text": "cc", "tokenizer": "bb"}), "data", "text is cc"),
        (replace(LAST, wrong_input="1 problem"), "configuration", "1 problem"),
        (replace(LAST, too_slow=("nvidia-smi",)), "time limit", "nvidia-smi did not end in time"),
        (replace(LAST, open_files=(9000, 4096)), "open files", "may open 4,096"),
        (replace(LAST, shared_memory_bytes=2**26), "shared memory", "0.06 GiB free in /dev/shm"),
        (replace(LAST, device="cpu"), "device", "runs on cpu"),
        (replace(LAST, device="cpu", unusable_gpu="torch finds no GPU"), "device", "finds no GPU"),
        (replace(LAST, world_size=8), "ranks", "has world size 8, but rank 0 has 4"),
    ],
)
def test_a_rank_that_differs_is_one_line(changed: Record, check: str, text: str) -> None:
    (problem,) = find_problems(findings(changed))
    assert (problem.rank, problem.host, problem.check) == (3, "gpu18", check)
    assert text in problem.text


def test_a_rank_0_that_differs_is_the_one_that_is_named() -> None:
    odd = replace(record(0), versions={"torch": "2.11.0"})
    one = findings(odd, record(1), record(2, "gpu18"), LAST)
    assert [problem.rank for problem in find_problems(one)] == [0]


def test_a_rank_that_did_not_answer_is_named() -> None:
    (problem,) = find_problems(findings(None))
    assert problem.rank == 3 and "did not answer within 60 s" in problem.text


def test_clocks_folders_ports_and_links_are_judged() -> None:
    one = findings(
        clocks={2: 7.25},
        folder={2: "No such file"},
        ports={0: "cannot connect"},
        links=[LinkReport(), LinkReport(), LinkReport(problem="was stuck"), None],
    )
    found = [(problem.rank, problem.check) for problem in find_problems(one)]
    assert found == [
        (2, "clock"),
        (2, "run folder"),
        (0, "ports"),
        (2, "process groups"),
        (3, "process groups"),
    ]
    assert "7.2 s ahead of that of rank 0" in find_problems(one)[0].text


def test_nvlinks_are_counted_in_what_nvidia_smi_prints() -> None:
    assert nvlinks(LINKED) == (3, 3)
    assert nvlinks(OVER_PCIE) == (3, 2)
    assert nvlinks("unknown") == (0, 0)


def test_gpus_without_nvlink_and_unequal_gpus_are_remarks() -> None:
    other = replace(record(2, "gpu18"), gpu_links=OVER_PCIE, device="NVIDIA A100-SXM4-80GB")
    without, unequal = make_remarks(findings(other, LAST))
    assert without.startswith("gpu18: 1 of 3 pairs of GPUs have no NVLink")
    assert "A100" in unequal and "H100" in unequal


def test_two_machines_with_one_host_name_are_two_nodes() -> None:
    """They used to count as one node, so tp across them was not remarked."""
    one = findings(*(replace(record(rank), boot=f"{rank // 2}" * 36) for rank in range(4)))
    assert one.nodes == {"gpu17/00000000": [0, 1], "gpu17/11111111": [2, 3]}
    one = replace(one, links=[link("tp", (0, 1, 2, 3), 1e6)] * 4, run=tiny_run(TEXT, tp=4))
    name, crossing = make_remarks(one)
    assert name.startswith("2 machines have the host name gpu17, ")
    assert crossing.startswith("tp crosses nodes in 1 group, ")
    (problem,) = find_problems(replace(one, clocks={2: 9.0}))
    assert problem.host == "gpu17/11111111"


def link(axis: str, ranks: tuple[int, ...], bytes_per_second: float) -> LinkReport:
    measured = Link(axis=axis, ranks=ranks, latency_seconds=1e-5, bytes_per_second=bytes_per_second)
    return LinkReport(links=[measured])


def test_a_tensor_axis_across_nodes_is_a_remark_with_what_it_costs() -> None:
    slow = [link("tp", (0, 1, 2, 3), speed) for speed in (2e6, 1e6, 2e6, 2e6)]
    run = tiny_run(TEXT, tp=4)
    (remark,) = make_remarks(findings(links=slow, run=run))
    assert "tp crosses nodes in 1 group, such as ranks [0, 1, 2, 3]" in remark
    assert "at the measured 1.00 MB/s" in remark and "divides the 2 ranks of a node" in remark
    within_nodes = [link("tp", (0, 1), 1e6)] * 2 + [link("tp", (2, 3), 1e6)] * 2
    assert list(make_remarks(findings(links=within_nodes, run=run))) == []


def test_a_group_much_slower_than_most_is_a_remark() -> None:
    links = [link("dp", (rank,), 1e9) for rank in range(3)] + [link("dp", (3,), 1e8)]
    (remark,) = make_remarks(findings(links=links))
    assert "the dp group of ranks [3] is slow: 100.00 MB/s" in remark
