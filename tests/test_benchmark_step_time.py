"""The benchmark of step times runs, and both sides take their steps."""

import re
from pathlib import Path

import pytest

from tests.support.forked import run_forked

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_step_time.py"
TINY = ["--layers", "1", "--hidden-size", "64", "--vocab-size", "512", "--sequence-length", "16"]


@pytest.mark.timeout(300)
def test_both_sides_are_timed(tmp_path: Path) -> None:
    """It once ended with "'tuple' object has no attribute 'to'": nothing ran it."""
    options = [*TINY, "--turns", "1", "--zero-stages", "1"]
    ended = run_forked([SCRIPT, *options], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^\| 1 \| \d+ \| \d+ \| \d+\.\d\d \|$", ended.stdout, re.MULTILINE)
