"""A case that ends the process, or after which no call of CUDA works, does not end the others."""

import sys
from pathlib import Path

import pytest

from tests.paper_gpu.on_device import main, read

CHILD = """
import os, sys
from pathlib import Path
from tests.paper_gpu import on_device

answers = True

def lose_the_device():
    global answers
    answers = False
    raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")

def must_have_a_device():
    assert answers

def fail_without_text():
    raise AssertionError

checks = {
    "has no text": fail_without_text,
    "fails": lambda: 1 / 0,
    "crashes": lambda: os.abort(),
    "loses the device": lose_the_device,
    "works": must_have_a_device,
}
on_device.checks = lambda: checks
on_device._device_answers = lambda: answers
print("child", flush=True)
sys.exit(on_device.run_checks(Path(sys.argv[1])))
"""


def test_each_case_has_its_own_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    results = tmp_path / "results.jsonl"
    assert main(results, [sys.executable, "-c", CHILD]) == 1
    assert {line["case"]: line["problem"] for line in read(results)} == {
        "has no text": "AssertionError: AssertionError",
        "fails": "ZeroDivisionError: division by zero",
        "crashes": "the process ended during this case",
        "loses the device": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "works": None,
    }
    assert len(read(results)) == 5 + 5 + 4, "no case has begun twice"
    assert capfd.readouterr().out.count("child\n") == 3


def test_children_that_do_nothing_are_a_failure(tmp_path: Path) -> None:
    assert main(tmp_path / "results.jsonl", [sys.executable, "-c", "raise SystemExit(1)"]) == 1
