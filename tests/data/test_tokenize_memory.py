"""Memory does not grow with the input: five times the text has the same resident set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.words import documents, write_json_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

_ONCE_BYTES = 4_000_000
"""A few more bytes than one batch."""

_PROGRAM = """
import sys
from megaspeed.cli import main
from tests.support.memory import peak
assert main(sys.argv[1:]) == 0
print(peak())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["many documents", "one document"])
def test_five_times_the_text_takes_no_more_memory(
    tmp_path: Path, tokenizer_folder: Path, kind: str
) -> None:
    """A long document is read in pieces."""

    def peak_of(size: int) -> int:
        file = tmp_path / f"{size}.jsonl"
        if kind == "many documents":
            write_json_lines(file, size)
        else:
            file = file.with_suffix(".txt")
            file.write_text(" ".join(documents(size)), encoding="utf-8")
        return peak_bytes(file, tokenizer_folder)

    assert peak_of(5 * _ONCE_BYTES) < 1.1 * peak_of(_ONCE_BYTES)


def peak_bytes(text: Path, tokenizer: Path) -> int:
    """Return the largest resident set of the command."""
    options = ["--tokenizer", str(tokenizer), "--output", str(text.with_suffix(""))]
    command = [sys.executable, "-c", _PROGRAM, "tokenize", str(text), *options]
    # Each thread of the tokenizer has memory of its own, which fills up with the first texts.
    env = {**os.environ, "RAYON_NUM_THREADS": "2"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return int(ended.stdout.splitlines()[-1])
