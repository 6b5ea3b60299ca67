"""What a person reads at the end of a test run: the skipped tests, and what to send if some failed.

    == 3 tests skipped ==
    needs a GPU: 2 in tests/data/test_loader.py, 1 in tests/paper_gpu/test_varlen.py
    == 1 test failed ==
    Send us the complete output, and the file that this command writes:
        .venv/bin/python -m megaspeed.cli doctor --config ds_configs/base.json --json doctor.json
    megaspeed 0.9.0, torch 2.13.0, deepspeed 0.19.8, Python 3.11.9, Linux x86_64, ...

pytest prints the names of the failed tests after it.
"""

import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.support.machine import factor

_DOCTOR = "-m megaspeed.cli doctor --config ds_configs/base.json --json doctor.json"


def print_summary(terminal: Any) -> None:
    """Print the summary to pytest's terminal reporter."""
    skipped = terminal.stats.get("skipped", [])
    failed = [*terminal.stats.get("failed", []), *terminal.stats.get("error", [])]
    if skipped:
        terminal.section(f"{_tests(len(skipped))} skipped")
        for line in lines_of_skipped((test.nodeid, test.longrepr[2]) for test in skipped):
            terminal.line(line)
    if failed:
        terminal.section(f"{_tests(len(failed))} failed")
        terminal.line("Send us the complete output, and the file that this command writes:")
        terminal.line(f"    {sys.executable} {_DOCTOR}")
        terminal.line(f"{versions()}, factor {factor():.2f}")


def lines_of_skipped(tests: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason, from (name of a test, reason)."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for name, reason in tests:
        files[reason.removeprefix("Skipped: ")][name.split("::")[0]] += 1
    return [
        f"{reason}: " + ", ".join(f"{number} in {file}" for file, number in sorted(found.items()))
        for reason, found in sorted(files.items())
    ]


def versions() -> str:
    """Return the versions and the machine on which tests ran, without importing torch."""
    packages = [f"{name} {_version(name)}" for name in ("megaspeed", "torch", "deepspeed")]
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return ", ".join([*packages, f"Python {platform.python_version()}", system])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _tests(number: int) -> str:
    return f"{number} test{'s' * (number != 1)}"
