"""The factor of a real run: which steps count, and which folders are refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from megaspeed.config.resolve import Run
from megaspeed.planning import calibration
from megaspeed.planning.calibration import Calibration, CalibrationError, calibrate
from megaspeed.planning.costs.step_time import predict_step_time
from megaspeed.planning.costs.workload import Cluster, HostTime, Measured, workload_of
from megaspeed.topology.devices import Device, device_named
from megaspeed.training import run_folder
from megaspeed.training.metrics import MetricsFile, StepMetrics, ValidationMetrics
from tests.planning.tiny_runs import tiny

A100 = Cluster(device=device_named("a100-80gb"), network_bandwidth=25.0)
CPU = Cluster(
    device=Device(
        name="cpu", memory_bytes=1 << 34, peak_fp32=0.1, memory_bandwidth=10, processors=1
    ),
    network_bandwidth=0.0,
    measured=Measured(
        pointwise=3.0,
        attention=(1e10, 1e10),
        optimizer=1e-9,
        messages={},
        host=HostTime(block=1e-3, micro_batch=1e-3, step=1e-3),
    ),
)


def trained(*overrides: str) -> Run:
    return tiny("training.steps=100", "bf16.enabled=true", *overrides).run


def write_run(
    folder: Path, run: Run, seconds: dict[int, float], *, peak: float | None = 311.8
) -> Path:
    """Write the folder of a run whose steps took these seconds, on a GPU with this peak, in
    TFLOP/s.
    """
    folder.mkdir(exist_ok=True)
    (folder / run_folder.CONFIG).write_text(json.dumps(run.as_json()))
    with MetricsFile(folder / run_folder.METRICS) as file:
        for step, each in seconds.items():
            file.write(
                StepMetrics(
                    step=step,
                    loss=1.0,
                    grad_norm=1.0,
                    learning_rate=1e-3,
                    tokens=step,
                    step_time_seconds=each,
                    tokens_per_second=1 / each,
                    tflops_per_rank=0.5 / each,
                    mfu=None if peak is None else 0.5 / each / peak,
                    peak_memory_bytes=[1],
                    skipped=False,
                )
            )
            file.write(ValidationMetrics.of(step, 1.0))
    return folder


def starts(folder: Path, *steps: int, **facts: str) -> None:
    facts |= {"time": ""}
    lines = [json.dumps({"step": step, "pp": 1, "dp": 1, "tp": 1, **facts}) for step in steps]
    (folder / run_folder.STARTS).write_text("\n".join(lines) + "\n")


def refused(folder: Path, cluster: Cluster = A100) -> str:
    with pytest.raises(CalibrationError) as caught:
        calibrate(folder, cluster)
    (text,) = caught.value.problems
    assert "\n" not in text
    return text


def steady(steps: int, seconds: float = 1.0) -> dict[int, float]:
    return dict.fromkeys(range(1, steps + 1), seconds)


def test_the_files_are_those_that_a_run_writes() -> None:
    names = (calibration.CONFIG, calibration.METRICS, calibration.STARTS)
    assert names == (run_folder.CONFIG, run_folder.METRICS, run_folder.STARTS)


def test_the_factor_is_the_median_step_over_the_prediction(tmp_path: Path) -> None:
    run = trained()
    seconds = {step: 1.0 + step % 3 / 10 for step in range(1, 36)}
    found = calibrate(write_run(tmp_path, run, seconds), A100)
    predicted = predict_step_time(workload_of(run), A100)
    assert found.measured_seconds == pytest.approx(1.1)
    assert found.factor == pytest.approx(1.1 / predicted.total)
    assert (found.low, found.high) == pytest.approx((1.0 / predicted.total, 1.2 / predicted.total))
    assert found.steps == 35 - calibration.WARM_UP_STEPS
    assert predicted.scaled(found.factor).total == pytest.approx(1.1)
    assert f"{found.steps} steps" in str(found)
    assert json.loads(json.dumps(found.as_json()))["factor"] == found.factor


def factor_of_slow(folder: Path, run: Run, slow: set[int], steps: int = 40) -> Calibration:
    """Return the factor if steps take 1 s and those in ``slow`` take 100 s. If these count, the
    quartiles show it.
    """
    seconds = {step: 100.0 if step in slow else 1.0 for step in range(1, steps + 1)}
    return calibrate(write_run(folder, run, seconds), A100)


@pytest.mark.parametrize(
    ("overrides", "slow"),
    [
        ((), {1, 2, 3, 4, 5}),
        (("training.save_interval=4",), {4 * k + rest for k in range(1, 10) for rest in (0, 1)}),
        (("training.eval_interval=4",), {4 * k + rest for k in range(1, 10) for rest in (0, 1)}),
        (
            ('training.profile={"start_step": 10, "steps": 12}',),
            set(range(10, 23)),
        ),
    ],
)
def test_steps_with_other_work_do_not_count(
    tmp_path: Path, overrides: tuple[str, ...], slow: set[int]
) -> None:
    found = factor_of_slow(tmp_path, trained(*overrides), slow)
    assert found.measured_seconds == 1.0
    assert found.low == found.high == found.factor, "none of them is a slow step"


def test_only_steps_since_the_last_start_count(tmp_path: Path) -> None:
    run = trained()
    seconds = {step: 9.0 if step <= 25 else 1.0 for step in range(1, 41)}
    folder = write_run(tmp_path, run, seconds)
    starts(folder, 0, 20)
    found = calibrate(folder, A100)
    assert (found.measured_seconds, found.steps) == (1.0, 15)
    starts(folder, 0, 20, 30)
    assert "5 steps to measure since its last start, after step 30" in refused(folder)


def test_a_cpu_run_is_predicted_on_the_measured_machine(tmp_path: Path) -> None:
    run = tiny("training.steps=100").run
    found = calibrate(write_run(tmp_path, run, steady(30), peak=None), CPU)
    assert found.predicted_seconds == predict_step_time(workload_of(run, "cpu"), CPU).total


def test_damaged_lines_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, trained(), steady(30))
    with (folder / run_folder.METRICS).open("a") as file:
        file.write('[1]\n{"step": 31, "step_time_seconds": null}\n{"step": "x"}\n{"step": 32, "st')
    assert calibrate(folder, A100).steps == 25


def test_a_folder_without_a_usable_run_is_refused(tmp_path: Path) -> None:
    run = trained()
    assert "cannot be read" in refused(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json cannot be read: No such file" in refused(empty)
    (empty / run_folder.CONFIG).write_text(json.dumps(run.as_json()))
    assert "metrics.jsonl cannot be read: No such file" in refused(empty)
    assert f"has 5 steps to measure, but a calibration needs {calibration.FEWEST_STEPS}" in refused(
        write_run(tmp_path / "short", run, steady(10))
    )
    folder = write_run(tmp_path / "run", run, steady(30))
    (folder / run_folder.CONFIG).write_text('{"model": {}}')
    assert "config.json is not valid here" in refused(folder)
    (folder / run_folder.CONFIG).write_text("{")
    assert "is not JSON" in refused(folder)
    stated = run.as_json()
    stated["parallel"]["data"] = "auto"
    (folder / run_folder.CONFIG).write_text(json.dumps(stated))
    file = folder / run_folder.CONFIG
    assert refused(folder).startswith(f"{file} does not state parallel.data, so no run has")


@pytest.mark.parametrize(
    ("recorded", "cluster", "is_same"),
    [
        ("cpu", CPU, True),
        ("cpu", A100, False),
        ("NVIDIA A100-SXM4-40GB", A100, True),  # the same kind with less memory
        ("NVIDIA A100-SXM4-80GB", CPU, False),
        ("NVIDIA H200", dataclasses.replace(A100, device=device_named("h100-80gb")), False),
        ("NVIDIA H100 PCIe", dataclasses.replace(A100, device=device_named("h100-80gb")), False),
        ("A device of next year", A100, False),
    ],
)
def test_the_recorded_device_must_be_that_of_the_plan(
    recorded: str, cluster: Cluster, is_same: bool, tmp_path: Path
) -> None:
    """In fp32 the metrics have no MFU, so only the record shows the device."""
    run = tiny("training.steps=100").run
    folder = write_run(tmp_path, run, steady(30), peak=None)
    starts(folder, 0, device=recorded)
    if is_same:
        assert calibrate(folder, cluster).device == recorded
    else:
        why = f"trained on {recorded}, but the plan is for {cluster.device.name}; name a run on"
        assert why in refused(folder, cluster)


def test_what_may_be_wrong_with_a_factor_is_stated(tmp_path: Path) -> None:
    run = trained()
    predicted = predict_step_time(workload_of(run), A100).total
    folder = write_run(tmp_path, run, steady(30, 1.2 * predicted))
    (unknown,) = calibrate(folder, A100).warnings
    assert "does not state the device, because a version before 0.3" in unknown
    starts(folder, 0, device="NVIDIA A100-SXM4-80GB")
    assert not list(calibrate(folder, A100).warnings)
    found = calibrate(write_run(folder, run, steady(30, 9 * predicted)), A100)
    assert found.factor == pytest.approx(9)
    (implausible,) = found.warnings
    assert "a factor of 9 is not plausible" in implausible and "0.5 and 2" in implausible
    assert found.as_json()["warnings"] == [implausible]
