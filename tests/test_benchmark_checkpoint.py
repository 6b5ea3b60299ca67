"""The benchmark of saving and loading runs, and it leaves no files."""

from pathlib import Path

import pytest

from tests.support.forked import run_forked

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark_checkpoint.py"
ELEMENTS = 10**9


@pytest.mark.timeout(300)
def test_every_figure_is_measured_and_no_file_is_left(tmp_path: Path) -> None:
    text = SCRIPT.parents[1] / "LICENSE"
    settings = ["model.preset=gpt2-nano", "data.sequence_length=32", f'data.train=["{text}"]']
    place = tmp_path / "place"
    command = [str(SCRIPT), "--turns", "1", "--folder", str(place / "made"), "--set", *settings]
    ended = run_forked(command, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, names, _, row = ended.stdout.splitlines()
    cells = dict(zip(names.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert all(float(cell) >= 0 for cell in cells.values()) and len(cells) == 8
    ours, theirs = (float(cells[f"on disk, {name} (MB)"]) for name in ("megaspeed", "DeepSpeed"))
    assert 0 < ours == pytest.approx(theirs, rel=0.2)  # both have 12 bytes for each element
    assert list(place.iterdir()) == []
