"""The same figures in the terminal, in Markdown and as pictures."""

import math
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from megaspeed.cli.compare import write_files
from megaspeed.measurement.compare.charts import draw_trade_off_chart
from megaspeed.measurement.compare.report import (
    as_markdown,
    memory_table,
    notes,
    on_screen,
    traffic_table,
)
from megaspeed.measurement.compare.result import ComparisonResult, Row
from megaspeed.units import memory_unit
from tests.measurement.compare.figures import all_watched, result, run, trained, turn, zero_2

FAILED = replace(zero_2()[1], reason="out of memory: too much (rank 1)")
BASELINE = Row(
    label="DDP", engine="ddp", run=run(), turns=[turn(250, 125, 500)], watched=all_watched()
)


@pytest.mark.parametrize(
    ("sizes", "unit", "first"),
    [
        ([3 * 2**29, 2**40], "GiB", "1.50"),
        ([2**20, 2**30 - 1], "MiB", "1.00"),
        ([512], "KiB", "0.50"),
        ([], "KiB", None),
    ],
)
def test_the_unit_is_the_largest_that_leaves_no_fraction_of_one(
    sizes: list[int], unit: str, first: str | None
) -> None:
    chosen = memory_unit(sizes)
    assert chosen.name == unit
    assert [chosen.of(size) for size in sizes[:1]] == ([] if first is None else [first])


def test_memory_has_the_ratio_of_the_prediction_for_every_pipeline_stage() -> None:
    headings, (zero, second, ddp, _) = memory_table(result(BASELINE, FAILED))
    assert headings[:3] == ["row", "stage", "params"]
    assert zero == [
        *("ZeRO-0", "0", "2.00 (1.00)", "2.00 (2.00)", "6.00 (1.00)", "6.00 (1.33)", "0.00"),
        *("16.00 (1.25)", "10.00 (1.20)"),
    ]
    assert second[:2] == ["ZeRO-0", "1"] and second[-2:] == ["12.00 (1.00)", "10.00 (1.00)"]
    assert ddp[:4] == ["DDP", "0", "2.00", "2.00"] and ddp[-2:] == ["16.00", "10.00"]


def test_traffic_has_a_column_for_each_axis_and_collective() -> None:
    headings, rows = traffic_table(result())
    assert headings == ["row", "stage", "dp all_gather", "pp send", "total"]
    assert rows[0] == ["ZeRO-0", "0", "3.00 (1.00)", "1.00 (1.00)", "4.00 (1.00)"]


def test_markdown_has_complete_tables_under_the_verdict() -> None:
    text = as_markdown(result(BASELINE, FAILED), ["memory.png"])
    lines = text.splitlines()
    assert lines[0] == "# tiny: ZeRO stages compared"
    assert lines[2] == "- tiny: pp 2 x dp 2 x tp 1 = 4 ranks (CPU), fp32"
    assert lines[3].startswith("- 24 samples of 16 tokens a step in ")
    assert lines[4] == ("- gpt2: 48,576 parameters, 3 blocks x 32, 4 heads, vocabulary 301 (tied)")
    assert lines[6].startswith("verdict: use ZeRO-0 here (--set zero_optimization.stage=0): ")
    assert "- ZeRO-2 per_step FAILED: out of memory: too much (rank 1)" in lines
    assert lines[-1] == "![memory.png](memory.png)"
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert [len(table) for table in tables] == [2 + 3, 2 + 4, 2 + 4]
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, "every line has every column"


def test_the_screen_has_the_verdict_and_then_a_line_for_each_row() -> None:
    slow = replace(BASELINE, turns=[turn(250), turn(350), turn(300)])
    fast = replace(result().rows[0], turns=[turn(120), turn(170), turn(145)])
    shown = on_screen(replace(result(), rows=[fast, slow, FAILED]))
    lines = shown.splitlines()
    assert lines[4].startswith("verdict: use ZeRO-0 here (--set zero_optimization.stage=0): ")
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    assert [[cell.strip() for cell in row] for row in (rows[0], *rows[2:])] == [
        ["row", "step ms", "slower", "tokens/s", "peak MiB", "sent MiB"],
        ["ZeRO-0", "174", "fastest", "2,209", "16.00", "4.00"],
        ["DDP", "327", "+88.4%", "1,173", "16.00", "4.00"],
        ["ZeRO-2 per_step", "failed", "-", "-", "-", "-"],
    ]
    assert "- ZeRO-2 per_step FAILED: out of memory: too much (rank 1)" in lines


def test_the_noise_is_stated_with_its_origin() -> None:
    """In logs, the rests of both rows are 0.001, -0.002 and 0.001, with both signs."""

    def compared(rest: float) -> str:
        rows = [
            replace(row, turns=[turn(1000 * math.exp(each) - 30) for each in rests])
            for row, sign in ((result().rows[0], rest), (BASELINE, -rest))
            for rests in [(sign, -2 * sign, sign)]
        ]
        return " ".join(on_screen(replace(result(), turns=3, steps=1, rows=rows)).split())

    # two degrees of freedom, so t is 9.92: 9.92 x sqrt(2 / 3 x 12e-6 / 2) = 0.0198
    assert "3 turns of 1 timed step each. The noise is 2.0%: equally fast" in compared(0.001)
    assert "The noise is over 100%: equally fast" in compared(0.1)
    text = " ".join(on_screen(result()).split())
    assert "1 turn of 3 timed steps each. The noise is not known, so all rows count as tied" in text


def test_the_screen_has_at_most_36_lines_of_80_columns_whatever_failed() -> None:
    """Nine rows, all with a reason of several lines."""
    reason = "RuntimeError: " + "something went wrong, and this is a long reason for it; " * 4
    labels = ("ZeRO-2 per_micro_batch", "FSDP2 per_micro_batch")
    failed = [replace(FAILED, label=f"{labels[i % 2]}", reason=reason) for i in range(9)]
    unknown = replace(BASELINE, label=labels[1], watched=(), unwatched=reason)
    for rows in (failed, [*result().rows, *failed[:8]], [*result().rows, *[unknown] * 8]):
        lines = on_screen(replace(result(), rows=rows, share_of_others=0.5)).splitlines()
        assert len(lines) <= 36 and max(map(len, lines)) <= 80
        assert lines[-1] == "... compare.md has all notes"


def test_losses_that_disagree_are_shown() -> None:
    shown = " ".join(on_screen(result(trained(zero_2()[0], loss=2.6))).split())
    assert "THE LOSSES DISAGREE: ZeRO-2 per_micro_batch: loss 2.6, but ZeRO-0 has" in shown


def test_a_busy_machine_and_compiled_blocks_are_noted() -> None:
    compared = replace(result(), share_of_others=0.42)
    assert any(note.startswith("other processes took 42%") for note in notes(compared))
    training = compared.run.config.training.model_copy(update={"compile": True})
    config = compared.run.config.model_copy(update={"training": training})
    compiled = replace(result(), run=replace(compared.run, config=config))
    assert "memory by category and traffic are those of a step without compilation" in notes(
        compiled
    )
    assert list(notes(result())) == []


def test_markers_of_the_trade_off_have_one_size(tmp_path: Path) -> None:
    """A size that grows from row to row would seem to mean something."""
    rows = [replace(result().rows[0], label=f"row {number}") for number in range(4)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_trade_off_chart(replace(result(), rows=rows), tmp_path / "tradeoff.svg")
    text = (tmp_path / "tradeoff.svg").read_text()
    assert all(f"row {number}" in text for number in range(4))
    shapes = re.findall(r'<path id="m\w+" d="([^"]*)"', text, re.DOTALL)
    heights = []
    for shape in shapes:
        ys = [float(pair.split()[-1]) for pair in re.findall(r"-?[\d.]+ -?[\d.]+", shape)]
        if max(ys) - min(ys) > 5:  # not the ticks of the axes
            heights.append(max(ys) - min(ys))
    assert len(heights) >= 4 and max(heights) < 1.45 * min(heights), "a diamond is a rotated square"


def test_files_and_pictures_are_in_the_folder(tmp_path: Path) -> None:
    written = write_files(result(BASELINE, FAILED), tmp_path)
    assert [file.name for file in written] == [
        "compare.json",
        "compare.md",
        "memory.png",
        "tradeoff.png",
    ]
    for file in written[2:]:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path: Path) -> None:
    compared = result()
    named = replace(compared, run=replace(compared.run, name=r"cost $\x$ [bold]"))
    assert len(write_files(named, tmp_path)) == 4


def test_without_figures_there_are_no_pictures(tmp_path: Path) -> None:
    nothing = ComparisonResult(run=run(), turns=3, steps=4, rows=[FAILED])
    assert [file.name for file in write_files(nothing, tmp_path)] == ["compare.json", "compare.md"]
    assert "no row is recommended, because no ZeRO row was measured." in on_screen(nothing)
