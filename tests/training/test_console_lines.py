"""The lines that rank 0 prints, word for word."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from rich.text import Text

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.token_file import TokenFile, TokenIndex
from megaspeed.topology.grid import Grid
from megaspeed.training.console import (
    describe_corpus,
    describe_late_save,
    describe_resumed,
    describe_save,
    describe_slow_rank,
    describe_start,
    describe_start_up,
    describe_step,
)
from megaspeed.training.metrics import PartMetrics
from megaspeed.training.resume import Start
from tests.support.tiny import tiny_run
from tests.training.metrics_of_steps import step_metrics

TEXT = Path(__file__).parents[2] / "LICENSE"
FOLDER = Path("run [a]/checkpoints")
"""As rich's markup, the brackets would be a style that nobody knows."""


def shown(line: str) -> str:
    """Without markup, as it stands on the screen."""
    return Text.from_markup(line).plain


def corpus_of(train: int, validation: int | None) -> PreparedCorpus:
    """So many tokens of each side, in sequences of 10."""

    def side(tokens: int) -> Mixture:
        index = TokenIndex(tokens, None, "<u2", 1, None, None, None, "c0ffee")
        return Mixture((Component((TokenFile(TEXT, index),), 1.0, "text"),))

    held_out = None if validation is None else side(validation)
    return PreparedCorpus(side(train), held_out, None, sequence_length=10, seed=1)


def test_the_corpus_line_tells_what_is_held_out() -> None:
    assert describe_corpus(corpus_of(71_001, 28_999), 0.34) == (
        "corpus: 71,001 training tokens in 7,100 sequences; 28,999 validation tokens in 2,899 "
        "sequences, 29.0% of all; ready in 0.3 s"
    )
    assert "; no validation; " in describe_corpus(corpus_of(71_001, None), 0.34)
    documents = dataclasses.replace(corpus_of(71_001, None), documents="40 documents")
    assert describe_corpus(documents, 0.34).startswith(
        "corpus: 40 documents; 71,001 training tokens in 7,100 sequences; "
    )


def test_one_line_tells_a_step() -> None:
    assert describe_step(step_metrics(tokens_per_second=15360.4)) == (
        "step      7  loss 3.2500  lr 1.00e-03  grad norm 0.500  15,360 tok/s"
    )


def test_a_known_peak_gives_an_mfu() -> None:
    line = describe_step(step_metrics(mfu=0.4217, tokens_per_second=1.25e7))
    assert line.endswith("grad norm 0.500  12.5M tok/s  MFU 42.2%")


def test_a_skipped_step_says_so() -> None:
    line = describe_step(step_metrics(loss=math.nan, grad_norm=math.inf, skipped=True))
    assert "loss nan" in line and "grad norm inf" in line
    assert line.endswith("SKIPPED")


@pytest.mark.parametrize("mfu", [None, 0.4217])
@pytest.mark.parametrize("tokens_per_second", [999_999.4, 99_999_999.0])
def test_a_step_fits_80_columns(mfu: float | None, tokens_per_second: float) -> None:
    large = step_metrics(
        step=999_999, loss=9.8765, grad_norm=12345.6, tokens_per_second=tokens_per_second, mfu=mfu
    )
    assert len(describe_step(large)) <= 80
    assert len(describe_step(dataclasses.replace(large, skipped=True))) <= 80


def test_the_other_lines_of_a_step_fit_80_columns() -> None:
    parts = PartMetrics(
        step=999_999,
        parts_seconds={},
        slowest_rank=255,
        slowest_rank_seconds=0.12345,
        median_rank_seconds=0.12345,
    )
    assert len(shown(describe_slow_rank(parts, Grid(pp=4, dp=8, tp=8)))) <= 80
    gone = (FOLDER / "step-00000002",)
    assert len(shown(describe_save(dataclasses.replace(SAVE, deleted=gone)))) <= 80


def test_a_run_that_starts_at_step_0_says_nothing_of_it() -> None:
    assert describe_start(Start(), tiny_run(TEXT)) == []


def test_a_resumed_run_says_from_where_and_what_it_skipped() -> None:
    start = Start(
        checkpoint=FOLDER / "step-00000005",
        step=5,
        in_place=True,
        skipped=((FOLDER / "step-00000008", "__0_0.distcp is missing"),),
    )
    assert [shown(line) for line in describe_start(start, tiny_run(TEXT))] == [
        "skipped run [a]/checkpoints/step-00000008: __0_0.distcp is missing",
        "resuming from run [a]/checkpoints/step-00000005",
    ]


def test_a_run_that_is_over_says_how_to_continue() -> None:
    start = Start(checkpoint=FOLDER / "step-00000010", step=10, in_place=True)
    (line,) = describe_start(start, tiny_run(TEXT, training={"steps": 10}))
    assert shown(line) == (
        "nothing is left to train: run [a]/checkpoints/step-00000010 has step 10, and "
        "training.steps is 10. Raise training.steps to train, or start at step 0 with --fresh and "
        "without --resume DIR."
    )


def test_the_first_loss_stands_beside_the_saved_one() -> None:
    begin = Progress(step=100, steps_taken=100, loss=4.33071)
    assert describe_resumed(begin, step_metrics(step=101, loss=4.32104)) == (
        "resumed at step 101: loss 4.3210; 4.3307 when saved (step 100)"
    )


@pytest.mark.parametrize(
    ("loss", "warned"), [(3.0, False), (4.5, False), (4.51, True), (math.nan, True)]
)
def test_a_loss_that_is_half_a_nat_worse_is_warned_of(loss: float, warned: bool) -> None:
    line = describe_resumed(Progress(step=6, loss=4.0), step_metrics(loss=loss))
    assert line.startswith("[yellow]") is warned
    assert ("more than 0.5 nats higher" in line) is warned


def test_a_saved_loss_that_was_not_finite_is_no_reason_to_warn() -> None:
    line = describe_resumed(Progress(step=6, loss=None), step_metrics())
    assert line == "resumed at step 7: loss 3.2500; not finite when saved (step 6)"


SAVE = SaveReport(
    step=8,
    checkpoint=FOLDER / "step-00000008",
    size_bytes=1_234_567_890,
    seconds=2.54,
    stall_seconds=0.25,
    error=None,
    deleted=(),
)


def test_a_save_says_what_it_cost() -> None:
    assert describe_save(SAVE) == ("step      8  checkpoint 1,234.6 MB in 2.5 s, paused 0.2 s")
    gone = tuple(FOLDER / name for name in ("step-00000002", "step-00000004"))
    line = describe_save(dataclasses.replace(SAVE, deleted=gone))
    assert line.endswith("paused 0.2 s; deleted step-00000002, step-00000004")


def test_a_save_that_failed_says_why() -> None:
    failed = dataclasses.replace(SAVE, error="No space left on device: /disk [b]/x")
    assert shown(describe_save(failed)) == (
        "step      8  no checkpoint: No space left on device: /disk [b]/x"
    )
    assert describe_save(failed).startswith("[red]")


def test_a_save_that_may_outlast_the_launchers_patience_is_warned_of() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    line = describe_late_save(45.0, {}) or ""
    assert line.startswith("[yellow]the previous save took 45 s, and a launcher that is stopped")
    assert "kills its ranks after 30 s" in line and line.endswith("to a rank earlier[/yellow]")
    assert describe_late_save(29.0, {}) is describe_late_save(None, {}) is None
    longer = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
    assert describe_late_save(45.0, longer) == line, "only torchrun reads it"
    assert describe_late_save(45.0, torchrun | longer) is None
    line = describe_late_save(61.0, torchrun | longer) or ""
    assert "kills its ranks after 60 s" in line
    assert line.endswith("or raise TORCH_ELASTIC_SHUTDOWN_TIMEOUT[/yellow]")


def test_a_start_up_is_divided_into_its_phases() -> None:
    line = describe_start_up({"creating the process groups": 0.02, "loading [b]/x": 0.5})
    assert re.fullmatch(
        r"start-up took [0-9.]+ s: imports and meeting [0-9.]+, loading \[b\]/x 0\.5", line
    ), line
