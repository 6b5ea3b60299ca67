"""The benchmark of tokenizing runs, and what everybody writes in it is the same."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(300)
def test_every_figure_is_measured_and_no_file_is_left(tmp_path: Path) -> None:
    options = ["--copies", "1", "--files", "20", "--turns", "1", "--processes", "1", "2"]
    ended = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "benchmark_tokenize.py",
            *options,
            "--folder",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(r"^\| (?!\|)(.+) \|$", ended.stdout, re.MULTILINE)
    names = [row.split(" | ")[0] for row in rows if "---" not in row]
    assert names == [
        "plain loop",
        "encode_batch",
        "tokenize, 1 process",
        "tokenize, 2 processes",
        "memory of all processes",
        "1 and the reader",
        "2 and the reader",
    ]
    assert list(tmp_path.iterdir()) == []
