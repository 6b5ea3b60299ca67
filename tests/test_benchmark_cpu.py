"""``scripts/benchmark_cpu.py``. Its measurement is tested in ``test_measured_cpu.py``."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_cpu.py"


def test_a_wrong_option_is_reported_before_anything_is_measured() -> None:
    command = [sys.executable, str(SCRIPT), "--set", "model.hidden_width=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model.hidden_width" in done.stderr and "Traceback" not in done.stderr
