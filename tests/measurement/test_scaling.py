"""``megaspeed scaling``: real rows, and figures that a person can check."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaspeed.cli import main
from megaspeed.config.errors import ConfigError
from megaspeed.config.run import PowerSgdCompression
from megaspeed.measurement.scaling import (
    ScaledRow,
    report,
    scaled_rows,
)
from megaspeed.measurement.turns import Device, Result, Steps, TimedRank, take_turns
from megaspeed.topology.activity import PARTS, Part
from megaspeed.topology.grid import Grid
from tests.support.machine import limit
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


def parts_of(**seconds: float) -> dict[Part, float]:
    return {part: seconds.get(part, 0.0) for part in PARTS}


def trained(row: ScaledRow, steps: Sequence[dict[Part, float]], device: str = "CPU") -> ScaledRow:
    rank = TimedRank(
        losses=[1.0],
        grad_norm=1.0,
        skipped_steps=0,
        step_seconds=[],
        peak_bytes=1,
        device=Device(name=device, memory_bytes=1),
    )
    return replace(row, turns=[[rank] * row.ranks], extras=[steps] * row.ranks)


def rows_of(*sizes: int, weak: bool = False) -> list[ScaledRow]:
    return scaled_rows(tiny_run(TEXT, **MICRO), list(sizes), "cpu", weak=weak)


def test_efficiency_and_what_is_lost_add_up_to_one() -> None:
    one, two, four = rows_of(1, 2, 4)
    base = trained(one, [parts_of(compute=8.0)])
    strong = trained(four, [parts_of(compute=3.0, data=1.0)])
    tokens = 24 * 16
    assert strong.tokens_per_second == tokens / 4
    assert strong.efficiency(base) == pytest.approx((tokens / 4) / (4 * tokens / 8))
    # ideal are 2 s of computation; of 4 s, 1 s is extra computation and 1 s is communication
    assert strong.lost(base) == pytest.approx(parts_of(compute=0.25, data=0.25))
    weak = trained(rows_of(1, 4, weak=True)[1], [parts_of(compute=8.0, data=2.0)])
    assert weak.efficiency(base) == pytest.approx(8 / 10)
    assert weak.lost(base) == pytest.approx(parts_of(data=0.2))
    of_two = trained(two, [parts_of(compute=5.0)])
    assert strong.efficiency(of_two) == pytest.approx((5 * 2) / (4 * 4))
    for row in (strong, weak):
        assert row.efficiency(base) + sum(row.lost(base).values()) == pytest.approx(1)


def test_single_slow_steps_do_not_count() -> None:
    """Of 8 steps, the two fastest and the two slowest are dropped."""
    seconds = [9.0, 1.0, 4.0, 2.0, 100.0, 3.0, 5.0, 6.0]
    row = trained(rows_of(1)[0], [parts_of(compute=each) for each in seconds])
    assert row.seconds == (3 + 4 + 5 + 6) / 4


@pytest.mark.parametrize(
    ("weak", "batches"), [(False, [24, 24, 24]), (True, [24, 48, 96])], ids=str
)
def test_the_batch_of_each_number_of_ranks(weak: bool, batches: list[int]) -> None:
    """At 2 ranks and pp 2, dp is 1, and a step has 8 micro-batches of 3."""
    base = tiny_run(TEXT, pp=2, **MICRO)
    of_tokens = tiny_run(TEXT, pp=2, **MICRO, training={"tokens": 3840, "steps": None})
    assert [row.run.steps for row in scaled_rows(of_tokens, [2, 4], "cpu", weak=weak)] == [10, 10]
    runs = [row.run for row in scaled_rows(base, [2, 4, 8], "cpu", weak=weak)]
    assert runs[0].batch == base.batch and runs[0].as_json() == base.as_json()
    assert [run.grid for run in runs] == [Grid(2, dp, 1, dp) for dp in (1, 2, 4)]
    assert [run.batch.train_batch_size for run in runs] == batches
    assert {run.batch.micro_batch_size for run in runs} == {3}
    micro_batches = [run.batch.gradient_accumulation_steps for run in runs]
    assert micro_batches == ([8, 8, 8] if weak else [8, 4, 2])


def test_compressed_gradients_are_compressed_in_the_timed_steps() -> None:
    how = {"type": "powersgd", "rank": 2, "start_step": 20}
    base = tiny_run(TEXT, parallel={"gradient_compression": how}, **MICRO)
    _, two = scaled_rows(base, [1, 2], "cpu", weak=False)
    compression = two.run.config.parallel.gradient_compression
    assert isinstance(compression, PowerSgdCompression)
    assert (compression.rank, compression.start_step) == (2, 1)


@pytest.mark.parametrize(("stated", "groups"), [("auto", [6, 3]), (1, [1, 1])])
def test_chunks_keep_a_stated_number_of_groups(stated: str | int, groups: list[int]) -> None:
    """24 samples are 12 micro-batches on one data rank, and 6 on two; a group has 2 or more."""
    base = tiny_run(
        TEXT,
        pp=2,
        model={"num_hidden_layers": 4},
        parallel={"virtual_stages": 2, "micro_batch_groups": stated},
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=None,
    )
    rows = scaled_rows(base, [2, 4], "cpu", weak=False)
    assert [row.run.config.parallel.micro_batch_groups for row in rows] == groups


def test_a_batch_that_does_not_divide_is_refused_with_both_mends() -> None:
    with pytest.raises(ConfigError) as error:
        rows_of(1, 3, 16)
    problems = error.value.problems
    assert [problem.split(".")[0] for problem in problems] == [
        "train_batch_size 24 is not a multiple of train_micro_batch_size_per_gpu 3 x dp 3 (= 9)",
        "train_batch_size 24 is not a multiple of train_micro_batch_size_per_gpu 3 x dp 16 (= 48)",
    ]
    assert all(
        problem.endswith("or use --weak: each rank keeps its micro-batches") for problem in problems
    )
    assert len(rows_of(1, 3, 16, weak=True)) == 3


@pytest.mark.timeout(300)
def test_parts_add_up_to_the_wall_time(pool: RankPool, tmp_path: Path) -> None:
    base = tiny_run(TEXT, pp=2, **MICRO)
    rows, _ = take_turns(
        scaled_rows(base, [2, 4], "cpu", weak=True),
        1,
        tiny_corpus(base, tmp_path / "cache"),
        Steps(warm_up=3, timed=4, timeout_seconds=limit(200), extra="parts"),
        device_type="cpu",
        folder=tmp_path,
    )
    for row in rows:
        assert row.done, row.failure
        steps, wall_seconds = row.extras[0], row.turns[0][0].step_seconds
        assert len(steps) == len(wall_seconds) == 4, "three steps are warm-up"
        total = sum(sum(parts.values()) for parts in steps)
        assert total == pytest.approx(sum(wall_seconds), rel=0.05)
        assert row.run.tokens_per_step == 16 * 24 * row.run.grid.dp
        assert min(wall_seconds) * 0.95 < row.seconds < max(wall_seconds) * 1.05
        for part in ("compute", "pipeline", "world", "optimizer"):
            assert row.parts[part] > 0


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
    words = ["--world-sizes", "2", "1", "--steps", "2"]
    assert main(command(tmp_path, *words, "--json", str(tmp_path / "f.json"))) == 0
    printed, out = capsys.readouterr().out, tmp_path / "out"
    files = {"scaling.json", "scaling.md", "scaling.png", "logs"}
    assert {file.name for file in out.iterdir()} == files
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
    shown = printed.split("\nwrote ")[0].rstrip()
    assert shown in (out / "scaling.md").read_text()
    assert max(map(len, shown.splitlines())) <= 80
    figures = json.loads((out / "scaling.json").read_text())
    assert json.loads((tmp_path / "f.json").read_text()) == figures
    assert figures["mode"] == "strong"
    assert [row["batch"] for row in figures["rows"]] == ["1 x 4 x 3", "2 x 2 x 3"]
    base, row = figures["rows"]
    assert (base["ranks"], row["ranks"], base["efficiency"]) == (1, 2, pytest.approx(1))
    assert row["tokens_per_second"] == pytest.approx(12 * 16 / row["step_seconds"])
    assert sum(row["parts_seconds"].values()) == pytest.approx(row["step_seconds"])
    assert row["efficiency"] == pytest.approx(
        row["tokens_per_second"] / (2 * base["tokens_per_second"])
    )
    lost = sum(losses["2"] for losses in figures["losses"])
    assert row["efficiency"] + lost == pytest.approx(1)
    # One rank sends nothing. Its own work in this part is short, unless the machine is busy.
    assert row["parts_seconds"]["data"] > base["parts_seconds"]["data"]


def test_a_row_that_fails_is_reported_and_the_others_are_kept() -> None:
    one, two = rows_of(1, 2)
    one = replace(one, failure="failed in turn 1: out of memory; see log")
    rows = [one, trained(two, [parts_of(compute=1.0)])]
    result = Result(steps=1, turns=1, rows=rows)
    assert not result.succeeded
    assert list(result.notes) == ["1 rank failed in turn 1: out of memory; see log"]
    (row,) = report(result, weak=False).figures["rows"]
    assert (row["ranks"], row["efficiency"]) == (2, 1)


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
    [(["0"], "--world-sizes"), (["1", "--steps", "0"], "--steps")],
)
def test_a_wrong_option_is_wrong_input(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command(tmp_path, "--world-sizes", *options))
    assert f"argument {named}: " in capsys.readouterr().err
