"""``megaspeed check``: finds every mistake in a configuration at once, or describes the run.

It loads torch only to measure a CPU on which a run in bf16 may be slow.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaspeed.checked_run import find_data_problems
from megaspeed.cli.options import EXIT_DONE, add_command, say, write_json
from megaspeed.config.document import Document, read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document
from megaspeed.config.resolve import default_run_dir, resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.files.paths import folder_problem, path_problem
from megaspeed.model.parameters import parameters_in_words
from megaspeed.planning.plan import plan
from megaspeed.planning.report import summary
from megaspeed.planning.variants import Training
from megaspeed.units import counted, readable_memory, show


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    text = "find every mistake in a configuration, or describe the run"
    parser = add_command(commands, "check", run, text, needs_world_size=False)
    text = "kind of device to check for"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help=text)


def run(options: argparse.Namespace) -> int:
    """Report every problem, those of the data section included, without reading the corpus."""
    world = None
    if options.world_size is not None:
        world = World(options.world_size, "--world-size", options.device)
    document = read_document(options.config, options.overrides)
    checked = check_document(document, world)
    problems = [*checked.problems, *find_data_problems(checked.correct)]
    problems += _run_dir_problems(document, options.config.stem)
    notes = list(checked.notes)
    if checked.config is not None and checked.config.bf16.enabled and options.device == "cpu":
        from megaspeed.model.bf16_on_cpu import bf16_warning

        notes += bf16_warning(checked.config, options.device)
    figures = {"config": str(options.config), "problems": problems, "notes": notes}
    write_json(options, figures)
    if problems:
        raise ConfigError(problems, where=str(options.config))
    for note in notes:
        say(f"note: {note}")
    show(_description(checked.correct_config(""), options))
    say(f"{options.config}: no problem found")
    return EXIT_DONE


def _description(config: RunConfig, options: argparse.Namespace) -> Iterator[str]:
    """Yield the first lines of a plan, and the length and the memory of the run."""
    parallel = config.parallel
    data = 1 if parallel.data == "auto" else parallel.data
    size = options.world_size or parallel.pipeline * data * parallel.context * parallel.tensor
    world = World(size, "--world-size", options.device)
    try:
        run = resolve_run(config, world, name=options.config.stem)
    except ConfigError:  # the smallest layout breaks a rule
        yield f"model: {parameters_in_words(config.model)}; --world-size N shows the layout"
        return
    if options.world_size is None and parallel.data == "auto":
        yield "the smallest layout, because parallel.data is auto; others: --world-size N"
    planned = plan(Training(run=run, stated=config, device_type=options.device), None)
    yield from summary(planned)
    yield f"length: {counted(run.steps, 'step')}, {run.tokens_left():,} tokens"
    peak = readable_memory(planned.prediction.fullest.peak_bytes)
    yield f"memory: predicted peak {peak} a rank; megaspeed plan --device NAME shows if it fits"


def _run_dir_problems(document: Document, name: str) -> Iterator[str]:
    """Yield a problem if the run could not write its folder. Create nothing."""
    training = document.values.get("training")
    stated = training.get("run_dir") if isinstance(training, dict) else None
    run_dir = default_run_dir(name) if stated is None else stated
    if not document.is_complete or not isinstance(run_dir, str) or path_problem(run_dir or "\0"):
        return  # find_problems reports these mistakes
    problem = folder_problem("training.run_dir", Path(run_dir))
    if problem is not None:
        yield problem
