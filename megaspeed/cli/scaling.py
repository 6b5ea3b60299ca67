"""``megaspeed scaling``: tokens/s at several numbers of ranks, and where the rest goes."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.cli.measuring import (
    add_results_options,
    device_type_here,
    results_folder,
    show_results,
    write_results,
)
from megaspeed.cli.options import EXIT_DONE, EXIT_FAILED, add_parser, positive, say, world_size
from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import read_config
from megaspeed.data.selection import load_run_and_data
from megaspeed.topology.launch import usable_processors

if TYPE_CHECKING:
    from megaspeed.measurement.scaling import Mode

_SIZES = "--world-sizes"


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    text = "tokens/s and efficiency at several numbers of ranks"
    parser = add_parser(commands, "scaling", run, text)
    add_config_options(parser)
    add_option = parser.add_argument
    add_option(
        _SIZES,
        type=world_size,
        nargs="+",
        required=True,
        metavar="N",
        help="numbers of processes; the others are compared with the smallest",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--strong",
        dest="mode",
        action="store_const",
        const="strong",
        default="strong",
        help="train_batch_size stays: fewer micro-batches for each data rank (default)",
    )
    mode.add_argument(
        "--weak",
        dest="mode",
        action="store_const",
        const="weak",
        help="each data rank keeps its micro-batches: train_batch_size grows",
    )
    add_option("--steps", type=positive, default=10, help="timed steps of each row (10)")
    add_option(
        "--no-prediction",
        action="store_true",
        help="do not predict; on a CPU, each prediction measures the machine for some 15 seconds",
    )
    add_results_options(parser, "scaling", each="training")


def run(options: argparse.Namespace) -> int:
    """Trains every number of ranks, then shows and writes the figures."""
    sizes = sorted(set(options.world_sizes))
    _refuse_other_multiples(options, sizes)
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    from megaspeed.data.corpus import prepare_corpus
    from megaspeed.measurement.scaling import ScalingResult, scaled_runs, train_rows
    from megaspeed.measurement.scaling_report import as_json, as_markdown, draw_chart
    from megaspeed.measurement.turns import share_of_others

    device_type = device_type_here()
    mode: Mode = options.mode
    overrides = [*options.overrides, "parallel.spare_ranks=false"]
    base = load_run_and_data(options.config, overrides, World(sizes[0], _SIZES, device_type))
    runs = scaled_runs(base, sizes, mode, device_type)
    folder = results_folder(
        options, runs[-1], device_type, command="scaling", what="scaling", size_option=_SIZES
    )
    corpus = prepare_corpus(base.config.data, base.config.model.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    share = share_of_others()
    with BarOrLines(len(runs)) as bar:
        rows, stopped = train_rows(
            runs,
            corpus,
            steps=options.steps,
            device_type=device_type,
            folder=folder,
            timeout_seconds=options.timeout,
            predicts=not options.no_prediction,
            on_row=bar.show,
        )
    if not rows:
        say(f"stopped before any of {len(runs)} rows; all ranks have ended", error=True)
        return EXIT_FAILED
    result = ScalingResult(
        mode=mode,
        steps=options.steps,
        rows=rows,
        processors=usable_processors(),
        share_of_others=max(share, share_of_others()),
    )
    pictures = {"scaling.png": partial(draw_chart, result)} if result.done else {}
    text = as_markdown(result, next(iter(pictures), None))
    files = write_results(folder, "scaling", as_json(result), text, pictures)
    show_results(options, as_json(result), as_markdown(result, None).rstrip(), files)
    if stopped:
        say(f"stopped after {len(rows)} of {len(runs)} rows; all ranks have ended", error=True)
    return EXIT_FAILED if stopped or len(result.done) < len(rows) else EXIT_DONE


def _refuse_other_multiples(options: argparse.Namespace, sizes: list[int]) -> None:
    """Raises ConfigError if the degrees that stay do not divide all numbers of ranks."""
    parallel = read_config(options.config, options.overrides).parallel
    group = parallel.pipeline * parallel.tensor
    wrong = [size for size in sizes if size % group]
    if wrong:
        fitting = [str(size) for size in sizes if size not in wrong] or [str(group)]
        problem = (
            f"{_SIZES} must be multiples of parallel.pipeline {parallel.pipeline} x "
            f"parallel.tensor {parallel.tensor} = {group}, because only the data degree grows, but "
            f"{', '.join(map(str, wrong))} are not; use {_SIZES} {' '.join(fitting)}, or "
            "--set parallel.pipeline=1 parallel.tensor=1"
        )
        raise ConfigError([problem], where=f"the scaling of {options.config}")
