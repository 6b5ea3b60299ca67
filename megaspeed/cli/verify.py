"""``megaspeed verify``: a layout and one plain process, trained and compared."""

import argparse
from typing import Any

from rich.console import Console

from megaspeed.cli.common_options import EXIT_DONE, EXIT_FAILED, add_command, load, positive
from megaspeed.cli.output import write_json
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import prepare_corpus


def add_to(commands: Any) -> None:
    """Adds the command and its options."""
    parser = add_command(commands, "verify", run, "compare a layout with one plain process")
    parser.add_argument("--steps", type=positive, default=10, help="optimizer steps (10)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to train: cpu (the default), or cuda with one GPU for each rank",
    )


def run(options: argparse.Namespace) -> int:
    """Trains the layout and one plain process, and prints their numbers side by side."""
    # Imported here: torch and DeepSpeed take seconds, which `check` need not wait for.
    from megaspeed.analysis.verification.report import (
        gradient_table,
        step_table,
        verdict,
        widened_tolerances,
    )
    from megaspeed.analysis.verification.verify import verify

    run = load(options, options.device)
    problems = _problems_on_cuda(run) if options.device == "cuda" else []
    if problems:
        raise ConfigError(problems, where="verify --device cuda")
    corpus = prepare_corpus(run.config.data, run.config.model.vocab_size)
    comparison = verify(run, corpus, options.steps, options.device)
    console = Console()
    console.print(step_table(run, comparison))
    console.print(gradient_table(comparison))
    for line in (*widened_tolerances(comparison), verdict(comparison)):
        console.print(line, highlight=False)
    write_json(options, comparison.as_json())
    return EXIT_DONE if comparison.equal else EXIT_FAILED


def _problems_on_cuda(run: Run) -> list[str]:
    import torch

    problems = []
    ranks, gpus = run.grid.world_size, torch.cuda.device_count()
    if gpus < ranks:
        problems.append(
            f"{ranks} ranks need a GPU each, and this process sees {gpus}; lower --world-size, "
            "make more visible (CUDA_VISIBLE_DEVICES), or verify this layout with --device cpu"
        )
    if run.precision == "fp16" and run.config.fp16.loss_scale == 0:
        problems.append(
            "fp16.loss_scale is 0, so the loss scale is dynamic, and a dynamic loss scale skips "
            "steps that one process does not skip; to verify this layout, add "
            "--set fp16.loss_scale=1024"
        )
    return problems
