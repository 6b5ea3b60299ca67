"""A process with process groups ends with its own exit code, and does not tear them down."""

import subprocess
import sys

PROGRAM = """
import atexit, os, sys
from megaspeed.supervision.process_end import end_process

class AbortsWhenTornDown:
    def __del__(self, abort=os.abort):
        abort()

held = AbortsWhenTornDown()
atexit.register(lambda: sys.stdout.write("said at exit"))
sys.stdout.write("said before, ")
"""


def run(last_line: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM + last_line]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_exit_code_is_kept_and_what_is_due_at_exit_is_done() -> None:
    ended = run("end_process(3)")
    assert (ended.returncode, ended.stdout) == (3, "said before, said at exit")


def test_an_ordinary_exit_would_tear_down_what_is_held() -> None:
    assert run("sys.exit(3)").returncode < 0
