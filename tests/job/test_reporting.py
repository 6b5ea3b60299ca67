"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl, and do not slow training."""

import json
import math
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megaspeed.config.resolve import Run
from megaspeed.job import pretrain, reporting
from megaspeed.job.reporting import Reporting, Service, ServiceRecords
from megaspeed.training.metrics import SampleMetrics, ValidationMetrics
from tests.support.machine import limit
from tests.support.tiny import tiny_run
from tests.training.metrics_of_steps import step_metrics

TEXT = Path(__file__).parents[2] / "LICENSE"


def reporting_run(folder: Path, *services: str) -> Run:
    training = {"steps": 10, "run_dir": str(folder), "report_to": list(services)}
    return tiny_run(TEXT, training=training)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars as TensorBoard reads them: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_every_number_of_every_step(tmp_path: Path) -> None:
    run, warnings = reporting_run(tmp_path, "tensorboard"), list[str]()
    with Reporting(run, 0, warnings.append) as report:
        report.write(step_metrics(step=1, loss=math.nan, skipped=True))
        report.write(step_metrics(step=2, loss=2.5))
        report.write(ValidationMetrics.of(2, 3.0))
    assert warnings == []
    read = scalars(tmp_path / "tensorboard")
    assert read["loss"] == [(2, 2.5)]
    assert read["skipped"] == [(1, 1.0), (2, 0.0)]
    assert read["peak_memory_bytes/1"] == [(1, 3 * 2**20), (2, 3 * 2**20)]
    assert read["validation_loss"] == [(2, 3.0)]
    assert "mfu" not in read and "step" not in read


def test_both_services_show_each_sample_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B is not the real one, which sometimes loses the rows of a run of less than a second."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = MagicMock()
    logged.__enter__.return_value = logged
    wandb = SimpleNamespace(init=lambda **_: logged, Html=lambda text: [text], Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = reporting_run(tmp_path, "tensorboard", "wandb")
    with Reporting(run, 0, pytest.fail) as report:
        report.write(SampleMetrics(step=2, samples=[("a <", "b> *c*"), ("", "d")]))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("samples/0/text_summary")
    assert text.step == 2
    assert text.tensor_proto.string_val[0].decode() == "<pre>a &lt;b&gt; *c*</pre>"
    (row,) = logged.log.call_args.args
    page = ["<pre>a &lt;b&gt; *c*</pre>"]
    assert row == {"step": 2, "samples/0": page, "samples/1": ["<pre>d</pre>"]}


def test_tensorboard_forgets_the_steps_that_a_resumed_run_takes_again(tmp_path: Path) -> None:
    run = reporting_run(tmp_path, "tensorboard")
    for begin, loss in ((0, 3.0), (2, 2.0)):
        with Reporting(run, begin, pytest.fail) as report:
            for step in range(begin + 1, 5):
                report.write(step_metrics(step=step, loss=loss))
        # File names contain the second, and files are read in the order of their names.
        time.sleep(1.1)
    assert scalars(tmp_path / "tensorboard")["loss"] == [(1, 3.0), (2, 3.0), (3, 2.0), (4, 2.0)]


def test_wandb_keeps_one_run_over_a_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = reporting_run(tmp_path, "wandb")
    for begin in (0, 2):
        with Reporting(run, begin, pytest.fail) as report:
            for step in (1, 2):
                report.write(step_metrics(step=begin + step, loss=2.5))
        time.sleep(1.1)  # folder names contain the second
    logs = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {log.stem for log in logs} == {f"run-{(tmp_path / 'wandb' / 'run_id').read_text()}"}
    steps = [row["step"] for log in logs for row in rows(log)]
    assert steps == [1, 2, 3, 4]
    assert {row["loss"] for log in logs for row in rows(log)} == {2.5}
    assert capfd.readouterr() == ("", ""), "the service prints nothing"


def rows(log: Path) -> list[dict[str, Any]]:
    """Return the rows of one of W&B's files: LevelDB's log format, one block after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, found, at = log.read_bytes(), [], 7
    assert len(data) < 2**15
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a complete record"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.HasField("history"):
            items = record.history.item
            found.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return found


def test_a_missing_package_ends_the_job_with_2_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    run = reporting_run(tmp_path / "run", "tensorboard", "wandb")
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(run.as_json()))
    assert pretrain.main(["--config", str(config)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and not (tmp_path / "run").exists()
    assert "names 'wandb', but the Python package wandb is not installed" in printed.err
    assert "pip install wandb" in printed.err and "tensorboard" not in printed.err


def collecting(steps: list[int], failing_step: int | None = None) -> Service:
    """A service that keeps the steps. Its network fails at ``failing_step``."""

    def send(run: Run, begin: int, rows: ServiceRecords) -> None:
        for step, _ in rows:
            if step == failing_step:
                raise ConnectionError("no route to host")
            steps.append(step)
        steps.append(-1)

    return send


def test_a_service_that_fails_is_dropped_with_one_warning_and_the_other_continues(
    tmp_path: Path,
) -> None:
    failing, well, warnings = list[int](), list[int](), list[str]()
    run = reporting_run(tmp_path, "tensorboard", "wandb")
    services: dict[Any, Service] = {
        "tensorboard": collecting(failing, failing_step=2),
        "wandb": collecting(well),
    }
    with Reporting(run, 0, warnings.append, services) as report:
        for step in range(1, 6):
            report.write(step_metrics(step=step))
    assert failing == [1] and well == [1, 2, 3, 4, 5, -1]
    (warning,) = warnings
    assert warning.startswith("tensorboard receives no more records of this run; ")
    assert warning.endswith("ConnectionError: no route to host")


def test_a_service_that_hangs_costs_a_step_nothing_and_the_end_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "CLOSING_SECONDS", 0.5)
    monkeypatch.setattr(reporting, "_WAITING_RECORDS", 100)
    for_ever, warnings = threading.Event(), list[str]()

    def hang(run: Run, begin: int, rows: ServiceRecords) -> None:
        for_ever.wait()

    run = reporting_run(tmp_path, "wandb")
    start = time.monotonic()
    with Reporting(run, 0, warnings.append, {"wandb": hang}) as report:
        for step in range(1, 1001):
            report.write(step_metrics(step=step))
        assert time.monotonic() - start < limit(0.5)
    assert 0.5 <= time.monotonic() - start < limit(5)
    assert warnings == ["wandb was too slow for all records; metrics.jsonl has all"]
    for_ever.set()
