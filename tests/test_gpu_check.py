"""The check for GPUs runs to its end here, with tiny shapes on real processes."""

import argparse
import importlib.util
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

from tests.support.forked import Forked

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
FIGURE = r"\d+(\.\d+)?"


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
    return gpu_check.Machine(gpus=names, memory_bytes=memory, facts={})


def options(out: Path, *, full: bool = False, tiny: bool = False) -> argparse.Namespace:
    return argparse.Namespace(out=out, full=full, tiny=tiny)


def rows_of(report: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading."""
    section = report.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


@pytest.mark.timeout(900)
def test_the_report_of_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is one test, because the check takes long. None of its figures may look like a GPU's."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables["MEGASPEED_CACHE"] = str(tmp_path / "cache")

    def start_forked(command: list[str], log: Path) -> Forked:
        assert command[0] == str(gpu_check.MEGASPEED) and gpu_check.MEGASPEED.exists()
        return Forked(["-m", "megaspeed.cli", *command[1:]], tmp_path, variables, log, log)

    monkeypatch.setattr(gpu_check, "start_process", start_forked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(SCRIPT.parent)  # for the process that looks for GPUs
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path)])
    assert gpu_check.main() == 0, (tmp_path / "report.md").read_text()
    report = (tmp_path / "report.md").read_text()
    check_the_first_line(report)
    check_that_bf16_is_verified_and_fp16_states_why_it_is_not(report)
    check_that_both_engines_are_measured_beside_each_other(report)
    check_that_every_section_states_its_command_and_its_ending(report)


def check_the_first_line(report: str) -> None:
    """Check that the first line states that no GPU was measured."""
    first = report.splitlines()[0]
    assert "No GPU was found" in first and "mean nothing for a GPU" in first
    assert "| torch that is needed | torch>=2.11, built for CUDA |" in report
    assert re.search(r"^\| torch \| \d+\.\d+.* \(CUDA .*, NCCL none\) \|$", report, re.MULTILINE)


def check_that_bf16_is_verified_and_fp16_states_why_it_is_not(report: str) -> None:
    bf16, fp16 = rows_of(report, "The same model as one process")
    assert bf16[:4] == ["pp 1 x dp 2 x tp 1", "3", "bf16", "yes"]
    assert float(bf16[5]) <= float(bf16[6])
    assert fp16[2:4] == ["fp16", "not run: fp16 needs a GPU"]


def check_that_both_engines_are_measured_beside_each_other(report: str) -> None:
    rows = rows_of(report, "tiny Llama")
    ours, theirs = ["megaspeed", "megaspeed, bench"], "Hugging Face + DeepSpeed"
    assert [row[0] for row in rows][:2] == ours and {row[2] for row in rows} == {"ZeRO-3"}
    assert {row[0] for row in rows[2:]} == {f"{theirs}, defaults", f"{theirs}, guide"}
    assert [row[3] for row in rows] == ["2", "1", "1", "1"], "micro-batches"
    for row in rows:
        step, tokens, mfu = row[4:7]
        assert re.fullmatch(FIGURE, step) and re.fullmatch(FIGURE, tokens), row
        assert mfu == "n/a", "the peak of a CPU is unknown"
    assert 0.8 < float(rows[0][9]) < 1.2, "predicted over measured"


def check_that_every_section_states_its_command_and_its_ending(report: str) -> None:
    sections = report.split("## Sections\n")[1]
    found = re.findall(r"^\*\*(.+)\*\*: (.+)\n\n    (.+)$", sections, re.MULTILINE)
    assert len(found) == 4
    for title, ending, command in found:
        assert re.fullmatch(r"exit code 0, \d+ s|not run: .+", ending), title
        assert "--config " in command and "--json " in command


def test_on_a_gpu_fp16_is_verified_with_a_constant_loss_scale(tmp_path: Path) -> None:
    verified = [
        list(map(str, section.command))
        for section in gpu_check.sections(options(tmp_path), h100())
        if section.labels["kind"] == "verify" and section.not_run is None
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
        if section.labels.get("model") == "GPT-2 1.5B"
    ]
    assert len(timed) == 3
    for section, share in zip(timed, (1, 2, 2), strict=True):
        if size is None:
            assert "predicted peak of a micro-batch of 1 is" in section.not_run
        else:
            assert section.not_run is None
            assert f"train_micro_batch_size_per_gpu={size // share}" in section.command


def test_full_covers_every_layout_of_eight_gpus(tmp_path: Path) -> None:
    sections = list(gpu_check.sections(options(tmp_path, full=True), h100(8)))
    layouts = {section.labels["layout"] for section in sections}
    assert layouts == set(gpu_check.LAYOUTS)
    assert {layout.world_size for layout in layouts} == {1, 2, 4, 8}
    assert len({section.title for section in sections}) == len(sections)
    refused = {str(s.labels["layout"]): s.not_run for s in sections if s.not_run is not None}
    assert set(refused) == {"pp 1 x dp 1 x tp 2", "pp 1 x dp 2 x tp 2"} | {
        "pp 1 x dp 1 x tp 8",
        "pp 2 x dp 2 x tp 2",
    }
    assert all("num_attention_heads 25" in reason for reason in refused.values())


def a_section(out: Path, program: str) -> Any:
    return gpu_check.Section(
        title="one",
        command=[sys.executable, "-c", program],
        figures_file=out / "one.json",
        labels={"kind": "verify", "layout": gpu_check.LAYOUTS[0], "zero": 1, "precision": "bf16"},
    )


def test_a_command_that_fails_is_reported_with_what_it_printed(tmp_path: Path) -> None:
    section = a_section(tmp_path, "raise SystemExit('CUDA out of memory')")
    gpu_check.carry_out(section, float("inf"))
    assert section.failed and section.out_of_memory
    report = "\n".join(gpu_check.report_lines([section], options(tmp_path), h100()))
    assert "**one**: exit code 1, out of memory, " in report
    assert "```\nCUDA out of memory\n```" in report


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    section = a_section(tmp_path, "import time; time.sleep(600)")
    section.expected = 0.4
    start = time.monotonic()
    gpu_check.carry_out(section, start + 0.5)
    assert time.monotonic() - start < 60
    assert section.failed and gpu_check.ending(section).startswith("out of time")
    limited = a_section(tmp_path, "import time; time.sleep(600)")
    limited.expected = 0.5 / gpu_check.LIMIT
    gpu_check.carry_out(limited, time.monotonic() + 600)
    assert gpu_check.ending(limited).startswith("out of time")
    late = a_section(tmp_path, "raise SystemExit(0)")
    late.expected = 100.0
    gpu_check.carry_out(late, time.monotonic() + 50.5)
    assert not late.failed
    assert gpu_check.ending(late) == "not run: 100 s are expected, but only 50 of 440 s are left"


def test_hugging_face_starts_at_half_the_micro_batch_and_tries_a_quarter(tmp_path: Path) -> None:
    sizes = []
    for section in gpu_check.sections(options(tmp_path), h100()):
        if section.labels.get("row") and section.labels["model"] == "GPT-2 1.5B":
            sizes.append(section.labels["run"].batch.micro_batch_size)
            if len(sizes) == 1:
                section.code, section.output = 1, "torch.OutOfMemoryError: CUDA out of memory."
    assert sizes == [8, 4, 8]


def test_a_dry_run_prints_what_has_time_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every comparison comes first, and the sections that get time take less than eight minutes."""
    monkeypatch.syspath_prepend(SCRIPT.parent)  # for the process that looks for GPUs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry-run", "--out", str(tmp_path)])
    assert gpu_check.main() == 0
    *lines, total = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[0].split(" ")[0] for row in rows[:4]] == ["compare", "compare", "verify", "bench"]
    for _, expected, limit, outcome in rows:
        assert 0 < int(expected) < int(limit)
        assert outcome == "runs" or outcome.startswith(f"{expected} s are expected, but only ")
    own = int(re.findall(r"\d+", total)[-1])
    runs = [int(row[1]) for row in rows if row[3] == "runs"]
    assert len(runs) >= 5 and "NVIDIA H100" in total
    assert own + sum(runs) <= 440 + len(runs)  # each number is rounded
    assert not (tmp_path / "report.md").exists()


def test_a_check_that_is_ended_ends_its_command(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_check as g\n"
        "from pathlib import Path\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"file = Path({str(tmp_path)!r}, 'one.json')\n"
        "section = g.Section(title='one', command=command, figures_file=file, labels={})\n"
        "with g.ended_on_termination():\n"
        "    g.carry_out(section, float('inf'))\n"
    )
    (tmp_path / "program.py").write_text(program)
    out = tmp_path / "out"
    check = Forked([tmp_path / "program.py"], tmp_path, os.environ, out, out)
    children = wait_for(lambda: psutil.Process(check.pid).children())
    check.send_signal(signal.SIGTERM)
    assert check.wait(60) != 0
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)


def wait_for(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found
