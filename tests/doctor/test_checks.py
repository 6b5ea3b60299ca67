"""The conclusions of the checks from the records of ranks, including those of GPUs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspeed.doctor.checks import Findings, make_checks, make_remarks
from megaspeed.doctor.record import Link, Record
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


def record(rank: int, host: str = "gpu17") -> Record:
    return Record(
        rank=rank,
        world_size=4,
        host=host,
        versions={"torch": "2.13.0", "NCCL": "2.27.3"},
        configuration={"gradient_clipping": "1.0"},
        data={"training text": "aa", "tokenizer": "bb"},
        degrees=(2, 1, 2),
        device="NVIDIA H100 80GB HBM3",
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
        ({"configuration": {"gradient_clipping": "0.5"}}, "configuration", "clipping is 0.5"),
        ({"data": {"training text": "cc", "tokenizer": "bb"}}, "data", "text is cc"),
        ({"problems": {"shared memory": "has 0.06 GiB"}}, "shared memory", "0.06 GiB"),
        ({"device": "cpu"}, "device", "runs on cpu"),
        ({"device": "cpu", "problems": {"device": "finds no GPU"}}, "device", "finds no GPU"),
        ({"world_size": 8}, "ranks", "has world size 8, but rank 0 has 4"),
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


def test_unequal_gpus_are_a_remark() -> None:
    other = replace(record(2, "gpu18"), device="NVIDIA A100-SXM4-80GB")
    (unequal,) = make_remarks(findings(other, record(3, "gpu18")))
    assert "A100" in unequal and "H100" in unequal


def test_bf16_on_a_cpu_without_its_instructions_is_a_remark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    run = tiny_run(TEXT, dp=2, tp=2, bf16={"enabled": True})
    records = [replace(each, device="cpu") for each in findings().answered]
    (remark,) = make_remarks(findings(*records, run=run))
    assert list(make_remarks(findings(run=run))) == [], "on GPUs"
    assert "times as long as in fp32 on this CPU (measured" in remark


def linked(axis: str, *groups: tuple[int, ...], speeds: Sequence[float], **others: Any) -> Findings:
    """Return findings of four ranks, each with one group of this axis."""
    records = [
        replace(each, links=[Link(axis, group, 1e-5, speed)])
        for each, group, speed in zip(findings().answered, groups, speeds, strict=True)
    ]
    return findings(*records, **others)


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
