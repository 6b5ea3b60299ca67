"""``megaspeed compare-runs``: the first step and quantity at which two runs differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    assert capsys.readouterr().out == "60 steps are equal within a relative difference of 0\n"


def test_the_first_step_and_quantity_are_named_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written_run(tmp_path / "one")
    two = written_run(tmp_path / "two", factor_from=(21, 1.001), training={"seed": 7})
    figures = tmp_path / "figures.json"
    assert main(["compare-runs", str(one), str(two), "--json", str(figures)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"first difference at step 21: loss {loss_at(21)} and {loss_at(21) * 1.001}, "
        "relative difference 1.0e-03"
    )
    assert [line.split(":")[1].split()[0] for line in lines[1:4]] == [
        "grad_norm",
        "validation_loss",
        "validation_perplexity",
    ]
    assert "  training.seed: 1234 -> 7" in lines
    written = json.loads(figures.read_text())
    assert written["equal"] is False
    assert written["partings"][0]["step"] == 21 and written["partings"][0]["quantity"] == "loss"
    assert written["config"] == [["training.seed", "1234", "7"]]


def test_a_difference_within_the_tolerance_is_none(tmp_path: Path) -> None:
    one = written_run(tmp_path / "one")
    two = written_run(tmp_path / "two", factor_from=(21, 1 + 1e-7))
    assert main(["compare-runs", str(one), str(two)]) == 0
    assert main(["compare-runs", str(one), str(two), "--tolerance", "1e-8"]) == 1
    found = compare_runs(read_run(one), read_run(two), 1e-5)
    assert found["largest"]["loss"] == pytest.approx(1e-7, rel=1e-3)


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
    output = capsys.readouterr().out
    assert output.startswith("25 steps are equal") and "the runs end at steps 60 and 25" in output


def keep(folder: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only the wanted records of a run."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if wanted(json.loads(line))))


def test_a_step_that_one_run_lacks_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two")
    keep(two, lambda record: record["step"] not in (5, 8, 9))
    assert main(["compare-runs", str(one), str(two)]) == 1
    assert (
        capsys.readouterr().out
        == f"first difference at step 5: {two} lacks this step, and 2 later\n"
    )


def test_the_first_difference_comes_first_whether_it_is_a_number_or_a_missing_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two", factor_from=(3, 1.001))
    keep(one, lambda record: record["step"] != 50)
    assert main(["compare-runs", str(one), str(two)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("first difference at step 3: loss ")
    assert [int(line.split()[1].rstrip(":")) for line in lines[1:5]] == [3, 20, 20, 50]
    assert lines[4] == f"step 50: {one} lacks this step"


def test_a_run_continued_in_its_own_folder_is_compared_from_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two")
    keep(two, lambda record: record["step"] > 30)
    for pair in ((one, two), (two, one)):
        assert main(["compare-runs", *map(str, pair)]) == 0
        output = capsys.readouterr().out
        assert (
            output.startswith("30 steps are equal") and "note: the runs begin at steps " in output
        )


def test_a_validation_that_one_run_lacks_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = written_run(tmp_path / "one"), written_run(tmp_path / "two")
    keep(one, lambda record: "loss" in record)
    assert main(["compare-runs", str(one), str(two)]) == 1
    said = capsys.readouterr().out
    assert said == f"first difference at step 20: {one} lacks this validation, and 2 later\n"


def test_the_validation_at_the_end_of_the_shorter_run_need_not_be_in_both(tmp_path: Path) -> None:
    """A run is validated after its last step, which an unfinished run has not reached."""
    one = written_run(tmp_path / "one")
    two, three = written_run(tmp_path / "two", steps=45), written_run(tmp_path / "three", steps=40)
    with (two / "metrics.jsonl").open("a") as file:
        file.write('{"step": 45, "validation_loss": 3.0, "validation_perplexity": 20.1}\n')
    keep(three, lambda record: "loss" in record or record["step"] < 40)
    assert main(["compare-runs", str(one), str(two)]) == 0
    assert main(["compare-runs", str(one), str(three)]) == 0


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
