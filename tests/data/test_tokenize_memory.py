"""Memory does not grow with the input: ten times the text has the same resident set."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.data.words import documents, write_json_lines

pytestmark = pytest.mark.slow

_ONCE_BYTES = 2_000_000
"""A few more batches than one worker has in progress at a time."""


@pytest.mark.timeout(300)
def test_ten_times_the_text_takes_no_more_memory(tmp_path: Path, tokenizer_folder: Path) -> None:
    """With one worker, the number of batches in flight is equal. All processes are counted.

    One long document takes no more either. Pieces of a megabyte took 70 % more, and each worker
    kept this memory after its first long document.
    """
    once = peak_bytes(write_json_lines(tmp_path / "1.jsonl", _ONCE_BYTES), tokenizer_folder)
    tenfold = peak_bytes(
        write_json_lines(tmp_path / "10.jsonl", 10 * _ONCE_BYTES), tokenizer_folder
    )
    assert tenfold < 1.1 * once
    (tmp_path / "long.txt").write_text(" ".join(documents(10 * _ONCE_BYTES)), encoding="utf-8")
    one_document = peak_bytes(tmp_path / "long.txt", tokenizer_folder)
    assert one_document < 1.4 * once


def peak_bytes(text: Path, tokenizer: Path) -> int:
    """Return the largest resident set of the command and its processes together."""
    output = text.with_suffix("")
    options = ["--tokenizer", tokenizer, "--output", output, "--processes", "1"]
    process = psutil.Popen(
        [
            sys.executable,
            "-c",
            "from megaspeed.cli import main; raise SystemExit(main())",
            "tokenize",
            text,
            *options,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    most = 0
    while process.poll() is None:
        most = max(most, resident_bytes(process))
        time.sleep(0.05)
    assert process.returncode == 0
    return most


def resident_bytes(process: psutil.Process) -> int:
    """Return the present resident set of a process and its children."""
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:  # it ended meanwhile
        return 0
    return total
