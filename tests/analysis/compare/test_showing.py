"""The same figures in the terminal, in Markdown and as pictures."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megaspeed.analysis.compare.report import (
    as_markdown,
    memory_grid,
    show,
    summary_grid,
    traffic_grid,
)
from megaspeed.analysis.compare.result import ComparisonResult, Row
from megaspeed.analysis.units import memory_unit
from megaspeed.cli.compare import write_files
from tests.analysis.compare.figures import records, result, run, trained, zero_2

REFUSED = Row(label="ZeRO-3", engine="zero", run=None, reason="It may not.")
FAILED = replace(zero_2()[1], reason="out of memory: too much (rank 1)")
BASELINE = Row(label="DDP", engine="ddp", run=run(), ranks=records())


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


def test_summary_has_a_line_for_every_row() -> None:
    grid = summary_grid(result(BASELINE, FAILED, REFUSED))
    assert [list(row) for row in grid.rows] == [
        [
            *("ZeRO-0", "measured\npredicted\nratio", "16.00\n20.00\n1.25", "4.00\n4.00\n1.00"),
            *("280\n218-405", "1,371", "2.500000"),
        ],
        ["DDP", "measured", "16.00", "4.00", "280\n218-405", "1,371", "2.500000"],
        ["ZeRO-2\nper_step failed", *["-"] * 6],
        ["ZeRO-3\nrefused", *["-"] * 6],
    ]


def test_memory_has_measured_above_predicted_for_every_pipeline_stage() -> None:
    zero, second, ddp, _ = memory_grid(result(BASELINE, FAILED)).rows
    assert zero == [
        *("ZeRO-0", "0", "measured\npredicted\nratio"),
        *("2.00\n2.00\n1.00", "2.00\n4.00\n2.00", "6.00\n6.00\n1.00", "6.00\n8.00\n1.33"),
        *("0.00\n0.00\n-", "16.00\n20.00\n1.25", "10.00\n12.00\n1.20"),
    ]
    assert list(second[:3]) == ["", "1", "measured\npredicted\nratio"]
    assert list(second[-2:]) == ["12.00\n12.00\n1.00", "10.00\n10.00\n1.00"]
    assert list(ddp[:5]) == ["DDP", "0", "measured", "2.00", "2.00"]
    assert list(ddp[-2:]) == ["16.00", "10.00"]


def test_traffic_has_a_column_for_each_axis_and_collective() -> None:
    grid = traffic_grid(result())
    assert grid.headings == ("row", "pp\nrank", "", "dp\nall\ngather", "pp\nsend", "total")
    assert grid.rows[0] == [
        *("ZeRO-0", "0", "counted\npredicted\nratio"),
        *("3.00\n3.00\n1.00", "1.00\n1.00\n1.00", "4.00\n4.00\n1.00"),
    ]


def test_markdown_has_complete_tables_under_layout_and_model() -> None:
    text = as_markdown(result(BASELINE, FAILED, REFUSED), ["memory.png"])
    lines = text.splitlines()
    assert lines[0] == "## tiny: ZeRO stages compared"
    assert lines[2] == "- tiny: pp 2 x dp 2 x tp 1 = 4 ranks (CPU), fp32"
    assert lines[3].startswith("- 24 samples of 16 tokens a step in ")
    assert lines[4] == ("- gpt2: 48,576 parameters, 3 blocks x 32, 4 heads, vocabulary 301 (tied)")
    assert "- **ZeRO-2 per_step FAILED: out of memory: too much (rank 1)**" in lines
    assert "- **ZeRO-3 was not run: It may not.**" in lines
    sizes = "measured<br>predicted<br>ratio | 16.00<br>20.00<br>1.25 | 4.00<br>4.00<br>1.00"
    assert f"| ZeRO-0 | {sizes} | 280<br>218-405 | 1,371 | 2.500000 |" in lines
    assert lines[-3] == "![memory.png](memory.png)"
    assert lines[-1].startswith("**Verdict: use ZeRO-0 here (--set zero_optimization.stage=0): ")
    tables = text.replace("\n\n", "\0").split("\0")
    for table in (part.splitlines() for part in tables if part.startswith("|")):
        assert len({line.count("|") for line in table}) == 1, "every line has every column"


@pytest.mark.parametrize("others", [(), (BASELINE, FAILED, REFUSED)])
def test_the_tables_fit_80_columns_without_cutting(others: tuple[Row, ...]) -> None:
    text = io.StringIO()
    show(result(*others), Console(file=text, width=80))
    shown = text.getvalue()
    assert "…" not in shown
    tables = shown.split("THE LOSSES")[0].split("ZeRO-2 per_step FAILED")[0]
    assert max(map(len, tables.splitlines())) <= 80
    for grid in (summary_grid, memory_grid, traffic_grid):
        for row in grid(result(*others)).rows:
            assert all(part in shown for cell in row for part in cell.split("\n"))


def test_a_grid_that_is_too_wide_is_shown_in_parts() -> None:
    """With more axes and collectives than fit; each part names the rows."""
    kinds = [
        *(("dp", kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")),
        *(("tp", kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")),
    ]
    sent: dict[Any, int] = {("pp", "send"): 900 * 2**20, **dict.fromkeys(kinds, 13 * 2**20)}
    wide = trained(zero_2()[0])
    wide = replace(wide, ranks=[replace(each, traffic=sent) for each in wide.ranks])
    text = io.StringIO()
    show(result(wide), Console(file=text, width=80))
    tables = text.getvalue()
    assert "…" not in tables and max(map(len, tables.splitlines())) <= 80
    assert tables.count("sent by a rank in one step") == 2
    assert tables.count(" 13.00") == 6 * 2 and tables.count("900.00") == 2


def test_a_disagreement_is_stated_in_capitals() -> None:
    text = io.StringIO()
    show(result(trained(zero_2()[0], loss=2.6)), Console(file=text, width=80))
    assert "THE LOSSES DISAGREE: ZeRO-2 per_micro_batch: loss 2.6, but ZeRO-0 has" in (
        text.getvalue()
    )


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
    nothing = ComparisonResult(run=run(), steps=4, rows=[FAILED])
    assert [file.name for file in write_files(nothing, tmp_path)] == ["compare.json", "compare.md"]
    show(nothing, Console(file=io.StringIO(), width=80))
