"""`megaspeed plan`: what it prints and writes, its exit codes, its time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspeed.cli import main
from megaspeed.topology.devices import DEVICES
from tests.analysis.planning.tiny_runs import FOLDER

pytestmark = pytest.mark.slow

TWO_BY_TWO_BY_TWO = ("--config", str(FOLDER / "3d.json"), "--world-size", "8")


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_report_names_ranks_stages_and_whether_the_run_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--config", str(FOLDER / "gpt3_175b.json"), "--world-size", "4096")
    out = printed(capsys, *options, "--device", "a100-80gb")
    for expected in (
        "gpt3_175b: pp 8 x dp 64 x tp 8 = 4,096 ranks, ZeRO-1, bf16",
        "model: 174.6B parameters",
        "ideal bubble 22.6% of the step",
        "Ranks: 512 nodes of 8 GPUs",
        "across 64 nodes",
        "1 to 6  12 blocks",
        "FITS: predicted peak",
    ):
        assert expected in out, expected


@pytest.mark.parametrize(
    ("name", "world_size", "columns"),
    [("mt_nlg_530b", 1120, 80), ("gpt3_175b", 1024, 80), ("gpt3_175b", 1024, 40)],
)
def test_no_line_is_wider_than_80_columns_and_no_cell_is_cut(
    name: str,
    world_size: int,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    options = ("--config", str(FOLDER / f"{name}.json"), "--world-size", str(world_size))
    out = printed(capsys, *options, "--device", "a100-80gb", "--what-if")
    assert "\u2026" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_without_a_device_it_states_which_option_names_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, *TWO_BY_TWO_BY_TWO)
    assert "to see whether it fits, add --device h100-80gb" in out
    assert "FIT:" not in out and "FITS" not in out


def test_a_run_that_does_not_fit_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "plan.json"
    config = ("--config", str(FOLDER / "gpt2_1.5b.json"), "--world-size", "2")
    stated = ("zero_optimization.stage=0", "train_micro_batch_size_per_gpu=16")
    options = (*config, "--device", "a10-24gb", "--json", str(figures), "--set", *stated)
    out = printed(capsys, *options)
    assert "DOES NOT FIT: predicted peak" in out
    written = json.loads(figures.read_text())
    assert written["fits"] is False
    change = written["cheapest_change"]
    assert change["fits"] is True and change["world_size"] == 2
    assert f"cheapest change: --set {' '.join(change['set'])} " in out
    assert change["peak_bytes"] <= written["device"]["usable_bytes"]
    assert "\nFITS: predicted peak" in printed(capsys, *options, *change["set"])


def test_the_json_has_every_layout_of_a_what_if(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "plan.json"
    out = printed(capsys, *TWO_BY_TWO_BY_TWO, "--what-if", "--json", str(figures))
    assert "layouts with the least memory" in out and "layouts with the least traffic" in out
    written = json.loads(figures.read_text())
    layouts = written["what_if"]["layouts"]
    assert f"{len(layouts)} layouts are possible, 0 are too large" in out
    own = [layout for layout in layouts if not layout["set"]]
    assert [(each["pp"], each["dp"], each["tp"], each["zero_stage"]) for each in own] == [
        (2, 2, 2, 3)
    ]
    assert own[0]["peak_bytes"] == written["zero_stages"][3]["peak_bytes"]


def test_the_rank_map_follows_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *TWO_BY_TWO_BY_TWO, "--gpus-per-node", "4")
    assert "Ranks: 2 nodes of 4 GPUs" in out
    assert "across 2 nodes" in out


def test_an_unknown_device_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *TWO_BY_TWO_BY_TWO, "--device", "h100"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "there is no device called 'h100'" in err
    assert all(name in err for name in DEVICES)


@pytest.mark.parametrize(
    ("changes", "world_size", "output"),
    [
        ((), "6", "world size 6 (from --world-size) is not divisible by"),
        (("model.preset=gpt3-175",), "8", '"gpt3-175b"'),
        (("parallel.tensor=3",), "12", "valid parallel.tensor: 1, 2, 4"),
    ],
    ids=["world", "preset", "heads"],
)
def test_wrong_input_states_the_mend(
    changes: tuple[str, ...], world_size: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", str(FOLDER / "3d.json"), "--world-size", world_size]
    assert main(["plan", *options, *(["--set", *changes] if changes else [])]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert output in captured.err


@pytest.mark.parametrize(("what_if", "seconds"), [((), 5.0), (("--what-if",), 20.0)])
def test_4480_ranks_take_seconds_and_less_than_a_gigabyte(
    what_if: tuple[str, ...], seconds: float
) -> None:
    """Measured in processor seconds, so that it passes on a busy machine, too."""
    command: list[str | Path] = [Path(sys.executable).with_name("megaspeed"), "plan"]
    command += ["--config", FOLDER / "mt_nlg_530b.json", "--device", "a100-80gb"]
    command += ["--world-size", "4480", *what_if]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert used.ru_utime + used.ru_stime < seconds
    assert used.ru_maxrss * 1024 < 10**9  # Linux counts it in KiB


def test_a_plan_loads_no_deepspeed() -> None:
    code = (
        "import sys; from megaspeed.cli import main; "
        "code = main(['plan', '--config', sys.argv[1], '--world-size', '8']); "
        "sys.exit(code or ' '.join({'deepspeed', 'datasets'} & set(sys.modules)) or None)"
    )
    command = [sys.executable, "-c", code, str(FOLDER / "3d.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
