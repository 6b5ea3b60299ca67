"""What rank 0 prints, word for word."""

import json
import re
import signal
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.pipeline.partition import parameters_of_stages
from megaspeed.training.console import ConsoleObserver, describe_save, describe_step, summary_table
from megaspeed.training.metrics import MetricsFile, ValidationMetrics
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
            run, Console(file=output, width=200), (file,), None, Progress()
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
    with ConsoleObserver(run, console, (), None, Progress()) as observer:
        for step in range(1, 7):
            observer.step(step_metrics(step=step))
        observer._progress.refresh()
        drawn = output.getvalue()
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l"), "the cursor survives a kill"
    assert "\x1b[" in drawn and "6/10" in drawn
    assert re.search(r"steps\S* \S*0:00:0\d", drawn), "four steps at this pace"


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
        ConsoleObserver(run, Console(file=output, width=200), (file,), None, begin) as observer,
    ):
        for step in (7, 8):
            observer.step(step_metrics(step=step))
        observer.stopping(signal.SIGTERM, 8, 45.0)
        observer.saved(SAVE)
    said = [line.strip() for line in output.getvalue().splitlines() if "step" in line]
    assert said == [
        describe_step(step_metrics(step=7)),
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
        line.strip(" │|┃").split("│") for line in printed(summary_table(run, summary)).splitlines()
    ]
    figures = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
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
