"""The report of a comparison: text for the terminal, Markdown and a picture."""

import math
from dataclasses import replace
from pathlib import Path

from megaspeed.measurement.compare import ComparedRow, ComparisonResult, report
from megaspeed.measurement.torch_trainers import Ddp
from tests.measurement.compare.figures import all_watched, result, run, trained, turn, zero_2

FAILED = replace(zero_2()[1], failure="failed in turn 1: out of memory: too much (rank 1)")
BASELINE = ComparedRow(
    label="DDP",
    run=run(),
    make=Ddp,
    turns=[turn(250, 125, 500)],
    extras=all_watched(),
)


def shown(result: ComparisonResult) -> str:
    """Return the output on the terminal, as one line."""
    return " ".join(report(result).text.split())


def test_the_files_have_the_text_of_the_screen(tmp_path: Path) -> None:
    slow = replace(BASELINE, turns=[turn(250), turn(350), turn(300)])
    fast = replace(result().rows[0], turns=[turn(120), turn(170), turn(145)])
    compared = replace(result(), rows=[fast, slow, FAILED])
    written = report(compared).write(tmp_path, "compare")
    assert [file.name for file in written] == ["compare.json", "compare.md", "compare.png"]
    assert written[2].read_bytes().startswith(b"\x89PNG")
    text = written[1].read_text()
    assert text.startswith("# tiny: ZeRO stages compared\n\n" + report(compared).text)
    lines = text.splitlines()
    assert lines[2] == "- tiny: pp 2 x dp 2 x tp 1 = 4 ranks (CPU), fp32"
    assert lines[3].startswith("- 24 samples of 16 tokens a step in ")
    assert lines[4] == "- gpt2: 48,576 parameters, 3 blocks x 32, 4 heads, vocabulary 301 (tied)"
    assert "- ZeRO-2 per_step failed in turn 1: out of memory: too much (rank 1)" in lines
    *_, verdict, picture = text.rstrip().split("\n\n")
    assert verdict.startswith("verdict: use ZeRO-0 here (--set zero_optimization.stage=0): ")
    assert picture == "![compare](compare.png)"
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
        for part in text.split("\n\n")
        if part.startswith("|")
    ]
    stages, rows = ([heading, *lines] for heading, _, *lines in tables)
    assert stages == [
        ["row", "stage", "states MiB", "peak MiB", "sent MiB"],
        ["ZeRO-0", "0", "10.00 (1.20)", "16.00 (1.25)", "4.00 (1.00)"],
        ["ZeRO-0", "1", "10.00 (1.00)", "12.00 (1.00)", "2.00 (1.00)"],
        ["DDP", "0", "10.00", "16.00", "4.00"],
        ["DDP", "1", "10.00", "12.00", "2.00"],
    ]
    assert rows == [
        ["row", "step ms", "slower", "tokens/s", "peak MiB", "sent MiB"],
        ["ZeRO-0", "174", "fastest", "2,209", "16.00", "4.00"],
        ["DDP", "327", "+88.4%", "1,173", "16.00", "4.00"],
    ]


def test_the_noise_is_stated_with_its_origin() -> None:
    """In logs, the residuals of both rows are 0.001, -0.002 and 0.001, with opposite signs."""

    def compared(rest: float) -> str:
        rows = [
            replace(row, turns=[turn(1000 * math.exp(each) - 30) for each in rests])
            for row, sign in ((result().rows[0], rest), (BASELINE, -rest))
            for rests in [(sign, -2 * sign, sign)]
        ]
        return shown(replace(result(), turns=3, steps=1, rows=rows))

    # there are two degrees of freedom, so t is 9.92: 9.92 x sqrt(2 / 3 x 12e-6 / 2) = 0.0198
    assert "3 turns of 1 timed step each. The noise is 2.0%: equally fast" in compared(0.001)
    assert "The noise is over 100%: equally fast" in compared(0.1)
    text = shown(result())
    assert "1 turn of 3 timed steps each. The noise is not known, so all rows count as tied" in text


def test_what_disturbs_the_figures_is_noted() -> None:
    disagreeing = shown(result(trained(zero_2()[0], loss=2.6)))
    assert "THE LOSSES DISAGREE: ZeRO-2 per_micro_batch: loss 2.6, but ZeRO-0 has" in disagreeing
    stopped = replace(result(), stopped=True)
    assert "stopped after 1 turn;" in shown(stopped) and not stopped.succeeded
    skipping = [replace(rank, skipped_steps=1) for rank in turn(250)]
    skipped = replace(result(), rows=[replace(BASELINE, turns=[skipping])])
    assert "DDP skipped 1 of 3 steps, because the loss or the gradient norm" in shown(skipped)


def test_every_line_fits_80_columns_whatever_failed() -> None:
    reason = "RuntimeError: " + "something went wrong, and this is a long reason for it; " * 4
    unknown = replace(BASELINE, label="FSDP2 per_micro_batch", extras=(), failure=reason)
    rows = [*result().rows, replace(FAILED, failure=reason), unknown]
    lines = report(replace(result(), rows=rows)).text.splitlines()
    assert max(map(len, lines)) <= 80


def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path: Path) -> None:
    named = replace(result(), run=replace(run(), name=r"cost $\x$ [bold]"))
    assert len(report(named).write(tmp_path, "compare")) == 3


def test_without_figures_there_is_no_picture(tmp_path: Path) -> None:
    nothing = ComparisonResult(run=run(), turns=3, steps=4, rows=[FAILED])
    files = report(nothing).write(tmp_path, "compare")
    assert [file.name for file in files] == ["compare.json", "compare.md"]
    assert "no row is recommended, because no ZeRO row was measured." in shown(nothing)
