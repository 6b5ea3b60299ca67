"""``megaspeed compare-runs``: the first step and quantity at which two runs differ."""

import json
from pathlib import Path

import pytest

from megaspeed.cli import main
from megaspeed.reports.run_record import compare_runs, read_run
from tests.reports.written_runs import loss_at, written_run


def edit(folder: Path, step: int, **values: object) -> None:
    """Change values of a recorded step."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        if record["step"] == step and "loss" in record:
            record.update(values)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_equals_itself_to_the_bit_even_if_it_was_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written_run(tmp_path / "one")
    two = written_run(tmp_path / "two", resumed_at=30)
    assert main(["compare-runs", str(one), str(two), "--tolerance", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("60 steps in common; ")
    assert said.endswith("\nequal within a relative difference of 0\n")


def test_the_first_step_and_quantity_are_named_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written_run(tmp_path / "one")
    two = written_run(tmp_path / "two", factor_from=(21, 1.001), training={"seed": 7})
    figures = tmp_path / "figures.json"
    assert main(["compare-runs", str(one), str(two), "--json", str(figures)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        f"step 21: loss first differs: {loss_at(21)} and {loss_at(21) * 1.001}, "
        "relative difference 1.0e-03"
    )
    assert [line.split()[2] for line in lines[2:5]] == [
        "grad_norm",
        "validation_loss",
        "validation_perplexity",
    ]
    assert "configuration: training.seed: 1234 -> 7" in lines
    written = json.loads(figures.read_text())
    assert written["equal"] is False
    assert written["partings"][0]["step"] == 21 and written["partings"][0]["quantity"] == "loss"
    assert written["config"] == [["training.seed", "1234", "7"]]


def test_a_difference_within_the_tolerance_is_none(tmp_path: Path) -> None:
    one = written_run(tmp_path / "one")
    two = written_run(tmp_path / "two", factor_from=(21, 1 + 1e-7))
    assert main(["compare-runs", str(one), str(two)]) == 0
    assert main(["compare-runs", str(one), str(two), "--tolerance", "1e-8"]) == 1
    (parting, *_) = compare_runs(read_run(one), read_run(two), 1e-8)["partings"]
    assert parting["relative"] == pytest.approx(1e-7, rel=1e-3)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("tokens", 384 * 9 + 1), ("skipped", True), ("loss", None), ("learning_rate", 0.5)],
)
def test_each_quantity_can_differ(tmp_path: Path, quantity: str, value: object) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two")
    edit(two, 9, **{quantity: value})
    (parting,) = compare_runs(read_run(one), read_run(two), 0.01)["partings"]
    assert (parting["step"], parting["quantity"]) == (9, quantity)
    assert parting["values"][1] == value and type(parting["values"][1]) is type(value)


def test_within_a_step_a_cause_comes_before_its_effect(tmp_path: Path) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two")
    edit(two, 9, grad_norm=9.0, loss=9.0, learning_rate=0.5)
    partings = compare_runs(read_run(one), read_run(two), 0.01)["partings"]
    assert [parting["quantity"] for parting in partings] == ["learning_rate", "loss", "grad_norm"]


def test_a_run_under_way_is_compared_as_far_as_it_has_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two", steps=25)
    assert main(["compare-runs", str(one), str(two)]) == 0
    assert capsys.readouterr().out.startswith("25 steps in common; the runs recorded 60 and 25\n")


def test_wrong_input_ends_with_2_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, new = written_run(tmp_path / "run"), written_run(tmp_path / "new", steps=0)
    assert main(["compare-runs", str(run), str(tmp_path / "nothing")]) == 2
    assert main(["compare-runs", str(run), str(new)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 2
    assert "nothing is not a folder" in printed.err and "no step in common" in printed.err
