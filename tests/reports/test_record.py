"""A run folder can be read in any state in which a run left it."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megaspeed.checkpoint.folders import METRICS
from megaspeed.job.run_folder import continue_run_folder
from megaspeed.reports.run_record import RunFolderError, read_run
from megaspeed.training.metrics import MetricsFile
from tests.reports.written_runs import TEXT, loss_at, written_run
from tests.support.tiny import tiny_run
from tests.training.metrics_of_steps import step_metrics


def test_a_finished_run_is_read_completely(tmp_path: Path) -> None:
    run = read_run(written_run(tmp_path / "run", resumed_at=30))
    assert run.steps.tolist() == list(range(1, 61))
    assert run.curves["loss"].values[-1] == loss_at(60)
    assert run.curves["peak_memory_bytes/1"].values[-1] == 3 * 2**20
    assert run.curves["validation_loss"].steps.tolist() == [20, 40, 60]
    assert [(start["step"], start["pp"], start["tp"]) for start in run.starts] == [
        (0, 2, 1),
        (30, 2, 1),
    ]
    assert (run.last_step, run.settings["training.steps"], run.notes) == (60, 60, [])


def test_only_peaks_with_the_last_pipeline_degree_are_kept(tmp_path: Path) -> None:
    """The report of an earlier version showed the peak of a stage that no longer existed."""
    folder = written_run(tmp_path / "run", steps=5)
    continue_run_folder(tiny_run(TEXT, pp=1, dp=2, training={"run_dir": str(folder)}), 3, "cpu")
    with MetricsFile(folder / METRICS) as file:
        for step in (4, 5):
            file.write(step_metrics(step=step, peak_memory_bytes=[7 * 2**20]))
    run = read_run(folder)
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.names_of("peak_memory_bytes") == ["peak_memory_bytes/0"]
    peaks = run.curves["peak_memory_bytes/0"]
    assert (peaks.steps.tolist(), peaks.values.tolist()) == ([4, 5], [7 * 2**20] * 2)


def test_half_a_line_of_a_running_run_is_skipped(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=7)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    run = read_run(folder)
    assert run.last_step == 7
    assert run.notes == ["1 of the lines of metrics.jsonl are not records and were skipped"]


BROKEN_LINES = (
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'"step"',
    b'{"step": "9", "loss": 1.0}',
    b'{"step": -3, "loss": 1.0}',
    b'{"loss": 1.0}',
    b"",
)


def test_other_lines_are_read_despite_broken_ones(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=3)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([lines[0], *BROKEN_LINES, *lines[1:]]))
    assert read_run(folder).steps.tolist() == [1, 2, 3]


def test_samples_are_no_numbers_of_a_step(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=20)
    before = read_run(folder).curves
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "samples": {"You": " may"}}\n')
    after = read_run(folder).curves
    assert after["loss"].values.tolist() == before["loss"].values.tolist()
    assert after["validation_loss"].values.tolist() == before["validation_loss"].values.tolist()


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 9.0}\n')
    run = read_run(folder)
    assert run.steps.tolist() == [1, 2] and run.curves["loss"].values[0] == 9.0


def test_a_step_takes_less_than_half_a_kilobyte_of_memory(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=3000)
    read_run(folder)  # modules that are loaded only once do not count
    tracemalloc.start()
    try:
        run = read_run(folder)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(run.steps) == 3000
    assert held / 3000 < 500


def test_values_of_the_wrong_kind_are_not_numbers(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=1)
    strange: dict[str, object] = {"step": 2, "loss": "<b>", "grad_norm": [1], "tokens": 10**400}
    strange |= {"mfu": {}, "peak_memory_bytes": [1, "x", None], "skipped": 1e300}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n" + '{"step": 3, "loss": NaN}\n')
    curves = read_run(folder).curves
    later = {name: curve.values[curve.steps > 1] for name, curve in curves.items()}
    assert {name for name in later if np.isfinite(later[name]).any()} == {"peak_memory_bytes/0"}


def test_a_run_whose_configuration_is_broken_keeps_its_steps(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=2)
    (folder / "config.json").write_text('{"training": ')
    run = read_run(folder)
    assert run.last_step == 2 and run.settings == {}
    assert run.notes[0].startswith("no configuration: ")
    (folder / "config.json").unlink()
    assert "No such file" in read_run(folder).notes[0]


def test_a_run_before_its_first_step_has_none(tmp_path: Path) -> None:
    folder = written_run(tmp_path / "run", steps=0)
    assert read_run(folder).last_step == 0


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="nothing is not a folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)
