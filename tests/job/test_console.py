"""The output of rank 0: each line has its numbers, and the lines of a step fit 80 columns."""

import dataclasses
import json
import math
import os
import re
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.mixture import Component, Mixture
from megaspeed.data.token_file import TokenFile, TokenIndex
from megaspeed.job.console import (
    ConsoleObserver,
    banner,
    crowding,
    describe_corpus,
    describe_resumed,
    describe_save,
    describe_slow_rank,
    describe_start,
    describe_step,
    summary_table,
)
from megaspeed.job.resume import Start
from megaspeed.pipeline.partition import parameters_of_stages
from megaspeed.topology.grid import Grid
from megaspeed.training.metrics import (
    MetricsFile,
    PartMetrics,
    Record,
    SampleMetrics,
    ValidationMetrics,
)
from megaspeed.training.trainer import TrainingSummary
from tests.support.tiny import tiny_run
from tests.training.metrics_of_steps import step_metrics

TEXT = Path(__file__).parents[2] / "LICENSE"
FOLDER = Path("run [a]/checkpoints")
"""As rich's markup, the brackets would be an unknown style."""
SAVE = SaveReport(
    step=8,
    checkpoint=FOLDER / "step-00000008",
    size_bytes=1_234_567_890,
    seconds=2.54,
    stall_seconds=0.25,
    error=None,
    deleted=(),
)


def shown(line: str) -> str:
    """Return a line without markup, as the screen shows it."""
    return Text.from_markup(line).plain


def corpus_of(train: int, validation: int | None, documents: int | None = None) -> PreparedCorpus:
    """Return a corpus with this many tokens on each side, in sequences of 10."""

    def side(tokens: int) -> Mixture:
        index = TokenIndex(tokens, None, "<u2", 1, None, None, "c0ffee")
        return Mixture((Component((TokenFile(TEXT, index),), 1.0, "text"),))

    held_out = None if validation is None else side(validation)
    corpus = PreparedCorpus(side(train), held_out, None, sequence_length=10, seed=1)
    return dataclasses.replace(corpus, documents=documents)


def parts(step: int, slowest: float, rank: int = 1) -> PartMetrics:
    return PartMetrics(
        step=step,
        parts_seconds={},
        slowest_rank=rank,
        slowest_rank_seconds=slowest,
        median_rank_seconds=1.0,
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            describe_corpus(corpus_of(71_001, 28_999), 0.34),
            "71,001 training tokens in 7,100 sequences|28,999 validation tokens in 2,899 sequences"
            "|29.0% of all|0.3 s",
        ),
        (describe_corpus(corpus_of(71_001, None, 40), 1), "40 docu|no validation"),
        (
            describe_step(step_metrics(tokens_per_second=15360.4)),
            "step      7|loss 3.2500|lr 1.00e-03|grad norm 0.500|15,360 tok/s",
        ),
        (
            describe_step(step_metrics(mfu=0.4217, tokens_per_second=1.25e7)),
            "12.5M tok/s|MFU 42.2%",
        ),
        (
            describe_step(step_metrics(loss=math.nan, grad_norm=math.inf, skipped=True)),
            "loss nan|grad norm inf|SKIPPED",
        ),
        (
            describe_resumed(
                Progress(step=100, loss=4.33071), step_metrics(step=101, loss=4.32104)
            ),
            "step 101: loss 4.3210|4.3307 when saved (step 100)",
        ),
        (
            describe_resumed(Progress(step=6, loss=None), step_metrics()),
            "step 7: loss 3.2500|not finite when saved (step 6)",
        ),
        (describe_save(SAVE), "step      8|1,234.6 MB in 2.5 s|paused 0.2 s"),
        (
            describe_save(dataclasses.replace(SAVE, deleted=(Path("step-2"), Path("step-4")))),
            "deleted step-2, step-4",
        ),
        (
            describe_save(dataclasses.replace(SAVE, error="No space left: /disk [b]/x")),
            "step      8|no checkpoint|No space left: /disk [b]/x",
        ),
    ],
)
def test_a_line_has_its_words_and_numbers_in_this_order(line: str, words: str) -> None:
    assert re.search(".*".join(map(re.escape, words.split("|"))), shown(line)), line


@pytest.mark.parametrize("mfu", [None, 0.4217])
@pytest.mark.parametrize("tokens_per_second", [999_999.4, 99_999_999.0])
def test_the_lines_of_a_step_fit_80_columns(mfu: float | None, tokens_per_second: float) -> None:
    large = step_metrics(
        step=999_999, loss=9.8765, grad_norm=12345.6, tokens_per_second=tokens_per_second, mfu=mfu
    )
    gone = (FOLDER / "step-00000002",)
    for line in (
        describe_step(large),
        describe_step(dataclasses.replace(large, skipped=True)),
        describe_slow_rank(parts(999_999, 0.12345, 255), Grid(pp=4, dp=8, tp=8)),
        describe_save(dataclasses.replace(SAVE, deleted=gone)),
    ):
        assert len(shown(line)) <= 80


def test_a_start_states_its_checkpoint_and_what_was_skipped() -> None:
    run = tiny_run(TEXT, training={"steps": 10})
    assert list(describe_start(Start(), run)) == []
    broken = ((FOLDER / "step-00000008", "__0_0.distcp is missing"),)
    start = Start(checkpoint=FOLDER / "step-00000005", step=5, in_place=True, skipped=broken)
    assert [shown(line) for line in describe_start(start, run)] == [
        "skipped run [a]/checkpoints/step-00000008: __0_0.distcp is missing",
        "resuming from run [a]/checkpoints/step-00000005",
    ]
    end = Start(checkpoint=FOLDER / "step-00000010", step=10, in_place=True)
    (line,) = map(shown, describe_start(end, run))
    assert "run [a]/checkpoints/step-00000010 has step 10, and training.steps is 10" in line
    assert "--fresh" in line and "--resume" in line
    of_tokens = tiny_run(TEXT, training={"tokens": 3_600})
    (line,) = map(shown, describe_start(end, of_tokens))
    assert "and training.tokens is 3,600 (10 steps). Raise training.tokens to train" in line


def observed(
    run: Run, console: Console, *records: Record, begin: Progress | None = None, crowded: float = 1
) -> ConsoleObserver:
    return ConsoleObserver(run, console, records, bool, begin or Progress(), crowded, bool)


def test_every_step_is_recorded_and_each_log_interval_printed(tmp_path: Path) -> None:
    run = tiny_run(TEXT, training={"steps": 10, "log_interval": 4})
    output = StringIO()
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        observer = observed(run, Console(file=output, width=200), file.write)
        for step in range(1, 11):
            observer.step(step_metrics(step=step, skipped=step == 7))
        observer.validation(ValidationMetrics.of(10, 2.0))
        observer.sampled(SampleMetrics(step=10, samples=[("[a]", "\n[b]")]))
    lines = [line.split()[:2] for line in output.getvalue().splitlines()]
    assert lines == [["step", str(step)] for step in (1, 4, 7, 8, 10, 10)]
    assert not set(output.getvalue()) & {"\x1b", "\r", "\b"}, "a pipe gets no control characters"
    assert "step     10  validation loss 2.0000  perplexity 7.39" in output.getvalue()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, 11), 10, 10]
    assert "step     10  sample '[a]': '\\n[b]'\n" in output.getvalue()
    assert records[-1] == {"step": 10, "samples": [["[a]", "\n[b]"]]}


def test_a_spike_is_named_once_with_its_samples_and_a_rising_loss_is_a_warning() -> None:
    training = {"steps": 490, "run_dir": "run [a]"}
    output = StringIO()
    observer = observed(tiny_run(TEXT, training=training), Console(file=output, width=200))
    for step in range(1, 61):
        observer.step(step_metrics(step=step, loss=3.0 + step % 3, spike=None))
    for step, spike in ((61, 9.34), (62, 7.0), (64, 6.5)):
        tokens = 16 * (24 * 60 + 12 * (step - 60))  # the batch has changed after step 60
        batch = {"tokens": tokens, "train_batch_size": 12}
        observer.step(step_metrics(step=step, loss=4.0, grad_norm=31.2, spike=spike, **batch))
    for step in range(65, 491):
        observer.step(step_metrics(step=step, loss=step / 8))
    spikes = [line for line in output.getvalue().splitlines() if "spike:" in line]
    assert spikes[0] == (
        "step     61  spike: loss 4.0000, grad norm 31.200; one of them lies 9.3 standard "
        "deviations above its mean. Samples of the step: "
        "megaspeed show-batch --config 'run [a]/config.json' --samples 1440:1452"
    )
    assert [line.split()[1] for line in spikes] == ["61", "64"], "62 follows a spike"
    (warning,) = (line for line in output.getvalue().splitlines() if "warning:" in line)
    assert "diverges" in warning and "a learning rate that is too high" in warning


def test_a_log_has_the_elapsed_and_the_remaining_time_in_each_step() -> None:
    """A step takes 1,500 s. The estimate needs two steps."""
    run = tiny_run(TEXT, training={"steps": 10, "log_interval": 2})
    output, now = StringIO(), 0.0
    console = Console(file=output, width=80, get_time=lambda: now)
    observer = observed(run, console)
    for step in range(1, 11):
        now = 1500.0 * step
        observer.step(step_metrics(step=step, tokens=24 * 16 * step))
    ends = [line.split("tok/s")[1].strip() for line in output.getvalue().splitlines()]
    assert ends == [
        *("0:25:00", "0:50:00, 3:20:00 left", "1:40:00, 2:30:00 left", "2:30:00, 1:40:00 left"),
        *("3:20:00, 0:50:00 left", "4:10:00"),
    ]


def test_a_batch_schedule_is_shown_and_the_remaining_time_counts_tokens() -> None:
    """Steps 1 to 4 take 10 s, and steps 5 and 6, which have twice the samples, 20 s."""
    training = {"steps": 6, "log_interval": 1}
    schedule = "0:24 4:48"
    run = tiny_run(
        TEXT, training=training, train_batch_size=None, train_batch_size_schedule=schedule
    )
    lines = list(banner(run, torch.device("cpu"), Start()))
    assert "samples a step: 24 from step 1, 48 from step 5" in lines
    output, now, tokens = StringIO(), 0.0, 0
    observer = observed(run, Console(file=output, width=120, get_time=lambda: now))
    for step, batch in enumerate([24] * 4 + [48] * 2, 1):
        now, tokens = now + batch / 24 * 10, tokens + 16 * batch
        observer.step(step_metrics(step=step, tokens=tokens, train_batch_size=batch))
    said = output.getvalue().splitlines()
    assert [line.split(", ")[1] for line in said if " left" in line] == [
        *("0:01:00 left", "0:00:50 left", "0:00:40 left", "0:00:20 left")
    ]
    assert [line for line in said if "samples" in line] == ["step      5  48 samples a step"]


def test_of_ranks_that_share_processors_only_a_much_slower_one_is_named() -> None:
    run, slow = tiny_run(TEXT, dp=2), [parts(1, 1.4), parts(2, 1.6), parts(3, 5.9), parts(4, 6.1)]
    said = []
    for crowded in (4.0, 1.0):
        output = StringIO()
        console = Console(file=output, width=80)
        observer = observed(run, console, crowded=crowded)
        for each in slow:
            observer.parts(each)
        said.append([line[:19] for line in output.getvalue().splitlines()])
    assert said[0] == ["step      4  slowes"]
    assert said[1] == ["step      2  slowes", "step      3  slowes", "step      4  slowes"]


def test_ranks_are_crowded_if_they_have_more_threads_than_there_are_processors() -> None:
    processors, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    assert crowding("cpu", 3 * processors) == 3 * threads
    assert crowding("cuda", 3 * processors) == 1
    assert crowding("cpu", 1) == max(1, threads / processors)


def test_a_resumed_run_prints_its_first_step_and_the_loss_beside_the_saved_one() -> None:
    run = tiny_run(TEXT, training={"steps": 10, "log_interval": 100})
    output = StringIO()
    begin = Progress(step=6, steps_taken=6, loss=3.5)
    observer = observed(run, Console(file=output, width=200), begin=begin)
    for step in (7, 8):
        observer.step(step_metrics(step=step))
    observer.stopping("SIGTERM", 8)
    observer.saved(SAVE)
    said = [line.strip() for line in output.getvalue().splitlines() if "step" in line]
    assert said == [
        f"{describe_step(step_metrics(step=7))}  0:00:00",
        "resumed at step 7: loss 3.2500; 3.5000 when saved (step 6)",
        "step      8  stopped by SIGTERM after 8 of 10 steps",
        describe_save(SAVE),
    ]


def test_the_stages_parameters_add_up_to_the_model_whatever_the_layout() -> None:
    for tied in (True, False):
        model = {"num_hidden_layers": 5, "tie_word_embeddings": tied}
        (whole,) = parameters_of_stages(tiny_run(TEXT, model=model))
        assert sum(parameters_of_stages(tiny_run(TEXT, pp=4, model=model))) == whole


def printed(table: Table) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_summary_gives_the_last_figures() -> None:
    run = tiny_run(TEXT)
    summary = TrainingSummary(
        last_step=step_metrics(step=10, tokens=1920, loss=2.5),
        last_validation=ValidationMetrics.of(10, 3.0),
        skipped_steps=2,
        tokens=960,
        seconds=4.0,
        last_save=SAVE,
    )
    rows = [
        line.strip(" │|┃").split("│")
        for line in printed(summary_table(run, summary, "cuda")).splitlines()
    ]
    figures = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    assert " 1, 3 MiB (whole process) " in printed(summary_table(run, summary, "cpu"))
    assert figures == {
        "training loss (last step)": "2.5000",
        "validation loss": "3.0000",
        "tokens": "1,920",
        "time": "4.0 s",
        "tokens/s": "240",  # from the second half of the run, which this process trained
        "skipped steps": "2",
        "peak memory by pipeline stage": "1, 3 MiB",
    }
