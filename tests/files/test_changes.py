"""A file's state tells that it changed, and when that can be relied on."""

import os
from pathlib import Path

from megaspeed.files.changes import are_settled, state_of


def test_a_rewritten_file_has_another_state(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one")
    before = state_of(file)
    assert state_of(file) == before
    os.utime(file, ns=(0, before[2] + 1))
    assert state_of(file) != before


def test_a_file_written_within_two_seconds_may_change_unseen(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one")
    state = state_of(file)
    written_at = max(state[2:]) / 1e9
    assert not are_settled([state], written_at + 1.0)
    assert are_settled([state], written_at + 3.0)
    assert are_settled([], 0.0 + 3.0)
