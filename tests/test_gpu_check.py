"""The check for GPUs runs to its end here, with tiny shapes on real processes."""

import importlib.util
import json
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
import torch

from megaspeed.topology import process_settings
from megaspeed.topology.grid import Grid
from tests.paper_gpu.on_device import CASES, checks
from tests.support.forked import Forked
from tests.support.machine import limit

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parents[1] / "scripts"
SCRIPT = SCRIPTS / "gpu_check.py"
MOST_SECONDS = 480
"""The sum of the sections' limits. With the start and the end of commands, this is less than nine
minutes, as docs/gpu.md states."""


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses need the module here
    spec.loader.exec_module(module)
    return module


gpu_check = load_script("gpu_check")


class Started(Forked):
    """A command of the check, with all methods of ``subprocess.Popen`` that it calls."""

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the check run here: without a GPU, and with processes that start fast."""
    numbers = iter(range(1000))

    def start(case: Any) -> tuple[Started, IO[bytes]]:
        program, *words = map(str, case.command)
        assert program == sys.executable
        file = tmp_path / f"output-{next(numbers)}"
        process = Started(words, SCRIPT.parents[1], os.environ, file, file)
        while not file.exists():
            time.sleep(0.01)
        return process, file.open("rb")

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(gpu_check, "start", start)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(work))
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MEGASPEED_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }.items():
        monkeypatch.setenv(name, value)
    yield tmp_path / "out"


def run_check(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    code: int = gpu_check.main()
    return code


def sections(work: Path, gpus: int = 1, *, full: bool = False) -> list[Any]:
    work.mkdir(exist_ok=True)
    made: list[Any] = gpu_check.all_sections(work, gpus, full=full)
    return made


@pytest.mark.timeout(900)
def test_every_section_runs_here(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the layouts, and no feature that compiles, because other tests run these."""
    chosen = ("pp 2", "fp16")
    layouts = {name: gpu_check.LAYOUTS[name] for name in chosen}
    monkeypatch.setattr(gpu_check, "LAYOUTS", layouts)
    done = [{"case": name, "problem": None, "seconds": 0} for name in CASES if "compiled" in name]
    assert len(done) == 4
    (tmp_path / "work" / "features.jsonl").write_text("\n".join(map(json.dumps, done)) + "\n")
    assert run_check(monkeypatch, "--out", out) == 0, (out / "report.md").read_text()
    report = (out / "report.md").read_text()
    assert "They say nothing about a GPU" in report
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in report.splitlines()
        if line.startswith("| ")
    ]
    results = {row[0]: row[-1] for row in rows if "exit code 0" in row[1]}
    features = len(checks())
    assert re.fullmatch(r"bf16 product: \S+ TFLOP/s", results.pop("machine"))
    assert results.pop("features") == f"{features} of {features} work"
    assert results.pop("pp 2, ZeRO-1") == "equal to one process"
    assert results.pop("resume") == "the same losses after the resumption"
    assert results.pop("memory") == "all ranks start again, with micro-batches of 4"
    assert re.fullmatch(r"named within \d+ s", results.pop("killed"))
    assert list(results) == ["tiny Llama"]
    assert "not run: fp16 needs a GPU" in report
    named = re.search(r"- attention, documents: (.*)", report)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert named and {flash, f"{flash}_backward"} <= set(named[1].split(", "))
    kernels = report.partition("### tiny Llama")[2].partition("```\n")[2].partition("```")[0]
    assert len(kernels.splitlines()) == 25 and "aten::mm" in kernels
    files = sorted(file.name for file in out.iterdir())
    logs = ["1-machine.log", "2-features.log", "3-ranks.log", "4-real-shapes.log", "5-faults.log"]
    assert files == [*logs, "figures.json", "report.md"]
    assert "EQUAL: initial weights" in (out / "3-ranks.log").read_text()
    figures = json.loads((out / "figures.json").read_text())
    assert figures["tiny Llama"]["tokens/s"] > 0 and figures["pp 2, ZeRO-1"]["equal"]


@pytest.mark.timeout(600)
def test_full_compares_zero_stages_and_another_library(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "FULL_STAGES", "3")
    assert run_check(monkeypatch, "--full", "--sections", "6", "--out", out) == 0
    report = (out / "report.md").read_text()
    assert "## 6 layouts" in report and "use ZeRO-3 here" in report
    for title, row in (("compare", "ZeRO-3"), ("bench", "hf-deepspeed guide")):
        printed = report.partition(f"### {title} tiny Llama {Grid(1, 1, 1)}")[2]
        assert row in printed.partition("### ")[0]
    figures = json.loads((out / "figures.json").read_text())
    (bench,) = (found for title, found in figures.items() if title.startswith("bench"))
    labels = ["megaspeed", "hf-deepspeed defaults", "hf-deepspeed guide"]
    assert [row["label"] for row in bench["contestants"]] == labels
    assert all(row["tokens_per_second"] > 0 for row in bench["contestants"])


def test_a_dry_run_prints_the_sections_with_their_commands_and_limits(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_check(monkeypatch, "--dry-run", "--out", out) == 0
    text = capsys.readouterr().out
    titles = re.findall(r"^(\d) (.+): (\d+) s$", text, re.MULTILINE)
    assert [name for _, name, _ in titles] == [
        *("machine", "features", "ranks", "real shapes", "faults")
    ]
    assert sum(int(seconds) for *_, seconds in titles) <= MOST_SECONDS
    commands = re.findall(r"^    (.+?): (.+)$", text, re.MULTILINE)
    assert [name for name, _ in commands][2:9] == [
        *("dp 2, ZeRO-3", "pp 2, ZeRO-1", "tp 2, ZeRO-2", "pp 2 x dp 2 x tp 2, ZeRO-3"),
        *("2 chunks, ZeRO-3", "cp 2, ulysses, ZeRO-3", "2 replicas, ZeRO-3"),
    ]
    shared = [name for name, command in commands if "NCCL_MULTI_RANK_GPU_ENABLE=1 " in command]
    assert shared == [*(name for name, _ in commands if ", ZeRO-" in name), "killed"]
    assert "fp16.enabled=true fp16.loss_scale=1024" in dict(commands)["fp16, ZeRO-1"]
    for _, command in commands:
        words = shlex.split(command)
        assert "verify" not in words or words[words.index("--device") + 1] == "cuda"
        program = words.index(sys.executable)
        files = [word for word in words[program + 1 :] if word.endswith((".py", ".json"))]
        assert all(Path(file).exists() for file in files if ".figures." not in file)
    assert not out.exists()


@pytest.mark.parametrize(
    ("nccl", "gpus", "refused"), [((2, 28, 9), 1, 16), ((2, 28, 9), 4, 1), ((2, 30, 7), 1, 0)]
)
def test_ranks_share_a_gpu_only_if_nccl_lets_them(
    nccl: tuple[int, int, int],
    gpus: int,
    refused: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process_settings, "nccl_version", lambda: nccl)
    monkeypatch.setattr(gpu_check, "nccl_version", lambda: nccl)
    cases = [case for section in sections(tmp_path / "work", gpus) for case in section.cases]
    reasons = [case.not_run for case in cases if case.not_run is not None]
    assert len(reasons) == refused
    assert set(reasons) <= {"NCCL 2.28.9 refuses several ranks on a GPU; 2.30 or newer allows them"}


def test_the_models_of_real_size_are_gpt2_xl_and_a_compiled_llama_at_zero_1(tmp_path: Path) -> None:
    section = next(one for one in sections(tmp_path / "work") if one.name == "real shapes")
    xl, llama = (json.loads(Path(case.command[-1]).read_text()) for case in section.cases)
    assert xl["extends"].endswith("gpt2_1.5b.json") and xl["data"]["sequence_length"] == 1024
    assert llama["training"]["compile"] and llama["zero_optimization"]["stage"] == 1
    assert section.case_seconds < section.seconds, "one model leaves time for the other"


def test_full_covers_every_layout_of_eight_gpus(tmp_path: Path) -> None:
    *_, layouts = sections(tmp_path / "work", gpus=8, full=True)
    titles = [case.title for case in layouts.cases]
    assert len(set(titles)) == len(titles) and layouts.seconds == math.inf
    for grid in gpu_check.FULL_GRIDS:
        named = {title.split()[0] for title in titles if title.endswith(f"GPT-2 1.5B {grid}")}
        assert named == ({"compare", "bench"} if grid.pp * grid.tp == 1 else {"compare"})
    replicas = [case for case in layouts.cases if "parallel.replicate=2" in case.command]
    assert replicas and not any("0" in case.command for case in replicas if "compare" in case.title)
    refused = {case.title: case.not_run for case in layouts.cases if case.not_run is not None}
    assert set(refused) == {
        f"compare GPT-2 1.5B {Grid(pp, dp, tp)}"
        for pp, dp, tp in ((1, 1, 2), (1, 2, 2), (1, 1, 8), (2, 2, 2))
    }
    assert all("num_attention_heads 25" in reason for reason in refused.values())
    assert Grid(2, 2, 2) in gpu_check.FULL_GRIDS


@pytest.mark.parametrize(("gibibytes", "size"), [(81559 / 1024, 8), (40536 / 1024, 2), (30, None)])
def test_the_micro_batch_follows_from_the_gpus_own_memory(
    gibibytes: float, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is GPT-2 1.5B: 26 GiB of model states, and the activations of a micro-batch."""
    parts, memory = load_script("gpu_parts"), int(gibibytes * 2**30)
    monkeypatch.setattr(parts, "ON_GPU", True)
    monkeypatch.setattr(parts, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(parts, "MICRO_BATCH_SIZES", (16, 8, 4, 2, 1))
    properties = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    section = next(one for one in sections(tmp_path / "work") if one.name == "real shapes")
    config = Path(section.cases[0].command[-1])
    if size is None:
        with pytest.raises(
            parts.WrongOutcome, match="a micro-batch of 1 is predicted to need over"
        ):
            parts.largest_that_fits(config)
    else:
        run = parts.largest_that_fits(config)
        assert run.batch.micro_batch_size == size and run.batch.gradient_accumulation_steps == 4
        peak = parts.predict(run).fullest.peak_bytes
        assert peak <= 0.8 * memory


def one_case(folder: Path, title: str, program: str) -> Any:
    return gpu_check.Case(
        title=title,
        command=[sys.executable, "-c", program],
        figures_file=folder / f"{title}.json",
    )


def test_a_command_that_fails_or_takes_too_long_leaves_the_others(
    tmp_path: Path,
) -> None:
    failing = one_case(tmp_path, "failing", "raise SystemExit('CUDA out of memory')")
    endless = one_case(tmp_path, "endless", "import time; print('x', flush=True); time.sleep(1e6)")
    late, good = (one_case(tmp_path, title, "print('done')") for title in ("late", "good"))
    programs = [
        gpu_check.Section(number=1, name="a", seconds=1e6, cases=[failing]),
        gpu_check.Section(
            number=2, name="b", seconds=1e6, cases=[endless, good], case_seconds=limit(2)
        ),
        gpu_check.Section(number=3, name="c", seconds=-3e6, cases=[late]),
    ]
    begin = time.monotonic()
    gpu_check.run(programs, tmp_path)
    assert time.monotonic() - begin < limit(60)
    assert [case.failed for case in (failing, endless, good, late)] == [True, True, False, False]
    assert endless.ending.startswith("out of time") and "x" in endless.output
    assert late.ending == "not run: no time is left" and good.code == 0
    report = (tmp_path / "report.md").read_text()
    assert "| failing | exit code 1" in report and "```\nCUDA out of memory\n```" in report
    assert "==== endless: out of time" in (tmp_path / "2-b.log").read_text()


def test_a_layout_that_the_end_of_its_section_stops_has_not_failed(tmp_path: Path) -> None:
    endless = one_case(tmp_path, "endless", "import time; time.sleep(1e6)")
    never = one_case(tmp_path, "never", "print('done')")
    section = gpu_check.Section(
        number=1,
        name="a",
        seconds=1.0,
        cases=[endless, never],
        least_seconds=0.5,
        as_many_as_fit=True,
    )
    gpu_check.run([section], tmp_path)
    assert not endless.failed and endless.ending.startswith("not run: not finished when the time")
    assert not never.begun and never.ending == "not run: no time is left"


def test_a_check_that_is_ended_ends_its_command_and_keeps_the_log(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_check as g

command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(10**6)"]
case = g.Case(title="one", command=command, figures_file=Path("none"))
with g.ended_on_termination():
    g.run([g.Section(number=1, name="a", seconds=1e6, cases=[case])], Path({str(tmp_path)!r}))
"""
    (tmp_path / "program.py").write_text(program)
    printed = tmp_path / "printed"
    check = Forked([tmp_path / "program.py"], tmp_path, os.environ, printed, printed)
    children = wait_for(lambda: psutil.Process(check.pid).children())
    time.sleep(limit(1))  # until it prints
    check.send_signal(signal.SIGTERM)
    assert check.wait(60) != 0
    psutil.wait_procs(children, timeout=limit(10))
    assert not any(child.is_running() for child in children)
    assert "begun" in (tmp_path / "1-a.log").read_text()


def wait_for(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    end = time.monotonic() + limit(60)
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found
