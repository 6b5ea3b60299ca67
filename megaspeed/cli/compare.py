"""``megaspeed compare``: the ZeRO stages side by side, predicted and measured."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.cli.common_options import EXIT_DONE, EXIT_FAILED, add_command, load, positive
from megaspeed.cli.output import say, write_json
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.files.places import folder_problem, named_place

if TYPE_CHECKING:
    from rich.console import Console

    from megaspeed.analysis.compare.result import Row
    from megaspeed.analysis.compare.variants import Variant
    from megaspeed.data.corpus import PreparedCorpus

_COLUMNS_OF_THE_TABLES = 120
_RANKS_A_PROCESSOR = 16


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
        help="torch's own beside them: ddp, fsdp; where pipeline and tensor are 1",
    )
    parser.add_argument(
        "--steps", type=_several, default=5, help="steps whose time is taken, the first apart (5)"
    )
    parser.add_argument(
        "--out",
        type=named_place,
        metavar="DIR",
        help="folder for the results (runs/<name>-compare)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=1800, help="seconds that one row may take (1800)"
    )


def run(options: argparse.Namespace) -> int:
    """Trains every row, then shows and writes the figures."""
    # Imported here: torch takes seconds, which `check` need not wait for.
    import torch
    from rich.console import Console

    from megaspeed.analysis.compare.report import show, write
    from megaspeed.analysis.compare.result import ComparisonResult
    from megaspeed.analysis.compare.result_json import result_as_json
    from megaspeed.data.corpus import prepare_corpus

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    run = load(options, device_type)
    folder = options.out or Path("runs") / f"{run.name}-compare"
    variants = _variants(run, options, folder, device_type)
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    # The bar goes to standard error, so that a file or a pipe gets the tables alone.
    bar = Console(stderr=True)
    rows, stopped = _run_rows(variants, corpus, options, device_type, folder, bar)
    # The ranks name their device: if this process asked, it would open a context on GPU 0.
    device = next((record.device for row in rows for record in row.ranks), device_type.upper())
    result = ComparisonResult(run=run, device=device, steps=options.steps, rows=rows)
    # A narrow terminal breaks lines, a file has no width; neither is to cut a figure off.
    show(result, Console(width=max(console.width, _COLUMNS_OF_THE_TABLES)))
    files = write(result, folder)
    write_json(options, result_as_json(result))
    say("wrote " + ", ".join(map(str, files)))
    if stopped:
        say(f"stopped after {len(rows)} of {len(variants)} rows; no rank is left", error=True)
    return EXIT_DONE if result.succeeded and not stopped else EXIT_FAILED


def _variants(
    run: Run, options: argparse.Namespace, folder: Path, device_type: str
) -> "list[Variant]":
    """The rows; ConfigError where nothing could be run or nowhere be written."""
    from megaspeed.analysis.compare.variants import baseline_variants, zero_variants

    variants = [
        *zero_variants(run, options.stages, device_type),
        *baseline_variants(run, options.baselines, device_type),
    ]
    problems = [] if any(v.run for v in variants) else [str(v.refused) for v in variants]
    problem = folder_problem("--out", folder)
    if problem is not None:
        problems.append(problem)
    problems += _too_many_ranks(run.grid.world_size, device_type)
    if problems:
        raise ConfigError(problems, where=f"the comparison of {options.config}")
    return variants


def _too_many_ranks(world_size: int, device_type: str) -> list[str]:
    """All ranks are started on this machine, a GPU for each; processors may be shared."""
    import torch

    if device_type == "cuda":
        most, have = torch.cuda.device_count(), f"{torch.cuda.device_count()} GPUs"
    else:
        processors = os.cpu_count() or 1
        most, have = processors * _RANKS_A_PROCESSOR, f"{processors} processors"
    if world_size <= most:
        return []
    return [
        f"--world-size {world_size} is more than the {most} ranks that this machine with {have} "
        "takes; start fewer, or ask megaspeed plan, which runs nothing"
    ]


def _run_rows(
    variants: "Sequence[Variant]",
    corpus: "PreparedCorpus",
    options: argparse.Namespace,
    device_type: str,
    folder: Path,
    console: "Console",
) -> "tuple[list[Row], bool]":
    """The rows under a progress bar, and whether they were stopped before the last one."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from megaspeed.analysis.compare.comparing import run_variants

    rows: list[Row] = []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeElapsedColumn())
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
    ) as progress:
        bar = progress.add_task("", total=len(variants))
        try:
            for row in run_variants(
                variants,
                corpus,
                steps=options.steps,
                device_type=device_type,
                folder=folder,
                timeout_seconds=options.timeout,
                on_row=lambda variant: progress.update(bar, description=variant.label),
            ):
                rows.append(row)
                progress.advance(bar)
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _several(text: str) -> int:
    """A number of steps of which the first one does not count."""
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("it must be at least 2, because the first step warms up")
    return number
