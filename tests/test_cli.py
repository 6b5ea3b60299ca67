"""The ``megaspeed`` command: exit codes 0, 1 and 2, every problem at once, figures as JSON.

``measurement/verification/test_verify.py`` runs ``megaspeed verify`` completely.
"""

import functools
import json
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspeed.cli import main, parse
from megaspeed.job.pretrain import parse_arguments
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.pipeline.simulation import format_grid
from tests.pipeline.shapes import shape
from tests.support.machine import limit

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "ds_configs"
RUNS_ON_ANY_DATA_DEGREE = ("base", "zero0", "zero1", "zero2", "zero3", "zero3_offload")

WRONG = {
    "model": {"preset": "gpt2-nano", "hiden_size": 3},
    "parallel": {"tensor": 3},
    "data": {"train": ["/no/such/place/*.txt"], "sequence_length": 16},
    "training": {"steps": 3},
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "fp16": {"enabled": True},
}
PROBLEMS = (
    "model.hiden_size is an unknown key; the nearest known key is model.hidden_size",
    "model.num_attention_heads 4 must be divisible by parallel.tensor 3",
    "world size 4 (from --world-size) is not divisible by",
    "fp16.enabled is true, but this run is on a CPU",
    "data.train: a glob must match at least one file, but '/no/such/place/*.txt' matches 0",
)


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(WRONG))
    return file


def check(file: Path, *options: str) -> int:
    return main(["check", "--config", str(file), *options])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", RUNS_ON_ANY_DATA_DEGREE)
def test_every_file_of_ds_configs_is_right_at_1_2_and_4_processes(
    name: str, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FOLDER / f"{name}.json"
    assert check(file, "--world-size", str(world_size), "--device", "cpu") == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(f"\n{file}: no problem found\n") and printed.err == ""
    assert printed.out.startswith(f"{name}: pp 1 x dp {world_size} x tp 1 = ")


@pytest.mark.parametrize(
    ("name", "world_size", "device"),
    [("3d", 8, "cpu"), ("3d", 4, "cpu"), ("gpt2_1.5b", 8, "cuda"), ("gpt2_1.5b", 32, "cuda")],
)
def test_the_larger_files_are_right_at_their_sizes(name: str, world_size: int, device: str) -> None:
    options = ("--world-size", str(world_size), "--device", device)
    assert check(FOLDER / f"{name}.json", *options) == 0


def test_check_describes_the_run_as_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    file = FOLDER / "3d.json"
    assert main(["plan", str(file), "--world-size", "8"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert check(file, "--world-size", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-3] == planned[: planned.index("")]
    assert lines[-3] == "length: 120 steps, 491,520 tokens", "120 x 32 x 128"
    peak = next(line for line in planned if line.startswith("predicted peak ")).split(";")[0]
    assert lines[-2].startswith(f"memory: {peak};")
    schedule = ('train_batch_size_schedule="0:16 60:32"', "train_batch_size=null")
    assert check(file, "--world-size", "8", "--set", *schedule) == 0
    expected = "length: 120 steps, 368,640 tokens"  # 60 x 16 x 128 + 60 x 32 x 128
    assert capsys.readouterr().out.splitlines()[-3] == expected


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ((), "the smallest layout, because parallel.data is auto; others: --world-size N"),
        (("parallel.data=2",), "3d: pp 2 x dp 2 x tp 2 = 8 ranks, ZeRO-3, fp32"),
        (
            ("train_micro_batch_size_per_gpu=4", "gradient_accumulation_steps=4"),
            "model: 1,082,112 parameters; --world-size N shows the layout",  # only dp 2 is right
        ),
    ],
)
def test_check_describes_what_is_known_without_a_number_of_processes(
    changes: tuple[str, ...], first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(FOLDER / "3d.json", *(("--set", *changes) if changes else ())) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == first
    assert changes or lines[1].startswith("3d: pp 2 x dp 1 x tp 2 = 4 ranks")


@pytest.mark.parametrize("command", ["check", "plan", "schedule"])
def test_a_file_directly_after_the_command_is_the_configuration(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(FOLDER / "3d.json"), "--world-size", "8"]) == 0
    words = ["--local_rank=0", command, str(FOLDER / "nothing.json"), "--world-size", "8"]
    assert main(words) == 2
    assert "nothing.json does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    "words", [["training.steps=10"], ["--training.steps=10"], ["--training.steps", "10"]]
)
def test_a_key_as_an_option_is_refused_with_how_to_state_it(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        if command == "train":
            parse_arguments(["--config", str(FOLDER / "3d.json"), *words], as_command=True)
        main([command, str(FOLDER / "3d.json"), *words])
    err = capsys.readouterr().err
    assert err.startswith(f"usage: megaspeed {command} ")
    assert err.endswith("; a key is stated with --set training.steps=10\n")


def test_a_dataset_is_not_taken_for_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """``tokenize`` has the option ``--configuration``, but no ``--config``."""
    assert main(["tokenize", "wikitext", "--tokenizer", "t", "--output", "/tmp/new"]) == 2
    err = capsys.readouterr().err
    assert err.endswith("or name a dataset of Hugging Face with --dataset wikitext\n")


def test_a_bar_on_standard_error_leaves_standard_output_unchanged(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megaspeed.cli", "show-batch", str(FOLDER / "base.json")]
    words += ["--step", "1", "--set", f'data.train=["{ROOT / "LICENSE"}"]', "model.vocab_size=300"]
    variables = {**os.environ, "MEGASPEED_CACHE": str(tmp_path), "TERM": "xterm"}
    terminal, inside = pty.openpty()
    run = functools.partial(subprocess.run, words, text=True, env=variables, cwd=ROOT, check=True)
    out = [run(stdout=subprocess.PIPE, stderr=err) for err in (inside, subprocess.PIPE)]
    assert "preparing the corpus" in os.read(terminal, 65536).decode()
    assert out[0].stdout == out[1].stdout and "samples 0 ... 15" in out[0].stdout
    assert out[1].stderr == ""


def test_all_problems_are_reported_at_once(
    wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "problems.json"
    options = ("--world-size", "4", "--device", "cpu", "--json", str(figures))
    assert check(wrong, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{len(PROBLEMS)} problems in {wrong}:\n  1. ")
    for problem in PROBLEMS:
        assert printed.err.count(problem) == 1, problem
    written = json.loads(figures.read_text())
    assert written["config"] == str(wrong)
    assert len(written["problems"]) == len(PROBLEMS)
    assert all(problem in printed.err for problem in written["problems"])


def test_without_a_number_of_processes_what_needs_it_is_left_out(
    wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(wrong) == 2
    err = capsys.readouterr().err
    assert "hiden_size" in err and "/no/such/place" in err
    assert "world size" not in err and "fp16" not in err


@pytest.mark.parametrize("command", ["schedule", "verify"])
def test_every_command_refuses_wrong_input_with_all_problems(
    command: str, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", str(wrong), "--world-size", "4"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(printed.err.count(problem) == 1 for problem in PROBLEMS)


def test_a_problem_is_mended_with_set(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mended = ("parallel.tensor=2", "fp16.enabled=false", 'data.train=["python-stdlib"]')
    options = ("--world-size", "4", "--device", "cpu", "--set", *mended)
    assert check(wrong, *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("1 problem in") and "hiden_size" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('data.train=["~nosuchuser/x.txt"]', "data.train: there is no file "),
        ("data.tokenizer=~nosuchuser/t", "data.tokenizer is "),
        (f"training.steps={'1' * 5000}", "training.steps: given "),
        ("model.vocab_size=256", "a byte-level BPE has at least 257 entries"),
    ],
    ids=["text of nobody", "tokenizer of nobody", "5,000 digits", "vocabulary"],
)
def test_what_cannot_be_used_is_one_problem_and_no_traceback(
    change: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(FOLDER / "base.json", "--set", change) == 2
    err = capsys.readouterr().err
    assert err.startswith("1 problem in") and said in err
    assert len(err) < 600


def test_a_file_that_does_not_exist_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(FOLDER / "zero33.json") == 2
    err = capsys.readouterr().err
    assert "zero33.json does not exist; did you mean" in err and "zero3.json?" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["check"],
        ["check", "--config", "x.json", "--world-size", "0"],
        ["schedule", "--config", str(FOLDER / "3d.json")],
        ["schedule", "--config", "x.json", "--world-size", "8", "--picture", "step.gif"],
        ["schedule", "--config", "x.json", "--world-size", "8", "--picture", "/no/place/step.png"],
        ["check", "--config", "x.json", "--json", "/no/such/place/figures.json"],
        ["check", "--config", "x.json", "--json", "/tmp"],
        ["check", "--config", "x.json", "--json", "/dev/null"],
        ["report", "x", "--output", "/dev/null"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_wrong_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: megaspeed")


PATHS = {
    "check": "check --config {0} --json {0}",
    "compare": "compare --config {0} --world-size 1 --out {0}",
    "scaling": "scaling --config {0} --world-sizes 1 --output {0}",
    "checkpoint": "checkpoint show {0} --json {0}",
    "import-hf": "import-hf {0} {0} --json {0}",
    "export-hf": "export-hf {0} {0} --tokenizer {0} --json {0}",
    "generate": "generate --checkpoint {0} --tokenizer {0} --json {0}",
    "evaluate": "evaluate --checkpoint {0} --tokenizer {0} --json {0}",
    "train-tokenizer": "train-tokenizer --vocab-size 300 --output={0} --json={0}",
    "tokenize": "tokenize --output={0} --tokenizer={0} --json={0}",
}


@pytest.mark.parametrize("command", PATHS)
def test_every_path_of_a_command_line_may_begin_with_ones_home(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell does not expand the ~ of --output=~/x or of a quoted path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = vars(parse(PATHS[command].format("~/x").split()))
    paths = [value for value in parsed.values() if isinstance(value, Path)]
    assert len(paths) == PATHS[command].count("{0}")
    assert set(paths) == {tmp_path / "x"}


@pytest.mark.parametrize("command", PATHS)
@pytest.mark.parametrize("name", ["caf\udce9", ""], ids=["Latin-1", "empty"])
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_done(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse([word.format(name) for word in PATHS[command].split()])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "a path must be UTF-8" in message if name else "the path is empty" in message


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedule_prints_the_grid_and_writes_the_bubble(
    schedule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    config, figures = tmp_path / "pipeline.json", tmp_path / "schedule.json"
    values = {
        "model": {"preset": "gpt2-tiny"},
        "parallel": {"pipeline": 4, "schedule": schedule},
        "data": {"sequence_length": 16},
        "training": {"steps": 3},
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
    }
    config.write_text(json.dumps(values))
    options = ["--config", str(config), "--world-size", "8", "--json", str(figures)]
    picture = tmp_path / "schedule.svg"
    assert main(["schedule", *options, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"written: {picture}\n") and "<svg" in picture.read_text()
    assert out.startswith(format_grid(shape(schedule, 4, 4)))
    bubble = 3 / (4 + 3)
    assert f"ideal bubble: {bubble:.1%} of the step" in out
    assert json.loads(figures.read_text()) == {"bubble_fraction": bubble}
    many = ["train_batch_size=128", "gradient_accumulation_steps=64"]
    assert main(["schedule", *options, "--set", *many]) == 0
    out = capsys.readouterr().out
    assert out.startswith(format_grid(shape(schedule, 4, 64), 80))
    assert max(map(len, out.splitlines())) <= 80


def test_check_reports_bf16_on_a_cpu_without_its_instructions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    figures = tmp_path / "figures.json"
    options = ("--json", str(figures), "--device", "cpu", "--set", "bf16.enabled=true")
    assert check(FOLDER / "3d.json", *options) == 0
    (note,) = json.loads(figures.read_text())["notes"]
    assert "times as long as in fp32 on this CPU (measured" in note
    assert capsys.readouterr().out.startswith(f"note: {note}\n")


@pytest.mark.parametrize("name", ["check --device cpu", "check --set bf16.enabled=true", "plan"])
def test_checking_and_planning_load_no_torch(name: str) -> None:
    code = (
        "import sys; from megaspeed.cli import main; "
        "code = main([*sys.argv[1:], '--world-size', '8']); "
        "sys.exit(code or ' '.join({'torch', 'deepspeed', 'datasets'} & set(sys.modules)) or None)"
    )
    command = [sys.executable, "-c", code, *name.split(), "--config", str(FOLDER / "3d.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "modules"),
    [
        ("import runpy; runpy.run_path('scripts/pretrain.py')", {"options", "train"}),
        ("from megaspeed.cli import parse; parse(['plan', '--config', 'x'])", {"options", "plan"}),
    ],
)
def test_a_command_is_imported_when_it_is_called(program: str, modules: set[str]) -> None:
    """In an earlier version, every rank imported all commands: 74 files of megaspeed, now 20."""
    code = f"{program}; import sys; print(*(name for name in sys.modules if 'megaspeed' in name))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in done.stdout.split() if name.startswith("megaspeed.")]
    assert {name[14:] for name in names if name.startswith("megaspeed.cli.")} == modules
    assert "train" not in modules or len(names) < 25


def test_check_takes_less_than_2_seconds() -> None:
    """These are processor seconds of a machine with factor 1."""
    command: list[Any] = [Path(sys.executable).with_name("megaspeed"), "check"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, "--config", FOLDER / "3d.json"], check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < limit(2)


def test_too_few_open_files_are_one_message_with_the_limit() -> None:
    command = [sys.executable, "-m", "megaspeed.cli", "train", "--world-size", "2"]
    command += ["--config", str(FOLDER / "base.json")]
    limited = ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    first, line = done.stderr.splitlines()
    assert first == "1 problem in this machine:"
    assert "but this system allows 20: raise the hard limit (ulimit -Hn" in line


@pytest.mark.parametrize(
    ("stage", "changes", "expected"),
    [
        # gathers and their bytes, reductions and theirs, compressed buckets: of a step
        (3, {}, ("in each backward", "reduce-scatter in fp32", "4 shards")),
        (1, {"parallel.replicate": 2}, ("after the backwards", "then all-reduce", "2 replicas")),
        (1, {"parallel.gradient_compression": "int8"}, ("after the backwards", "int8", "4 shards")),
        (0, {}, ("after the backwards", "all-reduce in fp32", "4 replicas")),
        (1, {"optimizer": '{"type": "Muon"}'}, ("orthogonalize in a step", "largest / mean load")),
    ],
)
def test_schedule_prints_what_a_stage_reduces_and_gathers(
    stage: int,
    changes: dict[str, Any],
    expected: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bytes of all instructions are those of a step."""
    file = tmp_path / "axis.json"
    settings = {"zero_optimization.overlap_comm": "false", **changes}
    sets = [f"{key}={value}" for key, value in settings.items()]
    config = ["--config", str(FOLDER / f"zero{stage}.json"), "--world-size", "4", "--set", *sets]
    assert main(["schedule", *config, "--data-axis", "0", "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in expected)
    figures = json.loads(file.read_text())["data_axis"]
    elements = sum(bucket["elements"] for bucket in figures["buckets"])
    assert elements == 1_082_112  # of a model of 4 blocks and width 128
    works = figures["works"]
    gathered = sum(work["gathered_bytes"] for work in works)
    reduced = sum(work["reduced_bytes"] for work in works)
    compressed = sum(work["compressed"] for work in works)
    if stage == 1:
        assert works[-1]["gathered_bytes"] == gathered == 4 * elements
    matrices = sum(b["elements"] for b in figures["buckets"] if "int8" in b["collective"])
    replicated = elements // 2 if "parallel.replicate" in changes else 0
    if stage < 3:
        assert reduced == 4 * (elements - matrices + replicated)
    assert (compressed > 0) == (matrices > 0)


@pytest.mark.parametrize(
    ("stage", "changes", "over"),
    [
        (3, (), "2 shards"),
        (0, (), "2 replicas"),
        (1, ("parallel.expert=4",), ""),
        (1, ("parallel.expert=1", "parallel.replicate=2"), "2 shards x 2 replicas"),
        (1, ("parallel.expert=1", "parallel.tensor=2"), "4 shards"),
    ],
)
def test_schedule_prints_the_copies_of_experts(
    stage: int, changes: tuple[str, ...], over: str, tmp_path: Path
) -> None:
    file = tmp_path / "axis.json"
    config = ["--config", str(FOLDER / "experts.json"), "--world-size", "4"]
    sets = ["--set", "parallel.expert=2", f"zero_optimization.stage={stage}", *changes]
    assert main(["schedule", *config, *sets, "--data-axis", "0", "--json", str(file)]) == 0
    buckets = json.loads(file.read_text())["data_axis"]["buckets"]
    of_experts = [b for b in buckets if "blocks.0.mlp.down.weight" in b["parameters"]]
    assert of_experts and all(bucket["over"] == over for bucket in of_experts)


def test_a_pipeline_stage_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ["--config", str(FOLDER / "3d.json"), "--world-size", "4"]
    assert main(["schedule", *config, "--data-axis", "2"]) == 2
    assert "they are counted from 0 to 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["schedule", *config, "--data-axis", "-1"])
    assert "counted from 0" in capsys.readouterr().err
