"""Which rows a comparison has."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.run import PowerSgdCompression
from megaspeed.data_axis.buckets import reduction_of_matrices
from megaspeed.measurement.compare import baseline_rows, zero_rows
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[3] / "LICENSE"


CHUNKS = {
    "model": {"num_hidden_layers": 4},
    "parallel": {"virtual_stages": 2, "gradient_reduction": "per_visit"},
}


def run(**changes: Any) -> Run:
    """Return a run of 24 samples a step, in 4 micro-batches unless ``changes`` state otherwise."""
    return tiny_run(TEXT, **changes)


@pytest.mark.parametrize(
    ("changes", "stages", "labels"),
    [
        ({"dp": 2}, (0, 1, 2), ["ZeRO-0", "ZeRO-1", "ZeRO-2 per_micro_batch", "ZeRO-2 per_step"]),
        ({"dp": 2}, (3,), ["ZeRO-3 per_micro_batch", "ZeRO-3 per_step"]),
        ({"dp": 2, "gradient_accumulation_steps": 1}, (2, 3), ["ZeRO-2", "ZeRO-3"]),
        ({"pp": 2}, (2, 3), ["ZeRO-2", "ZeRO-3"]),
        ({}, (1, 0, 1), ["ZeRO-0", "ZeRO-1"]),
        (
            {"dp": 2, "pp": 2, **CHUNKS},
            (1, 3),
            ["ZeRO-1", "ZeRO-3 per_micro_batch", "ZeRO-3 per_visit", "ZeRO-3 per_step"],
        ),
    ],
)
def test_stages_2_and_3_have_several_rows_if_the_time_of_reduction_makes_a_difference(
    changes: dict[str, Any], stages: tuple[int, ...], labels: list[str]
) -> None:
    """The time makes no difference with one micro-batch or one data rank. Rows are in order and
    unique.
    """
    assert [row.label for row in zero_rows(run(**changes), stages, "cpu")] == labels


def test_a_row_differs_from_the_run_in_stage_and_reduction_alone() -> None:
    asked = run(pp=2, dp=2, parallel={"schedule": "gpipe"}, zero_optimization={"stage": 1})
    for row, stage, reduction in zip(
        zero_rows(asked, [1, 3], "cpu"),
        (1, 3, 3),
        ("per_step", "per_micro_batch", "per_step"),
        strict=True,
    ):
        assert (row.run.zero_stage, row.run.gradient_reduction) == (stage, reduction)
        assert row.run.grid == asked.grid and row.run.batch == asked.batch
        before, after = asked.as_json(), row.run.as_json()
        for json in (before, after):
            del json["zero_optimization"]["stage"], json["parallel"]["gradient_reduction"]
        assert after == before


def test_rows_have_the_replicas_of_the_run_except_where_all_ranks_are_replicas() -> None:
    hybrid = run(
        dp=4,
        parallel={"replicate": 2},
        gradient_accumulation_steps=2,
        zero_optimization={"stage": 3},
    )
    rows = [*zero_rows(hybrid, [0, 1], "cpu"), *baseline_rows(hybrid, ["ddp", "fsdp"], "cpu")]
    assert [(row.label.partition(" ")[0], row.run.grid.replicate) for row in rows] == [
        ("ZeRO-0", 4),
        ("ZeRO-1", 2),
        ("DDP", 1),
        ("FSDP2", 2),
        ("FSDP2", 2),
    ]


def test_zero_0_has_a_row_if_replicas_compress_beside_the_backward() -> None:
    compressing = run(
        dp=4,
        parallel={"replicate": 2, "gradient_compression": {"type": "int8"}},
        gradient_accumulation_steps=2,
        zero_optimization={"stage": 2, "overlap_comm": True},
    )
    rows = zero_rows(compressing, [0, 2], "cpu")
    reductions = [reduction_of_matrices(row.run, "cpu", row.run.grid.copies) for row in rows]
    assert [reduction.overlaps for reduction in reductions] == [False, True]


def test_compressed_gradients_are_reduced_once_a_step_from_the_first_step() -> None:
    how = {"type": "powersgd", "start_step": 20}
    rows = zero_rows(run(dp=2, parallel={"gradient_compression": how}), [0, 3], "cpu")
    assert [row.label for row in rows] == ["ZeRO-0", "ZeRO-3"]
    for row in rows:
        assert isinstance(row.run.compression, PowerSgdCompression)
        assert row.run.gradient_reduction == "per_step" and row.run.compression.start_step == 1


def test_a_stage_offloads_only_what_it_partitions() -> None:
    offloaded = run(dp=2, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    rows = zero_rows(offloaded, [0, 1], "cpu")
    assert [row.run.config.zero_optimization.offloads_optimizer for row in rows] == [False, True]


def test_baselines_reduce_as_their_memory_allows() -> None:
    rows = baseline_rows(run(dp=2), ["fsdp", "ddp"], "cpu")
    labels = ["DDP", "FSDP2 per_micro_batch", "FSDP2 per_step"]
    assert [row.label for row in rows] == labels
    reductions = [v.run.gradient_reduction for v in rows]
    assert reductions == ["per_step", "per_micro_batch", "per_step"]


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}])
def test_baselines_have_only_the_data_axis(degrees: dict[str, int]) -> None:
    pp, tp = degrees.get("pp", 1), degrees.get("tp", 1)
    law = f"parallel.pipeline is {pp} and parallel.tensor is {tp}; set both to 1"
    with pytest.raises(ConfigError, match=law):
        baseline_rows(run(dp=2, **degrees), ["ddp"], "cpu")
    assert baseline_rows(run(dp=2, **degrees), [], "cpu") == []
