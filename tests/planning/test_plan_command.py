"""``megaspeed plan``: its output and files, its exit codes, its time and memory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megaspeed.cli import main
from tests.planning.tiny_runs import FOLDER
from tests.support.machine import limit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PROGRESS = re.compile("comparing the variants of the run|searching .*| *[0-9]+%.* left")
"""What a search prints on standard error: a line first, then one every ten seconds."""

TWO_BY_TWO_BY_TWO = ("--config", str(FOLDER / "3d.json"), "--world-size", "8")


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 0
    captured = capsys.readouterr()
    assert all(map(PROGRESS.fullmatch, captured.err.splitlines())), captured.err
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
    ("name", "world_size"),
    [("smollm2_135m", 1), ("smollm2_1.7b", 8), ("smollm3_3b", 32), ("qwen3_30b_a3b", 32)],
)
def test_a_file_to_start_from_has_the_layout_that_the_plan_prefers(
    name: str, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", str(FOLDER / f"{name}.json"), "--world-size", str(world_size))
    out = printed(capsys, *config, "--device", "h100-80gb", "--what-if")
    assert "FITS" in out and "  it is the run as configured\n" in out


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("gpt3_175b", ("--world-size", "1024"), 80),
        ("gpt3_175b", ("--world-size", "1024"), 40),
        ("llama3_70b", ("--world-size", "32", "--what-if"), 40),
        ("experts", ("--world-size", "8", "--what-if", "--set", "parallel.expert=4"), 80),
    ],
)
def test_no_line_is_wider_than_80_columns_and_no_cell_is_cut(
    name: str,
    options: tuple[str, ...],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    config = ("--config", str(FOLDER / f"{name}.json"))
    out = printed(capsys, *config, *options, "--device", "h100-80gb")
    assert "\u2026" not in out
    # A command for the user to copy stays on one line, and so does a sentence about experts.
    long = ("--set", "model: ", "experts: ", "step: ", "warning: ")
    lines = (line for line in out.splitlines() if not any(each in line for each in long))
    assert max(map(len, lines)) <= 80


def test_experts_that_ranks_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = ("--config", str(FOLDER / "experts.json"), "--world-size", "8")
    device, file = ("--device", "h100-80gb"), tmp_path / "plan.json"
    peaks = []
    for factor in ("1", "2.5"):
        own = ("--load-factor", factor, "--json", str(file), "--set", "parallel.expert=4")
        out = printed(capsys, *config, *device, *own)
        assert "ep 4: a rank has 2 experts, exchange all_to_all" in out
        assert ("2.5 x the mean rows" in out) == (factor == "2.5")
        assert "exchange of experts' tokens" in out
        planned = json.loads(file.read_text())["zero_stages"][1]
        peaks.append((planned["peak_bytes"], planned["time"]["seconds"]))
    assert peaks[0] < peaks[1] and peaks[0][1] < peaks[1][1]


@pytest.mark.parametrize(
    ("factor", "ep", "problem"),
    [
        ("2", 1, "--load-factor 2 needs parallel.expert above 1; remove it"),
        ("0.5", 4, "--load-factor 0.5 must be between 1 and parallel.expert 4"),
        ("5", 4, "--load-factor 5 must be between 1 and parallel.expert 4"),
    ],
)
def test_an_impossible_load_factor_is_refused(
    factor: str, ep: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", str(FOLDER / "experts.json"), "--world-size", "8")
    stated = ("--set", f"parallel.expert={ep}")
    assert main(["plan", *config, "--load-factor", factor, *stated]) == 2
    assert problem in capsys.readouterr().err


def test_without_a_device_it_states_which_option_names_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, *TWO_BY_TWO_BY_TWO, "--gpus-per-node", "4")
    assert "Ranks: 2 nodes of 4 GPUs" in out and "across 2 nodes" in out
    assert "to see whether it fits and how long a step takes" in out
    assert "add --device h100-80gb" in out
    assert "FIT:" not in out and "FITS" not in out and "Time in" not in out


def test_a_run_that_does_not_fit_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "plan.json"
    config = ("--config", str(FOLDER / "gpt2_1.5b.json"), "--world-size", "2")
    stated = ("zero_optimization.stage=1", "train_micro_batch_size_per_gpu=16")
    options = (*config, "--device", "a100-40gb", "--json", str(figures), "--set", *stated)
    out = printed(capsys, *options)
    assert "DOES NOT FIT: predicted peak" in out
    written = json.loads(figures.read_text())
    low, high = (size / 2**30 for size in written["zero_stages"][1]["interval_bytes"])
    assert f"interval of nine of ten published runs: {low:.2f} to {high:.2f} GiB" in out
    assert written["verdict"] == "does not fit"
    change = written["cheapest_change"]
    assert f"cheapest change: --set {' '.join(change['set'])} " in out
    assert change["peak_bytes"] <= written["device"]["memory_bytes"]
    assert "\nFITS: predicted peak" in printed(capsys, *options, *change["set"])
    smaller = (*config, "--device", "a10-24gb", "--set", *stated)
    assert "no single change is enough; --what-if lists" in printed(capsys, *smaller)


def test_the_json_has_every_variant_of_a_what_if(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "plan.json"
    options = (*TWO_BY_TWO_BY_TWO, "--device", "a100-80gb", "--what-if", "--json", str(figures))
    out = printed(capsys, *options)
    assert "the fastest variant that fits, for each of" in out
    written = json.loads(figures.read_text())
    layouts = written["what_if"]["layouts"]
    assert f"{len(layouts):,} variants fit, 0 are too large" in out
    own = [layout for layout in layouts if not layout["set"]]
    assert [(each["pp"], each["dp"], each["tp"], each["zero_stage"]) for each in own] == [
        (2, 2, 2, 3)
    ]
    assert own[0]["peak_bytes"] == written["zero_stages"][3]["peak_bytes"]
    assert own[0]["seconds"] == pytest.approx(written["zero_stages"][3]["time"]["seconds"], rel=0.1)


def test_rows_that_are_not_shown_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megaspeed.planning.report._SHOWN_VARIANTS", 2)
    options = (*TWO_BY_TWO_BY_TWO, "--device", "a100-80gb", "--what-if")
    shown = printed(capsys, *options).partition("What if")[2]
    layouts = int(re.findall(r"for each of (\d+) layouts", shown)[0])
    assert f"\nand {layouts - 2} more: --json\n" in shown
    assert len(re.findall(r"^ *\d+ +\d+ +\d+ +[0-3] ", shown, re.MULTILINE)) == 2


def test_the_report_explains_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    device = ("--device", "h100-80gb")
    out = printed(capsys, *TWO_BY_TWO_BY_TWO, *device, "--dollars-per-gpu-hour", "2")
    assert re.search(r"^[\d,.]+ GPU-hours on 8 GPUs, \$", out, re.MULTILINE)
    assert re.search(r"head and loss +0 +0 +0 +0\n", out)
    assert "head and loss: 0 if the slowest stage has no head" in out
    assert "the last stage also holds a copy of the tied embedding" in out
    untied = printed(
        capsys,
        *TWO_BY_TWO_BY_TWO,
        *("--set", "model.tie_word_embeddings=false", "parallel.pipeline=1", *device),
    )
    assert "tied embedding" not in untied and "the slowest stage has no head" not in untied


def test_the_best_configuration_is_written_and_gives_the_run_that_was_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    best, figures = tmp_path / "runs" / "best.json", tmp_path / "plan.json"
    config = ("--config", str(FOLDER / "3d.json"), "--nodes", "1")
    machines = ("--device", "a100-80gb", "--nic-gbps", "200")
    out = printed(
        *(capsys, *config, *machines, "--write", str(best), "--json", str(figures)),
        *("--set", "train_batch_size=64"),
    )
    assert f"written: {best}" in out
    first = json.loads(figures.read_text())["what_if"]["layouts"][0]
    again = tmp_path / "again.json"
    options = ("--config", str(best), "--nodes", "1", *machines, "--json", str(again))
    printed(capsys, *options)
    written = json.loads(again.read_text())
    assert written["batch"]["train_batch_size"] == 64
    assert written["degrees"] == {
        axis: first[axis] for axis in ("pp", "dp", "cp", "tp", "ep", "replicate")
    }
    own = written["zero_stages"][first["zero_stage"]]
    assert written["zero_stage"] == first["zero_stage"]
    assert own["peak_bytes"] == first["peak_bytes"]
    assert own["verdict"] == "fits"


def test_nothing_is_written_if_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.json"
    options = ("--config", str(FOLDER / "mt_nlg_530b.json"), "--world-size", "280")
    assert main(["plan", *options, "--device", "t4-16gb", "--write", str(best)]) == 1
    assert "is not written: no variant fits t4-16gb" in capsys.readouterr().err
    assert not best.exists()


@pytest.mark.parametrize("name", ["run", "base"])
def test_no_file_is_replaced_that_the_written_one_extends(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.json").write_bytes((FOLDER / "base.json").read_bytes())
    (tmp_path / "run.json").write_text('{"extends": "base.json"}')
    file = tmp_path / f"{name}.json"
    before = file.read_bytes()
    config = ("--config", str(tmp_path / "run.json"))
    options = (*config, "--world-size", "2", "--device", "h100-80gb")
    assert main(["plan", *options, "--write", str(file)]) == 2
    assert file.read_bytes() == before
    assert f"would replace {file}, which it extends" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--what-if",), "--what-if needs the figures of a device: add --device h100-80gb"),
        (("--tokens", "1T"), "--tokens needs the figures of a device"),
        (("--device", "cpu", "--nodes", "1"), "nodes does not apply to the device cpu"),
        (("--nodes", "1000000", "--device", "t4-16gb"), "are more than the limit of 1,000,000"),
        (("--nodes", "1", "--world-size", "16"), "16 ranks need more than the 8 devices of 1 node"),
        ((), "the number of ranks is missing: add --world-size, or --nodes"),
        (("--device", "h100", "--nodes", "1"), "there is no device called 'h100'"),
        (("--set", "parallel.tensor=3"), "parallel.tensor: 1, 2, 4"),
        (("--nic-gbps", "5e-324", "--nodes", "1"), "nic_gbps: given 5e-324 (a decimal number), w"),
        (
            ("--nic-gbps", "0", "--nodes", "1"),
            "nic_gbps: given 0.0 (a decimal number), wanted at least 1e-06",
        ),
    ],
)
def test_wrong_machines_state_the_mend(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = () if "--nodes" in options or not options else ("--world-size", "8")
    assert main(["plan", "--config", str(FOLDER / "3d.json"), *world, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


MEASURED = """
import resource, sys
from pathlib import Path
from megaspeed.cli import main
from tests.support.memory import peak
assert main(sys.argv[2:]) == 0
of_a_worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
Path(sys.argv[1]).write_text(str(max(peak(), of_a_worker)))
"""


def test_4480_ranks_take_seconds_and_less_than_a_gigabyte(tmp_path: Path) -> None:
    """The limits are in processor seconds. A what-if predicts thousands of variants.

    An earlier what-if chose by least memory and least traffic. It found pp 56 x dp 40 x tp 2 the
    best, whose bubble is half the step.
    """
    figures, peak = tmp_path / "plan.json", tmp_path / "peak"
    command: list[str | Path] = [sys.executable, "-c", MEASURED, peak, "plan"]
    command += ["--config", FOLDER / "mt_nlg_530b.json", "--device", "a100-80gb"]
    command += ["--world-size", "4480", "--json", figures]

    def seconds_of(*options: str) -> float:
        child = subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        assert int(peak.read_text()) < 10**9
        return used.ru_utime + used.ru_stime

    plan = seconds_of()
    assert plan < limit(5)
    assert seconds_of("--what-if") < 40 * plan
    what_if = json.loads(figures.read_text())["what_if"]
    assert what_if["too_large"] + len(what_if["layouts"]) < 6000, "predicted variants"
    best = what_if["layouts"][0]
    assert best["tp"] == 8
    assert best["terms_seconds"]["bubble"] < 0.25 * best["seconds"]


def test_a_plan_loads_no_deepspeed() -> None:
    code = (
        "import sys; from megaspeed.cli import main; "
        "code = main(['plan', '--config', sys.argv[1], '--world-size', '8']); "
        "sys.exit(code or ' '.join({'deepspeed', 'datasets'} & set(sys.modules)) or None)"
    )
    command = [sys.executable, "-c", code, str(FOLDER / "3d.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PROGRAM = """
import os, signal, sys
from megaspeed.cli import main, plan

signal.signal(signal.SIGINT, signal.default_int_handler)
plan.usable_processors = lambda: 12
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "to", "code", "text"),
    [
        (signal.SIGINT, "all", 130, "megaspeed plan: stopped"),
        (signal.SIGINT, "starter", 130, "megaspeed plan: stopped"),
        (signal.SIGTERM, "starter", 143, "megaspeed plan: stopped"),
        (signal.SIGKILL, "one", 1, "megaspeed plan: a process that compares variants was killed"),
        (signal.SIGKILL, "starter", -9, ""),
    ],
    ids=str,
)
def test_a_search_that_is_stopped_ends_all_its_processes(
    number: int, to: str, code: int, text: str, tmp_path: Path
) -> None:
    """Idle processes used to print tracebacks at Ctrl-C, and the command never ended."""
    command = [sys.executable, "-c", PROGRAM, "plan", "--config", str(FOLDER / "zero_7.5b.json")]
    command += ["--world-size", "64", "--device", "a100-80gb", "--what-if"]
    with (tmp_path / "err").open("w") as err:
        starter = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
        )
        started = psutil.Process(starter.pid)
        try:
            end = time.monotonic() + limit(60)
            while not (tmp_path / "err").read_text() and time.monotonic() < end:
                time.sleep(0.05)
            children = started.children()
            assert len(children) == 12
            if to == "all":
                os.killpg(starter.pid, number)
            else:
                os.kill(starter.pid if to == "starter" else children[0].pid, number)
            assert starter.wait(limit(15)) == code
            _, left = psutil.wait_procs(children, timeout=limit(10))
            assert not left
        finally:
            with suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGKILL)
    first, *others = (tmp_path / "err").read_text().splitlines()
    assert PROGRESS.fullmatch(first)
    assert [line[: len(text)] for line in others] == [text] * bool(text)
