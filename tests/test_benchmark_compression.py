"""``scripts/benchmark_compression.py``: on a slow link, the bytes of a step determine its time."""

import subprocess
from pathlib import Path

import pytest

from tests.support.forked import run_forked
from tests.support.machine import factor

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_compression.py"
MEGABYTES_PER_SECOND = 0.5


def table_of(done: "subprocess.CompletedProcess[str]") -> dict[tuple[str, str], list[str]]:
    """Return (ZeRO stage, compression) -> the other cells of its row."""
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    return {(stage, name): cells for stage, name, *cells in rows}


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_step_on_a_slow_link_takes_as_long_as_predicted(tmp_path: Path) -> None:
    text = SCRIPT.parents[1] / "LICENSE"
    settings = ["model.preset=gpt2-nano", "data.sequence_length=32", f'data.train=["{text}"]']
    small = [word for setting in settings for word in ("--set", setting)]
    speed = MEGABYTES_PER_SECOND / factor()  # computation takes as much longer as messages
    link = ["link", "--megabytes-per-second", str(speed)]
    command = [str(SCRIPT), *small, *link, "--stages", "0", "--steps", "3"]
    table = table_of(run_forked(command, tmp_path))
    seconds = {}
    for (_, name), (sent, _, times) in table.items():
        measured, predicted = (float(text.split()[0]) / 1e3 for text in times.split(", "))
        waited = float(sent.split()[0]) / speed
        assert waited < measured == pytest.approx(predicted, rel=0.3)
        seconds[name] = measured
    assert seconds["none"] > seconds["bf16"] > seconds["int8"]
