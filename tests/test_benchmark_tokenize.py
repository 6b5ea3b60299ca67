"""The benchmark of tokenizing runs, and all processes write the same."""

import re
from pathlib import Path

import pytest

from tests.support.forked import run_forked

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_tokenize.py"


@pytest.mark.timeout(300)
def test_every_figure_is_measured_and_no_file_is_left(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    options = ["--copies", "1", "--files", "10", "--turns", "1", "--processes", "2"]
    ended = run_forked([SCRIPT, *options, "--folder", place], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(r"^\| (?!\|)(.+) \|$", ended.stdout, re.MULTILINE)
    names = [row.split(" | ")[0] for row in rows if "---" not in row]
    assert names == [
        "plain loop",
        "encode_batch",
        "tokenize, 2 processes",
        "memory of all processes",
        "2 and the reader",
    ]
    assert list(place.iterdir()) == []
