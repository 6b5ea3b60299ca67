"""``megaspeed compare``: the ZeRO stages side by side, predicted and measured."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.measuring import (
    add_results_options,
    device_type_here,
    results_folder,
    show_results,
    write_results,
)
from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, add_command, load, positive, say

if TYPE_CHECKING:
    from megaspeed.measurement.compare.result import ComparisonResult


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands, "compare", run, "train each ZeRO stage and compare memory, traffic and time"
    )
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=(0, 1, 2, 3),
        default=[0, 1, 2, 3],
        metavar="STAGE",
        help="ZeRO stages (0 1 2 3)",
    )
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=("ddp", "fsdp"),
        default=[],
        metavar="NAME",
        help="also train with torch's own ddp or fsdp; pipeline and tensor must be 1",
    )
    parser.add_argument("--turns", type=positive, default=3, help="turns of each row (3)")
    parser.add_argument("--steps", type=positive, default=4, help="timed steps of each turn (4)")
    add_results_options(parser, "compare", each="turn", option="--out")


def run(options: argparse.Namespace) -> int:
    """Trains every row, then shows and writes the figures."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    from megaspeed.data.corpus import prepare_corpus
    from megaspeed.measurement.compare.report import as_json, on_screen
    from megaspeed.measurement.compare.result import ComparisonResult
    from megaspeed.measurement.compare.rows import baseline_rows, train_rows, zero_rows
    from megaspeed.measurement.turns import share_of_others

    device_type = device_type_here()
    run = load(options, device_type)
    rows = zero_rows(run, options.stages, device_type)
    rows += baseline_rows(run, options.baselines, device_type)
    folder = results_folder(
        options, run, device_type, command="compare", what="comparison", option="--out"
    )
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    share = share_of_others()
    with BarOrLines(options.turns * len(rows)) as bar:
        done, stopped = train_rows(
            rows,
            corpus,
            turns=options.turns,
            steps=options.steps,
            device_type=device_type,
            folder=folder,
            timeout_seconds=options.timeout,
            on_turn=bar.show,
        )
    result = ComparisonResult(
        run=run,
        turns=options.turns,
        steps=options.steps,
        rows=done,
        share_of_others=max(share, share_of_others()),
    )
    files = write_files(result, folder)
    show_results(options, as_json(result), on_screen(result), files)
    if stopped:
        say("stopped before the last turn; all ranks have ended", error=True)
    return EXIT_DONE if result.succeeded and not stopped else EXIT_FAILED


def write_files(result: "ComparisonResult", folder: Path) -> list[Path]:
    """Writes JSON, Markdown and, if there are figures, two pictures. Returns the files."""
    from megaspeed.measurement.compare.charts import draw_memory_chart, draw_trade_off_chart
    from megaspeed.measurement.compare.report import as_json, as_markdown

    charts = {"memory.png": draw_memory_chart, "tradeoff.png": draw_trade_off_chart}
    pictures = {name: partial(draw, result) for name, draw in charts.items() if result.watched}
    text = as_markdown(result, list(pictures))
    return write_results(folder, "compare", as_json(result), text, pictures)
