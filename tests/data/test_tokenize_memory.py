"""Memory does not grow with the input: ten times the text has the same resident set."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.words import documents, write_json_lines

pytestmark = pytest.mark.slow

_ONCE_BYTES = 4_000_000
"""A few more bytes than one batch."""

_PROGRAM = """
import resource, sys
from megaspeed.cli import main
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.timeout(300)
def test_ten_times_the_text_takes_no_more_memory(tmp_path: Path, tokenizer_folder: Path) -> None:
    """One long document takes no more either. Pieces of a megabyte took 70 % more."""
    once = peak_kilobytes(write_json_lines(tmp_path / "1.jsonl", _ONCE_BYTES), tokenizer_folder)
    tenfold = peak_kilobytes(
        write_json_lines(tmp_path / "10.jsonl", 10 * _ONCE_BYTES), tokenizer_folder
    )
    assert tenfold < 1.1 * once
    (tmp_path / "long.txt").write_text(" ".join(documents(10 * _ONCE_BYTES)), encoding="utf-8")
    assert peak_kilobytes(tmp_path / "long.txt", tokenizer_folder) < 1.4 * once


def peak_kilobytes(text: Path, tokenizer: Path) -> int:
    """Return the largest resident set of the command."""
    options = ["--tokenizer", str(tokenizer), "--output", str(text.with_suffix(""))]
    command = [sys.executable, "-c", _PROGRAM, "tokenize", str(text), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(ended.stdout.splitlines()[-1])
