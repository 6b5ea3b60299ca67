"""The main job under each launcher: the same run, from its first second to what it leaves."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.loading import read_config
from megaspeed.training import pretrain
from tests.support.forked import Forked
from tests.support.launched import Launched, free_port, launch
from tests.support.tiny import GPT2
from tests.training.metrics_of_steps import STEP_KEYS, VALIDATION_KEYS

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain.py"
TEXT = Path(__file__).parents[1] / "LICENSE"
STEPS = 4
FIRST_STEP_SECONDS = 15.0
"""On a machine that does nothing else, with a core for each rank."""

TINY: dict[str, Any] = {
    "model": GPT2,
    "data": {"train": [str(TEXT)], "validation": [str(SCRIPT)], "sequence_length": 16},
    "training": {"steps": STEPS, "log_interval": 1},
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage": 3},
}

WRONG = {**TINY, "lerning_rate": 1e-3, "parallel": {"tensor": 4}, "fp16": {"enabled": True}}
PROBLEMS = (
    "lerning_rate is an unknown key",
    "world size 2 (from RANK/WORLD_SIZE) is not divisible by parallel.pipeline 1 x parallel.tensor",
    "fp16.enabled is true, but this run is on a CPU, which cannot train in fp16",
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(500)]

Command = Callable[[], list[str | Path]]


def deepspeed() -> list[str | Path]:
    program = Path(sys.executable).with_name("deepspeed")
    options = ["--quiet", "--num_accelerators", "2", "--master_port", str(free_port())]
    return [program, *options, SCRIPT]


def torchrun() -> list[str | Path]:
    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", *options, SCRIPT]


def megaspeed() -> list[str | Path]:
    return [sys.executable, "-m", "megaspeed.cli", "train", "--world-size", "2"]


def python() -> list[str | Path]:
    return [sys.executable, SCRIPT]


def mpirun() -> list[str | Path]:
    """Open MPI's, which finds no ssh here and needs none. The ranks get MASTER_ADDR from here."""
    program = shutil.which("mpirun")
    assert program is not None
    # It gives the ranks a terminal of its own, wherever its output goes.
    settings = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}", "TERM=dumb"]
    exported = [word for setting in settings for word in ("-x", setting)]
    alone = ["--allow-run-as-root", "--oversubscribe", "--mca", "plm", "isolated"]
    return [program, "-n", "2", *alone, *exported, sys.executable, SCRIPT]


LAUNCHES: dict[str, tuple[Command, list[str]]] = {
    "python": (python, []),
    "deepspeed": (deepspeed, []),
    "torchrun": (torchrun, ["--set", "parallel.pipeline=2"]),
    "megaspeed": (megaspeed, ["--set", "parallel.tensor=2"]),
    **({"mpirun": (mpirun, ["--set", "parallel.tensor=2"])} if shutil.which("mpirun") else {}),
}
"""How each run is started, and what it changes on the command line: 1 rank, dp 2, pp 2, tp 2."""


class Runs:
    """One run under every launcher, each launched once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Launched] = {}

    def run_dir(self, launcher: str) -> Path:
        return self._folder / launcher / "run"

    def launched(self, launcher: str) -> Launched:
        if launcher not in self._known:
            folder = self._folder / launcher
            folder.mkdir()
            config = folder / "tiny.json"
            training = {**TINY["training"], "run_dir": str(self.run_dir(launcher))}
            config.write_text(json.dumps({**TINY, "training": training}))
            command, changes = LAUNCHES[launcher]
            self._known[launcher] = launch(
                [*command(), "--config", config, *changes], folder, self.run_dir(launcher)
            )
        return self._known[launcher]

    def records(self, launcher: str) -> list[dict[str, Any]]:
        """What the run wrote to metrics.jsonl."""
        launched = self.launched(launcher)
        assert launched.code == 0, launched.out + launched.err
        lines = (self.run_dir(launcher) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_the_run_ends_well_and_leaves_its_files(launcher: str, runs: Runs) -> None:
    launched = runs.launched(launcher)
    assert launched.code == 0, launched.out + launched.err
    run_dir = runs.run_dir(launcher)
    assert {file.name for file in run_dir.iterdir()} == {
        "config.json",
        ".lock",
        "metrics.jsonl",
        "starts.jsonl",
        "parts.jsonl",
        "logs",
        "loss.png",
        "checkpoints",
    }
    assert (run_dir / "checkpoints" / f"step-{STEPS:08d}").is_dir()
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [list(record) for record in runs.records(launcher)] == [
        *[STEP_KEYS] * STEPS,
        VALIDATION_KEYS,
    ]


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_rank_0_alone_speaks(launcher: str, runs: Runs) -> None:
    launched = runs.launched(launcher)
    said = [line for line in launched.out.splitlines() if line.startswith("step ")]
    assert len([line for line in said if "grad norm" in line]) == STEPS
    assert len([line for line in said if "validation loss" in line]) == 1
    assert "Traceback" not in launched.err


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "megaspeed", "python"])
def test_nothing_stands_before_our_lines(launcher: str, runs: Runs) -> None:
    """DS_ACCELERATOR=cpu and --quiet silence DeepSpeed's launcher; the ranks silence themselves."""
    launched = runs.launched(launcher)
    assert launched.out.startswith("corpus: ")
    assert "\x1b" not in launched.out and "\r" not in launched.out
    assert launched.err == ""


@pytest.mark.parametrize("launcher", [name for name in LAUNCHES if name != "python"])
def test_two_processes_train_the_model_of_one(launcher: str, runs: Runs) -> None:
    alone, together = runs.records("python"), runs.records(launcher)
    for one, two in zip(alone[:STEPS], together[:STEPS], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert together[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], rel=1e-6)


def test_config_json_is_the_run_with_every_number_worked_out(runs: Runs) -> None:
    runs.launched("torchrun")
    written = read_config(runs.run_dir("torchrun") / "config.json")
    assert (written.parallel.data, written.parallel.pipeline) == (1, 2)
    assert written.gradient_accumulation_steps == 4
    assert written.parallel.gradient_reduction == "per_micro_batch"
    assert written.training.run_dir == str(runs.run_dir("torchrun"))


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_nothing_is_compiled_when_a_run_starts(launcher: str, runs: Runs) -> None:
    launched = runs.launched(launcher)
    assert launched.compilers_called == []
    assert launched.compiled == []


def test_the_first_step_of_two_ranks_is_done_within_15_seconds(runs: Runs) -> None:
    """Of two processors, so that it holds on a busy machine too."""
    for launcher in ("deepspeed", "torchrun"):
        seconds = runs.launched(launcher).processor_seconds_to_first_step
        assert seconds is not None and seconds / 2 < FIRST_STEP_SECONDS


def stopped(number: signal.Signals, config: Path, run_dir: Path, out: Path, *changes: str) -> str:
    """The output of a run of two ranks, of which rank 1 gets a signal after the first step."""
    metrics = run_dir / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    command: list[str | Path] = [SCRIPT, "--config", config]
    command += ["--set", "training.log_interval=5", *changes]
    variables = {**os.environ, "MEGASPEED_CACHE": f"{out}-cache", "CUDA_VISIBLE_DEVICES": ""}
    run = Forked(command, out.parent, variables, out, out, ranks=2)
    while run.poll() is None and not (metrics.exists() and metrics.stat().st_size > before):
        time.sleep(0.05)
    run.ranks()[1].send_signal(number)
    assert run.wait(240) == 0, out.read_text()
    assert "Traceback" not in out.read_text()
    assert f"stopped by {number.name} after {last_step(run_dir)} of" in out.read_text()
    return out.read_text()


def test_a_run_that_is_stopped_continues_at_another_layout(tmp_path: Path) -> None:
    """dp 2 at ZeRO-3 continues as pp 2 at ZeRO-1. A signal to one of its ranks stops each."""
    run_dir = tmp_path / "run"
    config = tmp_path / "tiny.json"
    # So many steps that the run cannot be over before the signal is there.
    training = {**TINY["training"], "steps": 100_000, "run_dir": str(run_dir)}
    config.write_text(json.dumps({**TINY, "training": training}))
    stopped(signal.SIGUSR1, config, run_dir, tmp_path / "first")
    steps = last_step(run_dir)
    saved = run_dir / "checkpoints" / f"step-{steps:08d}"
    assert [path.name for path in saved.parent.glob("step-*")] == [saved.name]
    layout = ["parallel.pipeline=2", "zero_optimization.stage=1"]
    resumed = stopped(signal.SIGTERM, config, run_dir, tmp_path / "second", *layout)
    assert f"resuming from {saved}" in resumed
    assert f"resumed at step {steps + 1}: loss " in resumed
    assert last_step(run_dir) > steps
    assert not list(run_dir.glob("earlier-*")), "nothing was lost, nothing had to be moved"


def last_step(run_dir: Path) -> int:
    """Of the steps in metrics.jsonl, which are all there, each once."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


def test_wrong_input_is_refused_by_a_rank_that_has_met_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 of 2, where rank 1 never comes: with a process group it would wait."""
    config = tmp_path / "wrong.json"
    config.write_text(json.dumps(WRONG))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pretrain.main(["--config", str(config)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for problem in PROBLEMS:
        assert printed.err.count(problem) == 1


def test_wrong_input_is_reported_once_under_a_launcher_without_a_traceback(
    tmp_path: Path,
) -> None:
    config = tmp_path / "wrong.json"
    config.write_text(json.dumps(WRONG))
    launched = launch([*deepspeed(), "--config", config], tmp_path, tmp_path / "runs")
    assert launched.code == 2
    for problem in PROBLEMS:
        assert launched.err.count(problem) == 1, launched.err
    assert "Traceback" not in launched.err + launched.out
    assert not (tmp_path / "runs").exists()
