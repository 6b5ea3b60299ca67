"""The check for GPUs runs to its end here, with tiny shapes on real processes."""

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaspeed.topology.grid import Grid
from tests.support.forked import Forked
from tests.support.machine import limit

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclasses need the module here
    spec.loader.exec_module(module)
    return module


gpu_check = load_script()


def h100(gpus: int = 1, gibibytes: float = 81559 / 1024) -> Any:
    """Return what the script would find on a machine with this many GPUs."""
    memory = int(gibibytes * 2**30)
    names = ("NVIDIA H100 80GB HBM3",) * gpus
    return gpu_check.Machine(gpus=names, memory_bytes=memory)


def options(out: Path, *, full: bool = False, tiny: bool = False) -> argparse.Namespace:
    return argparse.Namespace(out=out, full=full, tiny=tiny)


@pytest.mark.timeout(900)
def test_the_report_of_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is one test, because the check takes long. None of its figures may look like a GPU's."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables["MEGASPEED_CACHE"] = str(tmp_path / "cache")

    def run_forked(command: list[str], log: Path, limit: float | None) -> int:
        assert command[0] == str(gpu_check.MEGASPEED) and gpu_check.MEGASPEED.exists()
        assert limit is None
        words = ["-m", "megaspeed.cli", *command[1:]]
        return Forked(words, tmp_path, variables, log, log).wait(600)

    monkeypatch.setattr(gpu_check, "run_command", run_forked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(SCRIPT.parent)  # for the process that looks for GPUs
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path)])
    assert gpu_check.main() == 0, (tmp_path / "report.md").read_text()
    report = (tmp_path / "report.md").read_text()
    assert "mean nothing for a GPU" in report.splitlines()[0] and "no GPU; megaspeed" in report
    lines = [line for line in report.split("## compare")[0].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [(row[0].split()[0], row[1], row[2]) for row in rows] == [
        ("compare", "ZeRO-3", "2"),
        ("bench", "megaspeed", "1"),
        ("bench", "hf-deepspeed defaults", "1"),
        ("bench", "hf-deepspeed guide", "1"),
    ]
    for row in rows:
        assert all(re.fullmatch(r"[\d,.]+", row[column]) for column in (3, 4, 6)), row
        assert row[5] == "-", "the peak of a CPU is unknown"
    sections = re.findall(r"^## (.+?): (.+)\n\n    (.+)$", report, re.MULTILINE)
    assert len(sections) == 4
    for title, ending, command in sections:
        assert re.fullmatch(r"exit code 0, \d+ s|not run: fp16 needs a GPU", ending), title
        assert "--config " in command and "--json " in command
    assert "verdict: use ZeRO-3 here" in report and "EQUAL: initial weights" in report
    verified = json.loads(next(tmp_path.glob("verify-bf16*.figures.json")).read_text())
    assert verified["equal"]


def test_on_a_gpu_fp16_is_verified_with_a_constant_loss_scale(tmp_path: Path) -> None:
    verified = [
        list(map(str, section.command))
        for section in gpu_check.sections(options(tmp_path), h100())
        if section.kind == "verify" and section.not_run is None
    ]
    assert [command[command.index("--device") + 1] for command in verified] == ["cuda", "cuda"]
    assert {"bf16.enabled=true", "data.reset_at_documents=true"} <= set(verified[0])
    assert {"fp16.enabled=true", "fp16.loss_scale=1024"} <= set(verified[1])


@pytest.mark.parametrize(("gibibytes", "size"), [(81559 / 1024, 16), (40536 / 1024, 2), (30, None)])
def test_the_micro_batch_follows_from_the_gpus_own_memory(
    gibibytes: float, size: int | None, tmp_path: Path
) -> None:
    """The model is GPT-2 1.5B: 28 GiB of model states, and the activations of a micro-batch."""
    timed = [
        section
        for section in gpu_check.sections(options(tmp_path), h100(1, gibibytes))
        if "GPT-2 1.5B" in section.title
    ]
    assert len(timed) == 3
    for section, share in zip(timed, (1, 4, 4), strict=True):
        if size is None:
            assert "predicted peak of a micro-batch of 1 is" in section.not_run
        else:
            assert section.not_run is None
            assert f"train_micro_batch_size_per_gpu={max(1, size // share)}" in section.command


@pytest.mark.parametrize(("gpus", "layout"), [(4, Grid(1, 2, 2)), (8, Grid(2, 2, 2))])
def test_the_tensor_axis_is_verified_without_full(gpus: int, layout: Grid, tmp_path: Path) -> None:
    sections = gpu_check.sections(options(tmp_path), h100(gpus))
    assert {section.layout for section in sections if section.kind == "verify"} == {layout}


def test_full_covers_every_layout_of_eight_gpus(tmp_path: Path) -> None:
    sections = list(gpu_check.sections(options(tmp_path, full=True), h100(8)))
    layouts = {section.layout for section in sections}
    assert layouts == set(gpu_check.LAYOUTS)
    assert {layout.world_size for layout in layouts} == {1, 2, 4, 8}
    assert len({section.title for section in sections}) == len(sections)
    replicas = [section for section in sections if section.layout.replicate > 1]
    assert {section.kind for section in replicas} == {"compare", "verify", "bench"}
    assert all("parallel.replicate=2" in section.command for section in replicas)
    assert not any("ZeRO-0" in section.title for section in replicas)
    refused = {str(s.layout): s.not_run for s in sections if s.not_run is not None}
    assert set(refused) == {"pp 1 x dp 1 x tp 2", "pp 1 x dp 2 x tp 2"} | {
        "pp 1 x dp 1 x tp 8",
        "pp 2 x dp 2 x tp 2",
    }
    assert all("num_attention_heads 25" in reason for reason in refused.values())


def a_section(out: Path, program: str) -> Any:
    return gpu_check.Section(
        kind="verify",
        title="one",
        command=[sys.executable, "-c", program],
        figures_file=out / "one.json",
        layout=gpu_check.LAYOUTS[0],
    )


def test_a_command_that_fails_is_reported_with_what_it_printed(tmp_path: Path) -> None:
    section = a_section(tmp_path, "raise SystemExit('CUDA out of memory')")
    gpu_check.carry_out(section, float("inf"))
    assert section.failed
    report = "\n".join(gpu_check.report_lines([section], options(tmp_path), h100()))
    assert "## one: exit code 1, " in report
    assert "```\nCUDA out of memory\n```" in report


def test_a_command_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = a_section(tmp_path, "raise SystemExit(0)")
    gpu_check.carry_out(late, time.monotonic() + 50.5)
    assert not late.failed and gpu_check.ending(late) == "not run: only 50 of 440 s are left"
    monkeypatch.setattr(gpu_check, "SECTION_SECONDS", 0.5)
    section = a_section(tmp_path, "import time; time.sleep(10**6)")
    start = time.monotonic()
    gpu_check.carry_out(section, start + 400)
    assert time.monotonic() - start < limit(60)
    assert section.failed and gpu_check.ending(section).startswith("out of time")


def test_a_dry_run_prints_the_most_useful_commands_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # for the process that looks for GPUs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry-run", "--out", str(tmp_path)])
    assert gpu_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split()[0] for line in lines]
    assert kinds[:5] == ["compare", "compare", "verify", "bench", "bench"]
    assert all(
        f": {gpu_check.MEGASPEED} {kind} --config " in line
        for kind, line in zip(kinds, lines, strict=True)
    )
    assert not (tmp_path / "report.md").exists()


def test_a_check_that_is_ended_ends_its_command(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_check as g\n"
        "from pathlib import Path\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(10**6)']\n"
        "with g.ended_on_termination():\n"
        f"    g.run_command(command, Path({str(tmp_path)!r}, 'log'), None)\n"
    )
    (tmp_path / "program.py").write_text(program)
    out = tmp_path / "out"
    check = Forked([tmp_path / "program.py"], tmp_path, os.environ, out, out)
    children = wait_for(lambda: psutil.Process(check.pid).children())
    check.send_signal(signal.SIGTERM)
    assert check.wait(60) != 0
    psutil.wait_procs(children, timeout=limit(10))
    assert not any(child.is_running() for child in children)


def wait_for(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    end = time.monotonic() + limit(60)
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found
