"""``megaspeed scaling``: real rows, and figures that a person can check."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.run import PowerSgdCompression
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.scaling import (
    LABELS,
    ScaledRow,
    ScalingResult,
    StepParts,
    part_of_turn,
    predict,
    scaled_rows,
    split_step,
)
from megaspeed.measurement.scaling_report import report
from megaspeed.measurement.timed_steps import Steps, take_turn
from megaspeed.measurement.turns import Device, TimedRank, take_turns
from megaspeed.topology.activity import PARTS
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import Load, Worker
from tests.support.rank_pool import RankPool
from tests.support.tiny import GPT2, merge, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
MICRO: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": None}
VALUES: dict[str, Any] = {
    "model": GPT2,
    "data": {"train": [str(TEXT)], "validation_fraction": 0.0, "sequence_length": 16},
    "training": {"steps": 10},
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
}


def of_rank(**seconds: float) -> list[float]:
    """Return what ``pop_seconds`` returns for step 4."""
    return [4.0, *(seconds.get(part, 0.0) for part in PARTS)]


def only_nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {part: round(seconds, 9) for part, seconds in parts.items() if abs(seconds) > 1e-12}


def test_the_rank_that_waits_least_shows_what_communication_costs() -> None:
    """Rank 1 computes 4 s longer. So rank 0 waits 4 s in the all-reduce, a mean of 2 s."""
    ranks = [of_rank(compute=10, data=5, optimizer=1), of_rank(compute=14, data=1, optimizer=1)]
    found = split_step(ranks, Grid(pp=1, dp=2, tp=1), bubble=0.0)
    assert set(found) == set(LABELS)
    assert only_nonzero(found) == {"compute": 12, "data": 1, "imbalance": 2, "optimizer": 1}


def test_each_group_of_an_axis_has_a_rank_that_waits_least() -> None:
    """Tensor groups are ranks 0 1 and 2 3, data groups 0 2 and 1 3. All ranks take 9 s."""
    ranks = [
        of_rank(compute=4, tensor=3, data=2),
        of_rank(compute=5, tensor=2, data=2),
        of_rank(compute=4, tensor=4, data=1),
        of_rank(compute=1, tensor=4, data=3, world=1),
    ]
    found = split_step(ranks, Grid(pp=1, dp=2, tp=2), bubble=0.0)
    assert found["tensor"] == 3.0, "the mean of 2 and 4"
    assert found["data"] == 1.5, "the mean of 1 and 2"
    # 0.25 s before tensor messages, 0.5 s before those of the data axis, 0.25 s at the end
    assert found["imbalance"] == 1.0
    assert sum(found.values()) == 9.0


@pytest.mark.parametrize(
    ("pipeline", "world", "expected"),
    [
        # 3 micro-batches on 2 stages: the bubble is a quarter of the time, 3 s beside 9 s of work
        ((3.0, 0.0), (0.5, 3.5), {"bubble": 3, "world": 0.5}),
        ((5.0, 2.0), (0.5, 3.5), {"bubble": 3, "world": 0.5, "pipeline": 2}),
        ((7.0, 0.0), (0.5, 3.5), {"bubble": 3, "world": 0.5, "imbalance": 2}),
        ((1.0, 0.0), (0.0, 1.0), {"bubble": 1}),
    ],
    ids=["equal stages", "slow messages", "uneven stages", "less than the bubble"],
)
def test_waits_for_stages_are_bubble_then_messages(
    pipeline: tuple[float, float], world: tuple[float, float], expected: dict[str, float]
) -> None:
    """The last stage waits for the first one at the end of the step, in the all-reduce."""
    ranks = [of_rank(compute=9, pipeline=p, world=w) for p, w in zip(pipeline, world, strict=True)]
    found = split_step(ranks, Grid(pp=2, dp=1, tp=1), bubble=0.25)
    assert only_nonzero(found) == {"compute": 9, **expected}


def step_of(ranks: int, tokens: int, **seconds: float) -> StepParts:
    parts = dict.fromkeys(LABELS, 0.0) | seconds
    return StepParts(ranks=ranks, tokens=tokens, parts=parts)


def test_efficiency_and_what_is_lost_add_up_to_one() -> None:
    base = step_of(1, 800, compute=8.0)
    strong = step_of(4, 800, compute=3.0, data=1.0)
    assert strong.tokens_per_second == 200
    assert strong.efficiency(base) == pytest.approx(200 / (4 * 100))
    # ideal are 2 s of computation; of 4 s, 1 s is extra computation and 1 s is communication
    assert only_nonzero(strong.lost(base)) == {"compute": 0.25, "data": 0.25}
    weak = step_of(4, 3200, compute=8.0, data=2.0)
    assert weak.efficiency(base) == pytest.approx(320 / 400)
    assert only_nonzero(weak.lost(base)) == {"data": 0.2}
    of_two = step_of(2, 800, compute=5.0)
    assert strong.efficiency(of_two) == pytest.approx(200 / (2 * 160))
    for step in (strong, weak):
        assert step.efficiency(base) + sum(step.lost(base).values()) == pytest.approx(1)


def test_single_slow_steps_do_not_count() -> None:
    """Of 8 steps, the two fastest and the two slowest are dropped."""
    run = tiny_run(TEXT)
    seconds = [9.0, 1.0, 4.0, 2.0, 100.0, 3.0, 5.0, 6.0]
    row = trained(ScaledRow(label="1 rank", run=run), [[of_rank(compute=x)] for x in seconds])
    assert row.measured.seconds == (3 + 4 + 5 + 6) / 4


def trained(
    row: ScaledRow,
    timelines: Sequence[Sequence[Sequence[float]]],
    *,
    device: str = "CPU",
    threads: int = 1,
) -> ScaledRow:
    rank = TimedRank(
        losses=[1.0],
        grad_norm=1.0,
        skipped_steps=0,
        warm_up_seconds=[],
        step_seconds=[],
        peak_bytes=1,
        device=Device(name=device, memory_bytes=1, threads=threads),
    )
    ranks = row.run.grid.world_size
    return replace(row, turns=[[rank] * ranks], extras=[[timelines] * ranks])


def shared(processors: int, **changes: Any) -> ScalingResult:
    rows = [
        trained(row, [[of_rank(compute=1)] * row.ranks], **changes)
        for row in scaled_rows(tiny_run(TEXT, **MICRO), [1, 2, 4], "strong", "cpu")
    ]
    return ScalingResult(mode="strong", steps=1, turns=1, rows=rows, processors=processors)


def test_ranks_that_share_processors_cannot_be_efficient() -> None:
    result = shared(processors=2)
    assert [result.most_efficiency(row) for row in result.rows] == [1, 1, 0.5]
    (note,) = result.notes
    assert note.startswith("4 ranks share 2 processors, so tokens/s cannot grow")
    text = report(result).on_screen
    assert "at most" in text and max(map(len, text.splitlines())) <= 80
    all_share = shared(processors=1)
    assert [all_share.most_efficiency(row) for row in all_share.rows] == [1, 0.5, 0.25]
    alone = replace(result, rows=result.rows[2:])
    assert alone.most_efficiency(alone.rows[0]) == 1, "it is the base"
    (note,) = alone.notes
    assert note.startswith("4 ranks share 2 processors") and "at most" not in note
    assert list(shared(processors=4).notes) == []
    threads = shared(processors=4, threads=2)
    assert [threads.most_efficiency(row) for row in threads.rows] == [1, 1, 0.5]
    gpus = shared(processors=2, device="NVIDIA H200")
    assert list(gpus.notes) == [] and "at most" not in report(gpus).on_screen


@pytest.mark.parametrize(
    ("mode", "batches"), [("strong", [24, 24, 24]), ("weak", [24, 48, 96])], ids=str
)
def test_the_batch_of_each_number_of_ranks(mode: Any, batches: list[int]) -> None:
    """At 2 ranks and pp 2, dp is 1, and a step has 8 micro-batches of 3."""
    base = tiny_run(TEXT, pp=2, **MICRO)
    runs = [row.run for row in scaled_rows(base, [2, 4, 8], mode, "cpu")]
    assert runs[0].batch == base.batch and runs[0].as_json() == base.as_json()
    assert [run.grid for run in runs] == [Grid(2, dp, 1) for dp in (1, 2, 4)]
    assert [run.batch.train_batch_size for run in runs] == batches
    assert {run.batch.micro_batch_size for run in runs} == {3}
    micro_batches = [run.batch.gradient_accumulation_steps for run in runs]
    assert micro_batches == ([8, 4, 2] if mode == "strong" else [8, 8, 8])


def test_compressed_gradients_are_compressed_in_the_timed_steps() -> None:
    how = {"type": "powersgd", "rank": 2, "start_step": 20}
    base = tiny_run(TEXT, parallel={"gradient_compression": how}, **MICRO)
    _, two = scaled_rows(base, [1, 2], "strong", "cpu")
    compression = two.run.config.parallel.gradient_compression
    assert isinstance(compression, PowerSgdCompression)
    assert (compression.rank, compression.start_step) == (2, 1)


def test_a_batch_that_does_not_divide_is_refused_with_both_mends() -> None:
    with pytest.raises(ConfigError) as error:
        scaled_rows(tiny_run(TEXT, **MICRO), [1, 3, 16], "strong", "cpu")
    problems = error.value.problems
    assert [problem.split(".")[0] for problem in problems] == [
        "train_batch_size 24 is not a multiple of train_micro_batch_size_per_gpu 3 x dp 3 (= 9)",
        "train_batch_size 24 is not a multiple of train_micro_batch_size_per_gpu 3 x dp 16 (= 48)",
    ]
    assert all(
        problem.endswith("or use --weak: each rank keeps its micro-batches") for problem in problems
    )
    assert len(scaled_rows(tiny_run(TEXT, **MICRO), [1, 3, 16], "weak", "cpu")) == 3


def test_gpus_are_predicted_from_the_table() -> None:
    run = tiny_run(TEXT, pp=2, dp=2, tp=2)
    step = predict(run, "NVIDIA H200")
    assert (step.ranks, step.tokens) == (8, run.tokens_per_step)
    assert all(step.parts[part] > 0 for part in ("compute", "tensor", "data", "bubble"))
    assert step.parts["imbalance"] == step.parts["data_loading"] == 0
    with pytest.raises(LookupError, match="does not have Abacus 9000"):
        predict(run, "Abacus 9000")


STEPS = Steps(warm_up=3, timed=4, timeout_seconds=200.0, extra="parts")


def train(rows: list[ScaledRow], folder: Path) -> list[ScaledRow]:
    corpus = tiny_corpus(rows[0].run, folder / "cache")
    part = partial(part_of_turn, corpus, STEPS)
    done, stopped = take_turns(
        rows, 1, part, device_type="cpu", folder=folder, timeout_seconds=200.0
    )
    assert not stopped
    return done


@pytest.mark.timeout(300)
def test_parts_add_up_to_the_wall_time(pool: RankPool, tmp_path: Path) -> None:
    rows = scaled_rows(tiny_run(TEXT, pp=2, **MICRO), [2, 4], "weak", "cpu")
    for row in train(rows, tmp_path):
        assert row.done, row.failure
        timelines, wall_seconds = row.extras[0][0], row.turns[0][0].step_seconds
        assert len(timelines) == len(wall_seconds) == 4
        assert [ranks[0][0] for ranks in timelines] == [4, 5, 6, 7], "three steps are warm-up"
        sums = [sum(sum(rank[1:]) for rank in ranks) for ranks in timelines]
        assert sum(sums) / row.ranks == pytest.approx(sum(wall_seconds), rel=0.05)
        measured = row.measured
        assert measured.tokens == 16 * 24 * row.run.grid.dp
        assert min(wall_seconds) * 0.95 < measured.seconds < max(wall_seconds) * 1.05
        for part in ("compute", "pipeline", "bubble", "world", "optimizer"):
            assert measured.parts[part] >= 0 and (part == "pipeline" or measured.parts[part] > 0)


_SLOW_SECONDS = 0.05


def train_with_a_slow_rank(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, rank: int
) -> list[Any]:
    """Train with a rank ``rank`` that reads its only micro-batch 50 ms later."""
    load: Callable[..., Load] = StepInputs.load

    def slow(self: StepInputs, samples: int) -> Load:
        def read(number: int) -> Any:
            time.sleep(_SLOW_SECONDS)
            return load(self, samples)(number)

        return read

    try:
        if launch.rank == rank:
            StepInputs.load = slow  # type: ignore[method-assign]
        return list(take_turn(launch, Worker, run, corpus, STEPS))
    finally:
        StepInputs.load = load  # type: ignore[method-assign]


def test_a_slow_rank_is_imbalance_not_communication(pool: RankPool, tmp_path: Path) -> None:
    """The slow rank waits 50 ms for data, a mean of 25 ms. The other one waits for it."""
    run = tiny_run(TEXT, dp=2, train_batch_size=6, **MICRO)
    corpus = tiny_corpus(run, tmp_path)
    found = []
    for slow in (-1, 1):
        _, timelines = pool.run(2, train_with_a_slow_rank, run, corpus, slow)[0]
        found.append(trained(ScaledRow(label="2 ranks", run=run), timelines).measured.parts)
    fast, slow_parts = found
    half = pytest.approx(_SLOW_SECONDS / 2, abs=0.012)
    assert slow_parts["data_loading"] - fast["data_loading"] == half
    assert slow_parts["imbalance"] - fast["imbalance"] == half
    assert slow_parts["data"] - fast["data"] < 0.012


def command(folder: Path, *options: str, **changes: Any) -> list[str]:
    file = folder / "tiny.json"
    file.write_text(json.dumps(merge(VALUES, changes)))
    return ["scaling", "--config", str(file), "--output", str(folder / "out"), *options]


@pytest.fixture
def on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))


@pytest.mark.timeout(400)
def test_the_command_measures_and_writes(
    pool: RankPool, on_cpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--world-sizes", "2", "1", "--steps", "2", "--no-prediction"]
    assert main(command(tmp_path, *words, "--json", str(tmp_path / "f.json"))) == 0
    printed, out = capsys.readouterr().out, tmp_path / "out"
    files = {"scaling.json", "scaling.md", "scaling.png", "logs"}
    assert {file.name for file in out.iterdir()} == files
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
    shown = printed.split("\nwrote ")[0].rstrip()
    assert shown in (out / "scaling.md").read_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "predicted" not in shown and "tp" not in shown.split("efficiency and losses")[1]
    figures = json.loads((out / "scaling.json").read_text())
    assert json.loads((tmp_path / "f.json").read_text()) == figures
    assert (figures["mode"], figures["base_ranks"]) == ("strong", 1)
    assert [row["ranks"] for row in figures["rows"]] == [1, 2]
    assert [row["batch"]["gradient_accumulation_steps"] for row in figures["rows"]] == [4, 2]
    assert all(row["predicted"] is None for row in figures["rows"])
    base, step = (row["measured"] for row in figures["rows"])
    assert base["efficiency"] == pytest.approx(1)
    assert step["tokens_per_second"] == pytest.approx(12 * 16 / step["step_seconds"])
    assert sum(step["parts_seconds"].values()) == pytest.approx(step["step_seconds"])
    expected = step["tokens_per_second"] / (2 * base["tokens_per_second"])
    assert step["efficiency"] == pytest.approx(expected)
    assert step["efficiency"] + sum(step["lost"].values()) == pytest.approx(1)
    assert step["parts_seconds"]["data"] > 10 * base["parts_seconds"]["data"]


@pytest.mark.timeout(400)
def test_a_prediction_stands_beside_the_figures(
    pool: RankPool, on_cpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--weak", "--world-sizes", "2", "--steps", "2"]
    assert main(command(tmp_path, *words, train_batch_size=6)) == 0
    shown = capsys.readouterr().out.split("\nwrote ")[0]
    assert max(map(len, shown.splitlines())) <= 80
    (row,) = json.loads((tmp_path / "out" / "scaling.json").read_text())["rows"]
    assert row["predicted"]["efficiency"] == 1 and row["not_predicted"] is None
    parts = row["predicted"]["parts_seconds"]
    assert sum(parts.values()) == pytest.approx(row["predicted"]["step_seconds"])
    assert min(parts["compute"], parts["data"], parts["host"]) > 0
    in_ms = shown.split("ms of a step")[1].splitlines()
    cells = {first_cell(line): line.split("|")[2] for line in in_ms if line.startswith("|")}
    assert "(" in cells["communication, dp"] and "(" in cells["step"]
    assert "(" not in cells["imbalance"], "it is not predicted"


@pytest.mark.timeout(400)
def test_ctrl_c_during_a_prediction_keeps_what_was_measured(
    pool: RankPool, on_cpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: ScaledRow) -> ScaledRow:
        raise KeyboardInterrupt

    monkeypatch.setattr(ScaledRow, "with_prediction", stop)
    assert main(command(tmp_path, "--world-sizes", "1", "--steps", "1")) == 1
    figures = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert any(note.startswith("stopped after 1 turn;") for note in figures["notes"])
    assert figures["rows"][0]["status"] == "done" and figures["rows"][0]["predicted"] is None


def first_cell(line: str) -> str:
    return line.strip("| ").split("|")[0].strip()


def test_a_row_that_fails_is_reported_and_the_others_are_kept() -> None:
    one, two, _ = shared(processors=4).rows
    one = replace(one, turns=(), extras=(), failure="failed in turn 1: out of memory; see log")
    result = ScalingResult(mode="strong", steps=1, turns=1, rows=[one, two], processors=4)
    assert result.base is two and not result.succeeded
    assert list(result.notes) == [
        "1 rank failed in turn 1: out of memory; see log",
        "efficiency is relative to 2 ranks, the fewest that trained",
    ]
    first, second = report(result).figures["rows"]
    assert (first["status"], first["reason"]) == ("failed", one.failure)
    assert second["measured"]["efficiency"] == pytest.approx(1)
    assert "| 1     | 1 x 8 x 3 |  failed |" in report(result).on_screen


@pytest.mark.parametrize(
    ("changes", "options", "printed"),
    [
        (
            {"parallel": {"pipeline": 2}},
            ["--world-sizes", "1", "2", "3"],
            "world size 1 (from --world-sizes) is not divisible by parallel.pipeline 2 x",
        ),
        (
            {"parallel": {"pipeline": 2}},
            ["--world-sizes", "2", "3"],
            "world size 3 (from --world-sizes) is not divisible by parallel.pipeline 2 x",
        ),
        ({}, ["--world-sizes", "1", "8"], "or use --weak: each rank keeps its micro-batches"),
        ({}, ["--weak", "--world-sizes", "1", "4096"], "--world-sizes 4096 is more than the "),
        ({}, ["--world-sizes", "1", "--output", str(TEXT)], "is a file; name another folder"),
    ],
)
def test_wrong_input_is_refused_with_the_mend(
    changes: dict[str, Any],
    options: list[str],
    printed: str,
    on_cpus: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(tmp_path, *options, **changes)) == 2
    assert printed in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [(["0"], "--world-sizes"), (["1", "--strong", "--weak"], "--weak")],
)
def test_a_wrong_option_is_wrong_input(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command(tmp_path, "--world-sizes", *options))
    assert f"argument {named}: " in capsys.readouterr().err
