"""The main job under each launcher: the same run, from its first second to its last file."""

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
from megaspeed.job import pretrain
from tests.support.forked import Forked, run_forked
from tests.support.launched import Launched, free_port, launch
from tests.support.machine import limit
from tests.support.tiny import GPT2
from tests.training.metrics_of_steps import STEP_KEYS, VALIDATION_KEYS

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain.py"
TEXT = Path(__file__).parents[1] / "LICENSE"
STEPS = 4
FIRST_STEP_SECONDS = limit(15)
"""The limit with a core for each rank."""

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
    """Return Open MPI's command. It finds no ssh here and needs none. It passes MASTER_ADDR to the
    ranks.
    """
    program = shutil.which("mpirun")
    assert program is not None
    # mpirun gives the ranks a terminal of its own, even if its output goes to a file.
    settings = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}", "TERM=dumb"]
    exported = [word for setting in settings for word in ("-x", setting)]
    alone = ["--allow-run-as-root", "--oversubscribe", "--mca", "plm", "isolated"]
    return [program, "-n", "2", *alone, *exported, sys.executable, SCRIPT]


LAUNCHES: dict[str, tuple[Command, list[str]]] = {
    "python": (python, ["--set", "zero_optimization.stage=1"]),
    "deepspeed": (deepspeed, []),
    "torchrun": (torchrun, ["--set", "parallel.pipeline=2", "zero_optimization.stage=2"]),
    "megaspeed": (megaspeed, ["--set", "parallel.tensor=2", "zero_optimization.stage=1"]),
    "mpirun": (mpirun, ["--set", "parallel.tensor=2", "zero_optimization.stage=1"]),
}
"""The command that starts each run, and its changes: 1 rank, dp 2, pp 2, tp 2. Without a data
axis, ZeRO-3 would only import more. Stage 2 determines a value that is checked."""


def configuration(folder: Path) -> Path:
    """Write the configuration of a run in folder/run."""
    folder.mkdir(exist_ok=True)
    training = {**TINY["training"], "run_dir": str(folder / "run")}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "training": training}))
    return folder / "tiny.json"


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of the run in metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the records of a run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    ended = run_forked([SCRIPT, "--config", configuration(folder)], folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return records(folder / "run")


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_the_run_is_the_same_under_each_launcher(
    launcher: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """One launch tests everything, because a launch takes long: the run leaves its files, only rank
    0 prints, nothing is compiled, and two processes train the model of one.
    """
    config, run_dir = configuration(tmp_path / "launch"), tmp_path / "launch" / "run"
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here; install it with: apt-get install openmpi-bin")
    command, changes = LAUNCHES[launcher]
    launched = launch([*command(), "--config", config, *changes], config.parent, run_dir)
    assert launched.code == 0, launched.out + launched.err
    check_files(run_dir)
    check_console(launched, quiet=launcher != "mpirun")
    assert launched.compilers_called == []
    assert launched.compiled == []
    check_losses(records(run_dir), alone)
    if launcher in ("deepspeed", "torchrun"):
        # These are seconds of two processors, so the limit holds on a busy machine, too.
        seconds = launched.processor_seconds_to_first_step
        assert seconds is not None and seconds / 2 < FIRST_STEP_SECONDS
    if launcher == "torchrun":
        check_numbers_that_were_worked_out(run_dir)


def check_files(run_dir: Path) -> None:
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
    assert [list(record) for record in records(run_dir)] == [*[STEP_KEYS] * STEPS, VALIDATION_KEYS]


def check_console(launched: Launched, *, quiet: bool) -> None:
    """Check that only rank 0 prints. If the launcher is ``quiet``, nothing is printed before its
    lines.

    DS_ACCELERATOR=cpu and --quiet silence DeepSpeed's launcher. The ranks silence themselves.
    """
    said = [line for line in launched.out.splitlines() if line.startswith("step ")]
    assert len([line for line in said if "grad norm" in line]) == STEPS
    assert len([line for line in said if "validation loss" in line]) == 1
    assert "Traceback" not in launched.err
    if quiet:
        assert launched.out.startswith("corpus: ")
        assert "\x1b" not in launched.out and "\r" not in launched.out
        assert launched.err == ""


def check_losses(together: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Check that two processes train the model of one."""
    for one, two in zip(alone[:STEPS], together[:STEPS], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert together[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], rel=1e-6)


def check_numbers_that_were_worked_out(run_dir: Path) -> None:
    """Check that config.json is the run with every number resolved."""
    written = read_config(run_dir / "config.json")
    assert (written.parallel.data, written.parallel.pipeline) == (1, 2)
    assert written.gradient_accumulation_steps == 4
    assert written.parallel.gradient_reduction == "per_micro_batch"
    assert written.training.run_dir == str(run_dir)


def stopped(number: signal.Signals, config: Path, run_dir: Path, out: Path, *changes: str) -> str:
    """Return the output of a run of two ranks. Rank 1 gets a signal after the first step."""
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
    """dp 2 at ZeRO-3 continues as pp 2 at ZeRO-1. A signal to one rank stops both."""
    run_dir = tmp_path / "run"
    config = tmp_path / "tiny.json"
    # So many steps that the run cannot end before the signal comes.
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
    assert not list(run_dir.glob("earlier-*")), "no file was lost or moved"


def last_step(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl. All steps before it must be there, each once."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


def test_wrong_input_is_refused_by_a_rank_that_has_met_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is rank 0 of 2, and rank 1 never comes. With a process group, rank 0 would wait."""
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
