"""The benchmark of step times runs, and both sides take their steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_step_time.py"
TINY = ["--layers", "1", "--hidden-size", "64", "--vocab-size", "512", "--sequence-length", "16"]


@pytest.mark.timeout(300)
def test_both_sides_are_timed() -> None:
    """It once ended with "'tuple' object has no attribute 'to'": nothing ran it."""
    alone = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    ended = subprocess.run(
        [sys.executable, SCRIPT, *TINY, "--turns", "1", "--zero-stages", "1"],
        env={**alone, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^\| 1 \| \d+ \| \d+ \| \d+\.\d\d \|$", ended.stdout, re.MULTILINE)
