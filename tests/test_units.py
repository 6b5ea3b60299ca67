"""The printed forms of bytes and counts."""

import pytest

from megaspeed.units import (
    GB,
    GIB,
    KIB,
    MIB,
    counted,
    memory_unit,
    short_count,
    show,
    table_of,
    traffic_unit,
)


def test_memory_counts_in_powers_of_two_and_traffic_in_powers_of_ten() -> None:
    assert GIB.named(80 * 2**30) == "80.00 GiB"
    assert GB.named(80 * 2**30) == "85.90 GB"


def test_a_table_has_the_unit_of_its_largest_number() -> None:
    assert memory_unit([10, 2**30]) is GIB
    assert memory_unit([2**30 - 1, 5]) is MIB
    assert memory_unit([]) is KIB
    assert traffic_unit([10**9]) is GB


def test_large_numbers_have_no_decimals() -> None:
    assert (GIB.of(1000 * 2**30), GIB.of(999 * 2**30)) == ("1,000", "999.00")


def test_counts() -> None:
    assert [short_count(n) for n in (999, 801_920, 174_604_259_328, 10**12)] == [
        "999",
        "801.9K",
        "174.6B",
        "1T",
    ]
    assert (counted(1, "node"), counted(560, "node")) == ("1 node", "560 nodes")
    assert counted(2, "micro-batch") == "2 micro-batches"


def test_a_table_cuts_no_cell_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = table_of(left=("name",), right=("sent\nGB", "together"))
    table.add_row("blocks.0.[weight]", "1,234,567", "1,111")
    show(["a line that is longer than the terminal is wide", table])
    line, heading, second, _, row = capsys.readouterr().out.splitlines()
    assert line == "a line that is longer than the terminal is wide"
    assert heading.split() + second.split() == ["sent", "name", "GB", "together"]
    assert row.split() == ["blocks.0.[weight]", "1,234,567", "1,111"]
