"""What rank 0 prints, word for word."""

import json
import os
import re
import signal
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.pipeline.partition import parameters_of_stages
from megaspeed.training.console import (
    ConsoleObserver,
    crowding,
    describe_save,
    describe_step,
    summary_table,
)
from megaspeed.training.metrics import MetricsFile, PartMetrics, ValidationMetrics
from megaspeed.training.trainer import TrainingSummary
from tests.support.tiny import tiny_run
from tests.training.metrics_of_steps import step_metrics

TEXT = Path(__file__).parents[2] / "LICENSE"


def printed(table: Table) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_every_step_is_recorded_and_each_log_interval_printed(tmp_path: Path) -> None:
    run = tiny_run(TEXT, training={"steps": 10, "log_interval": 4})
    output = StringIO()
    with (
        MetricsFile(tmp_path / "metrics.jsonl") as file,
        ConsoleObserver(
            run, Console(file=output, width=200), (file,), None, Progress(), 1.0, bool
        ) as observer,
    ):
        for step in range(1, 11):
            observer.step(step_metrics(step=step, skipped=step == 7))
        observer.validation(ValidationMetrics.of(10, 2.0))
    lines = [line.split()[:2] for line in output.getvalue().splitlines()]
    assert lines == [["step", str(step)] for step in (1, 4, 7, 8, 10)]
    assert not set(output.getvalue()) & {"\x1b", "\r", "\b"}, "a pipe gets no control characters"
    assert "step     10  validation loss 2.0000  perplexity 7.39" in output.getvalue()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, 11), 10]


def test_a_terminal_gets_a_bar_with_the_time_that_is_left(tmp_path: Path) -> None:
    run = tiny_run(TEXT, training={"steps": 10})
    output = StringIO()
    console = Console(file=output, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    with ConsoleObserver(run, console, (), None, Progress(), 1.0, bool) as observer:
        for step in range(1, 7):
            observer.step(step_metrics(step=step))
        observer._progress.refresh()
        drawn = output.getvalue()
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l"), "the cursor survives a kill"
    assert "\x1b[" in drawn and "6/10" in drawn
    assert re.search(r"steps\S* \S*0:00:0\d", drawn), "four steps at this pace"


def test_a_log_has_the_elapsed_and_the_remaining_time_in_each_step() -> None:
    """A step takes 1,500 s. The estimate needs two steps."""
    run = tiny_run(TEXT, training={"steps": 10, "log_interval": 2})
    output, now = StringIO(), 0.0
    console = Console(file=output, width=80, get_time=lambda: now)
    with ConsoleObserver(run, console, (), None, Progress(), 1.0, bool) as observer:
        for step in range(1, 11):
            now = 1500.0 * step
            observer.step(step_metrics(step=step))
    ends = [line.split("tok/s")[1].strip() for line in output.getvalue().splitlines()]
    assert ends == [
        *("0:25:00", "0:50:00, 3:20:00 left", "1:40:00, 2:30:00 left", "2:30:00, 1:40:00 left"),
        *("3:20:00, 0:50:00 left", "4:10:00"),
    ]


def parts(step: int, slowest: float) -> PartMetrics:
    return PartMetrics(
        step=step,
        parts_seconds={},
        slowest_rank=1,
        slowest_rank_seconds=slowest,
        median_rank_seconds=1.0,
    )


def test_ranks_that_share_processors_get_one_remark_unless_a_rank_is_much_slower() -> None:
    run, slow = tiny_run(TEXT, dp=2), [parts(1, 1.4), parts(2, 1.6), parts(3, 5.9), parts(4, 6.1)]
    said = []
    for crowded in (4.0, 1.0):
        output = StringIO()
        with ConsoleObserver(
            run, Console(file=output, width=80), (), None, Progress(), crowded, bool
        ) as observer:
            for each in slow:
                observer.parts(each)
        said.append([line[:19] for line in output.getvalue().splitlines()])
    assert said[0] == ["step      2  ranks ", "step      4  slowes"]
    assert said[1] == ["step      2  slowes", "step      3  slowes", "step      4  slowes"]


def test_ranks_are_crowded_if_they_have_more_threads_than_there_are_processors() -> None:
    processors, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    assert crowding("cpu", 3 * processors) == 3 * threads
    assert crowding("cuda", 3 * processors) == 1
    assert crowding("cpu", 1) == max(1, threads / processors)


SAVE = SaveReport(
    step=8,
    checkpoint=Path("run/checkpoints/step-00000008"),
    size_bytes=1_234_567,
    seconds=2.5,
    stall_seconds=0.25,
    error=None,
    deleted=(),
)


def test_a_resumed_run_prints_its_first_step_and_the_loss_beside_the_saved_one(
    tmp_path: Path,
) -> None:
    run = tiny_run(TEXT, training={"steps": 10, "log_interval": 100})
    output = StringIO()
    begin = Progress(step=6, steps_taken=6, loss=3.5)
    with (
        MetricsFile(tmp_path / "metrics.jsonl") as file,
        ConsoleObserver(
            run, Console(file=output, width=200), (file,), None, begin, 1.0, bool
        ) as observer,
    ):
        for step in (7, 8):
            observer.step(step_metrics(step=step))
        observer.stopping(signal.SIGTERM, 8, 45.0)
        observer.saved(SAVE)
    said = [line.strip() for line in output.getvalue().splitlines() if "step" in line]
    assert said == [
        f"{describe_step(step_metrics(step=7))}  0:00:00",
        "resumed at step 7: loss 3.2500; 3.5000 when saved (step 6)",
        "step      8  stopped by SIGTERM after 8 of 10 steps",
        describe_save(SAVE),
    ]
    assert "the previous save took 45 s, and a launcher" in output.getvalue()


def test_the_stages_parameters_add_up_to_the_model_whatever_the_layout() -> None:
    for tied in (True, False):
        model = {"num_hidden_layers": 5, "tie_word_embeddings": tied}
        (whole,) = parameters_of_stages(tiny_run(TEXT, model=model))
        assert sum(parameters_of_stages(tiny_run(TEXT, pp=4, model=model))) == whole


def test_the_summary_gives_the_last_figures() -> None:
    run = tiny_run(TEXT)
    summary = TrainingSummary(
        last_step=step_metrics(step=10, tokens=1920, loss=2.5),
        last_validation=ValidationMetrics.of(10, 3.0),
        skipped_steps=2,
        tokens=960,
        seconds=4.0,
        stopped_by=None,
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
        "validation perplexity": "20.09",
        "perplexity of guessing evenly": "301 (loss 5.7071)",
        "tokens": "1,920",
        "time": "4.0 s",
        "tokens/s": "240",  # of the second half of the run, which this process trained
        "skipped steps": "2",
        "peak memory by pipeline stage": "1, 3 MiB",
    }
