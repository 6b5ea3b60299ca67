"""The same figures in the terminal, in Markdown and as pictures."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megaspeed.analysis.compare.grids import memory_grid, summary_grid, traffic_grid
from megaspeed.analysis.compare.markdown import as_markdown
from megaspeed.analysis.compare.report import show, write
from megaspeed.analysis.compare.result import ComparisonResult, Row, finished_row
from megaspeed.analysis.compare.variants import Variant
from megaspeed.analysis.units import memory_unit
from tests.analysis.compare.figures import predictions, records, result, run, zero_2

REFUSED = Row(variant=Variant(label="ZeRO-3", engine="zero", run=None, refused="It may not."))
FAILED = Row(variant=zero_2()[1], reason="out of memory: too much (rank 1)")
BASELINE = finished_row(Variant(label="DDP", engine="ddp", run=run()), records(), None)


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
    assert [chosen.text(size) for size in sizes[:1]] == ([] if first is None else [first])


def test_summary_has_a_line_for_every_row() -> None:
    grid = summary_grid(result(BASELINE, FAILED, REFUSED))
    assert [list(row) for row in grid.rows] == [
        ["ZeRO-0", *["20.00", "16.00", "1.25", "4.00", "4.00", "1.00", "280", "1,371", "2.500000"]],
        ["DDP", *["-", "16.00", "-", "-", "4.00", "-", "280", "1,371", "2.500000"]],
        ["ZeRO-2\nper_step failed", *["-"] * 9],
        ["ZeRO-3\nrefused", *["-"] * 9],
    ]


def test_memory_has_measured_above_predicted_for_every_pipeline_stage() -> None:
    zero, second, ddp, _ = memory_grid(result(BASELINE, FAILED)).rows
    assert zero == [
        *("ZeRO-0", "0", "measured\npredicted"),
        *("2.00\n2.00", "2.00\n4.00", "6.00\n6.00", "6.00\n8.00", "0.00\n0.00"),
        *("16.00\n20.00", "10.00\n12.00", "1.25", "1.20"),
    ]
    assert list(second[:3]) == ["", "1", "measured\npredicted"]
    assert list(second[-2:]) == ["1.00", "1.00"]
    assert list(ddp[:5]) == ["DDP", "0", "measured", "2.00", "2.00"]
    assert list(ddp[-2:]) == ["-", "-"]


def test_traffic_has_a_column_for_each_axis_and_collective() -> None:
    grid = traffic_grid(result())
    assert grid.headings == ("row", "stage", "", "dp\nall\ngather", "pp\nsend", "total", "ratio")
    assert grid.rows[0] == [
        *("ZeRO-0", "0", "counted\npredicted"),
        *("3.00\n3.00", "1.00\n1.00", "4.00\n4.00", "1.00"),
    ]


def test_markdown_is_whole_tables_under_layout_and_model() -> None:
    text = as_markdown(result(BASELINE, FAILED, REFUSED), ["memory.png"])
    lines = text.splitlines()
    assert lines[0] == "## tiny: ZeRO stages compared"
    assert lines[2].startswith("- tiny: pp 2 x dp 2 x tp 1 = 4 ranks (CPU), fp32, 24 samples of 16")
    assert lines[3] == ("- gpt2: 73,984 parameters, 5 blocks x 32, 4 heads, vocabulary 301 (tied)")
    assert "- **ZeRO-2 per_step FAILED: out of memory: too much (rank 1)**" in lines
    assert "- **ZeRO-3 was not run: It may not.**" in lines
    assert (
        "| ZeRO-0 | 20.00 | 16.00 | 1.25 | 4.00 | 4.00 | 1.00 | 280 | 1,371 | 2.500000 |" in lines
    )
    assert lines[-1] == "![memory.png](memory.png)"
    tables = text.replace("\n\n", "\0").split("\0")
    for table in (part.splitlines() for part in tables if part.startswith("|")):
        assert len({line.count("|") for line in table}) == 1, "every line has every column"


@pytest.mark.parametrize("others", [(), (BASELINE, FAILED, REFUSED)])
def test_the_terminal_needs_120_columns_and_cuts_nothing(others: tuple[Row, ...]) -> None:
    text = io.StringIO()
    show(result(*others), Console(file=text, width=120))
    shown = text.getvalue()
    assert "…" not in shown
    for grid in (summary_grid, memory_grid, traffic_grid):
        for row in grid(result(*others)).rows:
            assert all(part in shown for cell in row for part in cell.split("\n"))


def test_a_disagreement_is_said_in_capitals() -> None:
    text = io.StringIO()
    other = finished_row(zero_2()[0], records(loss=2.6), predictions())
    show(result(other), Console(file=text, width=120))
    assert "THE LOSSES DISAGREE: ZeRO-2 per_micro_batch: loss 2.6, but ZeRO-0 has" in (
        text.getvalue()
    )


def test_files_and_pictures_are_left_in_the_folder(tmp_path: Path) -> None:
    written = write(result(BASELINE, FAILED), tmp_path)
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
    assert len(write(named, tmp_path)) == 4


def test_without_figures_there_are_no_pictures(tmp_path: Path) -> None:
    nothing = ComparisonResult(run=run(), device="CPU", steps=4, rows=[FAILED])
    assert [file.name for file in write(nothing, tmp_path)] == ["compare.json", "compare.md"]
    show(nothing, Console(file=io.StringIO(), width=120))
