"""``megaspeed compare``, from the command line to the exit code, on real ranks."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaspeed.cli import main
from megaspeed.measurement.turns import noise_of
from megaspeed.supervision.process_end import ended_on_termination
from tests.support.machine import limit
from tests.support.tiny import GPT2, merge

pytestmark = pytest.mark.ranks

TEXT = Path(__file__).parents[3] / "LICENSE"
MEGASPEED = Path(sys.executable).with_name("megaspeed")
FILES = {"compare.json", "compare.md", "compare.png", "logs"}
_SECONDS_TO_START, _SECONDS_TO_END = limit(120), limit(60)

VALUES: dict[str, Any] = {
    "model": GPT2,
    "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
    "training": {"steps": 10},
    "train_batch_size": 12,
    "gradient_accumulation_steps": 1,
}


def write_config(folder: Path, **changes: Any) -> Path:
    file = folder / "tiny.json"
    file.write_text(json.dumps(merge(VALUES, changes)))
    return file


def command(config: Path, *options: str) -> list[str]:
    out = config.with_name("out")
    return [
        *(str(MEGASPEED), "compare", "--config", str(config), "--world-size", "2"),
        *("--turns", "2", "--steps", "1", "--output", str(out)),
        *options,
    ]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a user whose PATH does not contain the virtual environment."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "MEGASPEED_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


TORCHRUN = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the ranks of this process. They are forked from a child that has imported their
    modules.
    """
    return [rank for child in process.children() for rank in child.children()]


@pytest.mark.timeout(400)
def test_stages_and_a_baseline_side_by_side(tmp_path: Path) -> None:
    """The command is started as a rank of torchrun. Its own ranks use another master port."""
    config = write_config(tmp_path)
    done = subprocess.run(
        command(config, "--stages", "3", "--baselines", "ddp", "--json", f"{tmp_path}/f.json"),
        env={**environment(tmp_path), **TORCHRUN},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES
    figures = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert json.loads((tmp_path / "f.json").read_text()) == figures
    assert figures["notes"] == []
    assert figures["verdict"].startswith("use ZeRO-3 here (--set zero_optimization.stage=3): ")
    assert f"verdict: {figures['verdict']}"[:60] in done.stdout
    rows = {row["label"]: row for row in figures["rows"]}
    assert list(rows) == ["ZeRO-3", "DDP"]
    for row in rows.values():
        assert row["label"] in done.stdout and len(row["turn_seconds"]) == 2
        assert row["step_time_seconds"] == pytest.approx(math.prod(row["turn_seconds"]) ** 0.5)
        assert row["losses"] == pytest.approx(rows["DDP"]["losses"], rel=1e-6)
        assert len(row["losses"]) == 2, "one step is warm-up"
    turns = [[row["turn_seconds"][number] for row in rows.values()] for number in (0, 1)]
    assert figures["noise"] == pytest.approx(noise_of([*zip(*turns, strict=True)]))
    zero, ddp = (stage["states_bytes"] for stage in figures["pipeline_stages"])
    assert ddp["predicted"] is None
    assert zero["predicted"]["total"] == pytest.approx(zero["measured"]["total"], rel=0.02)
    # DDP keeps two complete moments. ZeRO on two ranks keeps half of the moments and of the fp32
    # master weights.
    halved, whole = (each["measured"]["optimizer_states"] for each in (zero, ddp))
    assert halved / whole == pytest.approx((4 + 8) / 2 / 8, rel=0.02)


@pytest.mark.timeout(400)
def test_ctrl_c_leaves_no_process_running(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = subprocess.Popen(
        command(config, "--stages", "1"),
        env={**environment(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = time.monotonic()
    while len(ranks := ranks_of(psutil.Process(process.pid))) < 2:
        assert process.poll() is None and time.monotonic() - started < _SECONDS_TO_START
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=_SECONDS_TO_END)
    assert process.returncode == 130, out + err
    assert "megaspeed compare: stopped" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "compare.json").exists()
    assert not any(rank.is_running() for rank in ranks)


def test_a_termination_ends_what_was_started_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), ended_on_termination():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


WRONG: dict[str, tuple[dict[str, Any], Sequence[str], str]] = {
    "a baseline with a pipeline": (
        {"parallel": {"pipeline": 2}},
        ["--baselines", "fsdp"],
        "parallel.pipeline is 2 and parallel.tensor is 1; set both to 1, or omit --baselines",
    ),
    "a baseline with Muon": (
        {"optimizer": {"type": "Muon"}},
        ["--baselines", "ddp"],
        'optimizer.type is "Muon"; set it to "AdamW", or omit --baselines',
    ),
    "more ranks than this machine takes": (
        {"train_batch_size": 4096},
        ["--world-size", "4096"],
        "--world-size 4096 is more than the ",
    ),
    "a folder that is a file": ({}, ["--output", str(TEXT)], "is a file; name another folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_with_the_mend(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    changes, options, printed = WRONG[name]
    config = write_config(tmp_path, **changes)
    assert main([*command(config)[1:], *options]) == 2
    err = capsys.readouterr().err
    assert printed in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "0"],
        ["--turns", "0"],
        ["--stages", "4"],
        ["--baselines", "horovod"],
        ["--timeout", "0"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_wrong_input(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command(write_config(tmp_path))[1:], *options])
    assert stop.value.code == 2
    assert f"argument {options[0]}: " in capsys.readouterr().err
