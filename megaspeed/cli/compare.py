"""``megaspeed compare``: the ZeRO stages side by side, predicted and measured."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_command,
    load,
    positive,
    say,
    write_json,
    write_results,
)
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.files.paths import folder_problem, path_argument

if TYPE_CHECKING:
    from megaspeed.analysis.compare.result import ComparisonResult, Row
    from megaspeed.analysis.local_ranks import DeviceType


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
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="DIR",
        help="folder for the results (runs/<name>-compare)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=1800, help="seconds for each turn (1800)"
    )


def run(options: argparse.Namespace) -> int:
    """Trains every row, then shows and writes the figures."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    import torch

    from megaspeed.analysis.compare.report import as_json, on_screen
    from megaspeed.analysis.compare.result import ComparisonResult
    from megaspeed.analysis.compare.rows import train_rows
    from megaspeed.analysis.turns import share_of_others
    from megaspeed.data.corpus import prepare_corpus

    device_type: DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    run = load(options, device_type)
    folder = options.out or Path("runs") / f"{run.name}-compare"
    rows = _rows(run, options, folder, device_type)
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    share = share_of_others()
    with BarOrLines(options.turns * sum(row.run is not None for row in rows)) as bar:
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
    write_json(options, as_json(result))
    say(on_screen(result))
    say("")
    say("wrote " + ", ".join(map(str, files)))
    if stopped:
        say("stopped before the last turn; all ranks have ended", error=True)
    return EXIT_DONE if result.succeeded and not stopped else EXIT_FAILED


def write_files(result: "ComparisonResult", folder: Path) -> list[Path]:
    """Writes JSON, Markdown and, if there are figures, two pictures. Returns the files."""
    from megaspeed.analysis.compare.charts import draw_memory_chart, draw_trade_off_chart
    from megaspeed.analysis.compare.report import as_json, as_markdown

    charts = {"memory.png": draw_memory_chart, "tradeoff.png": draw_trade_off_chart}
    pictures = {name: partial(draw, result) for name, draw in charts.items() if result.watched}
    text = as_markdown(result, list(pictures))
    return write_results(folder, "compare", as_json(result), text, pictures)


def _rows(
    run: Run, options: argparse.Namespace, folder: Path, device_type: "DeviceType"
) -> "list[Row]":
    """The rows. Raises ConfigError if none can run, or if the folder cannot be written."""
    from megaspeed.analysis.compare.rows import baseline_rows, zero_rows
    from megaspeed.analysis.local_ranks import too_many_ranks

    rows = [
        *zero_rows(run, options.stages, device_type),
        *baseline_rows(run, options.baselines, device_type),
    ]
    problems = [] if any(row.run for row in rows) else [str(row.reason) for row in rows]
    problem = folder_problem("--out", folder)
    if problem is not None:
        problems.append(problem)
    problems += too_many_ranks(run.grid.world_size, device_type)
    if problems:
        raise ConfigError(problems, where=f"the comparison of {options.config}")
    return rows
