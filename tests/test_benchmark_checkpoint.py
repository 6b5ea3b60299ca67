"""The benchmark of saving and loading runs, and it leaves no files."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.forked import run_forked

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_checkpoint.py"
TINY = ["--layers", "1", "--hidden-size", "64", "--vocab-size", "512", "--sequence-length", "16"]

TABLES = {"Save and load": 8, "Asynchronous saves": 5, "Host memory that a rank adds": 6}
"""Title of each table -> the number of its figures for a ZeRO stage."""

# Without /proc, only the memory is not measured.
FIGURE = r"\d+(\.\d+)?" if sys.platform == "linux" else r"\d+(\.\d+)?|n/a"


@pytest.mark.timeout(300)
def test_every_figure_is_measured_and_no_file_is_left(tmp_path: Path) -> None:
    options = [*TINY, "--turns", "1", "--steps-per-turn", "1", "--zero-stages", "1"]
    work = tmp_path / "work"
    work.mkdir()
    ended = run_forked([SCRIPT, *options, "--folder", work], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tables = figures_by_title(ended.stdout)
    assert {title: len(figures) for title, figures in tables.items()} == TABLES
    for figures in tables.values():
        assert all(re.fullmatch(FIGURE, figure) for figure in figures), figures
    on_disk = [float(figure) for figure in tables["Save and load"][-2:]]
    share = float(tables["Host memory that a rank adds"][0])
    # Both have 12 bytes for each element. DeepSpeed also has bf16 weights.
    assert share <= on_disk[0] < on_disk[1]
    assert list(work.iterdir()) == []


def figures_by_title(printed: str) -> dict[str, list[str]]:
    """Return the only row of each Markdown table, by its title and without the ZeRO stage."""
    found = {}
    for title, table in re.findall(r"^(.+):\n\n((?:\|.*\n)+)", printed, re.MULTILINE):
        _, _, row = table.splitlines()
        zero_stage, *figures = row.strip("| ").split(" | ")
        assert zero_stage == "1"
        found[title] = figures
    return found
