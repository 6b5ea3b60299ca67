"""metrics.jsonl: one JSON object a line, always the same keys, only numbers of JSON."""

import errno
import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.metrics import (
    MetricsFile,
    MixtureMetrics,
    StepMetrics,
    ValidationMetrics,
    records_up_to,
)
from tests.support.rank_pool import RankPool
from tests.training.metrics_of_steps import STEP_KEYS, VALIDATION_KEYS, step_metrics


def written(folder: Path, *metrics: StepMetrics | ValidationMetrics) -> list[dict[str, Any]]:
    with MetricsFile(folder / "metrics.jsonl") as file:
        for record in metrics:
            file.write(record)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_a_step_has_the_keys_of_every_step(tmp_path: Path) -> None:
    (record,) = written(tmp_path, step_metrics())
    assert list(record) == STEP_KEYS


def test_a_step_with_experts_has_two_keys_more(tmp_path: Path) -> None:
    metrics = MixtureMetrics(**vars(step_metrics()), auxiliary_loss=4.5, load_factors=[1.25, 2.0])
    (record,) = written(tmp_path, metrics)
    assert list(record) == [*STEP_KEYS, "auxiliary_loss", "load_factors"]


def test_an_evaluation_has_the_keys_of_every_evaluation(tmp_path: Path) -> None:
    (record,) = written(tmp_path, ValidationMetrics.of(7, math.log(2.0)))
    assert list(record) == VALIDATION_KEYS
    assert record["validation_perplexity"] == pytest.approx(2.0)


def test_numbers_are_written_in_full_precision(tmp_path: Path) -> None:
    (record,) = written(tmp_path, step_metrics(loss=math.pi))
    assert record["loss"] == math.pi


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(tmp_path: Path, value: float) -> None:
    (record,) = written(tmp_path, step_metrics(loss=value, grad_norm=value, skipped=True))
    assert list(record) == STEP_KEYS
    assert record["loss"] is None and record["grad_norm"] is None
    assert record["skipped"] is True and record["step"] == 7


def test_a_perplexity_beyond_floats_is_written_as_null(tmp_path: Path) -> None:
    (record,) = written(tmp_path, ValidationMetrics.of(1, 5000.0))
    assert record == {"step": 1, "validation_loss": 5000.0, "validation_perplexity": None}


def test_a_step_can_be_read_before_the_run_is_over(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(step_metrics(step=1))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_what_the_file_holds_already_stays(tmp_path: Path) -> None:
    written(tmp_path, step_metrics(step=1))
    records = written(tmp_path, step_metrics(step=2))
    assert [record["step"] for record in records] == [1, 2]


def steps_on_a_disk_that_is_full_for_a_while(launch: LaunchEnvironment, file: Path) -> list[int]:
    """Write steps 1 to 4, of which 2 and 3 find a full disk. Return the steps in the file."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(file) as metrics:
        metrics.write(step_metrics(step=1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, most))
        metrics.write(step_metrics(step=2))
        metrics.write(step_metrics(step=3))
        assert len(file.read_text().splitlines()[1]) == 10, "the bytes for which there was room"
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        metrics.write(step_metrics(step=4))
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_a_full_disk_does_not_end_the_run_and_loses_no_record(
    pool: RankPool, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    assert pool.run(1, steps_on_a_disk_that_is_full_for_a_while, file) == [[1, 2, 3, 4]]


def test_records_that_never_found_room_are_reported_at_the_end() -> None:
    with pytest.raises(OSError) as caught, MetricsFile(Path("/dev/full")) as file:
        file.write(step_metrics(step=1))
        file.write(step_metrics(step=2))
    assert caught.value.errno == errno.ENOSPC


LINES = [b'{"step": 1, "loss": 4.5}', b'{"step": 2, "loss": null}', b'{"step": 2, "validation": 3}']


def joined(*lines: bytes) -> bytes:
    return b"".join(line + b"\n" for line in lines)


@pytest.mark.parametrize(
    ("step", "kept"), [(0, 0), (1, 1), (2, 3), (3, 3)], ids=lambda value: str(value)
)
def test_records_of_later_steps_are_cut(step: int, kept: int) -> None:
    assert records_up_to(step, joined(*LINES)) == joined(*LINES[:kept])


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "lo', b"{", b"\0\0\0", b"[1]", b'{"st": 1}', b'{"step": "1"}', b"\xff"]
)
def test_a_line_that_is_no_record_is_cut(torn: bytes) -> None:
    assert records_up_to(2, joined(*LINES) + torn) == joined(*LINES)


def test_a_last_record_that_lacks_only_its_end_of_line_is_kept() -> None:
    assert records_up_to(2, joined(*LINES)[:-1]) == joined(*LINES)
