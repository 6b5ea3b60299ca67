"""``megaspeed verify``: trains a layout and one process of plain torch, and compares them."""

import argparse
from dataclasses import replace
from typing import Any

from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_command,
    busy,
    load,
    positive,
    say,
    write_json,
)
from megaspeed.config.errors import ConfigError
from megaspeed.data.corpus import prepare_corpus


def add_to(commands: Any) -> None:
    """Add the command and its options."""
    parser = add_command(commands, "verify", run, "compare a layout with one plain process")
    parser.add_argument("--steps", type=positive, default=10, help="optimizer steps (10)")
    text = "where to train: cpu (default), or cuda, a GPU for each rank unless NCCL lets them share"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)


def run(options: argparse.Namespace) -> int:
    """Train both, and print their numbers side by side. The exit code is 1 if they differ."""
    # Imported here, because torch and DeepSpeed take seconds and other commands do not need them.
    from megaspeed.measurement.local_ranks import RanksFailed, too_many_ranks
    from megaspeed.measurement.verification.comparison import (
        flipped_choices,
        gradient_table,
        step_table,
        verdict,
        widened_tolerances,
    )
    from megaspeed.measurement.verification.verify import verify
    from megaspeed.units import show

    run = load(options, options.device)
    problems = too_many_ranks(run.grid.world_size, options.device)
    if options.device == "cuda":
        problems = [f"{problem}, or verify with --device cpu" for problem in problems]
    if run.precision == "fp16" and run.config.fp16.loss_scale == 0:
        problems.append(
            "fp16.loss_scale must be above 0 to verify a layout, but it is 0: the loss scale is "
            "then dynamic, and skips steps that one process does not skip; add "
            "--set fp16.loss_scale=1024"
        )
    if problems:
        raise ConfigError(problems, where=f"verify --device {options.device}")
    compression = run.config.parallel.gradient_compression
    if compression != "none":
        config = run.config.changed({"parallel.gradient_compression": "none"})
        run = replace(run, config=config)
        name = compression if isinstance(compression, str) else compression.type
        say(
            f'with parallel.gradient_compression "{name}", a run is close but not equal to one '
            'process, so this layout is verified with "none"'
        )
    with busy("preparing the corpus"):
        corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    try:
        with busy("training this layout, and one process"):
            comparison = verify(run, corpus, options.steps, options.device)
    except RanksFailed as error:
        say(f"no result: {error}", error=True)
        return EXIT_FAILED
    title = f"{run.grid}, ZeRO-{run.zero_stage}, {run.precision}, against one process"
    show([title, step_table(comparison), ""])
    show(["gradients of step 1", gradient_table(comparison), ""])
    notes = [*flipped_choices(comparison), *widened_tolerances(comparison)]
    show([*notes, verdict(comparison)])
    write_json(options, comparison.as_json())
    return EXIT_DONE if comparison.equal else EXIT_FAILED
