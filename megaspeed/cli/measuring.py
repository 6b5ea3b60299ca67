"""``megaspeed compare``, ``bench`` and ``scaling``: rows take turns on ranks of this machine."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspeed.bar_or_lines import BarOrLines
from megaspeed.checked_run import load_checked_run
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    add_command,
    add_flags,
    add_parser,
    add_values,
    busy,
    load,
    positive,
    say,
    world_size,
    write_json,
)
from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.files.paths import folder_problem, path_argument

if TYPE_CHECKING:
    from megaspeed.measurement.local_ranks import DeviceType
    from megaspeed.measurement.report import Report
    from megaspeed.measurement.turns import AnyRow, Extra

_PEERS = ("plain", "hf-deepspeed", "fsdp2", "ddp", "deepspeed-pipeline")
_SIZES = "--world-sizes"


def add_to(commands: Any) -> None:
    """Add the commands and their options."""
    text = "train each ZeRO stage and compare memory, traffic and time"
    parser = add_command(commands, "compare", compare, text)
    _add_choices(parser, "--stages", (0, 1, 2, 3), [0, 1, 2, 3], "ZeRO stages (0 1 2 3)")
    text = "also train with torch's own ddp or fsdp; pipeline and tensor must be 1"
    _add_choices(parser, "--baselines", ("ddp", "fsdp"), [], text)
    _add_shared(parser, turns=3, steps=4)

    parser = add_command(commands, "bench", bench, "step time beside other libraries, in turns")
    text = f"{', '.join(_PEERS)} (all that can train the run)"
    _add_choices(parser, "--peers", _PEERS, None, text)
    _add_shared(parser, turns=5, steps=10)

    text = "tokens/s and efficiency at several numbers of ranks"
    parser = add_parser(commands, "scaling", scaling, text)
    add_config_options(parser)
    text = "numbers of processes; the others are compared with the smallest"
    parser.add_argument(_SIZES, type=world_size, nargs="+", required=True, metavar="N", help=text)
    text = "each data rank keeps its micro-batches: train_batch_size grows (it stays otherwise)"
    add_flags(parser, ("--weak", text))
    parser.set_defaults(turns=1)
    _add_shared(parser, turns=None, steps=10)


def _add_choices(
    parser: argparse.ArgumentParser, option: str, choices: Sequence[Any], default: Any, text: str
) -> None:
    name, kind = option.strip("-").rstrip("s").upper(), type(choices[0])
    parser.add_argument(
        option, type=kind, nargs="+", choices=choices, default=default, metavar=name, help=text
    )


def _add_shared(parser: argparse.ArgumentParser, *, turns: int | None, steps: int) -> None:
    """Add the options of all three. The numbers are defaults."""
    if turns is not None:
        add_values(parser, ("--turns", positive, "N", turns, f"turns of each row ({turns})"))
    text = "folder for the results (runs/<name>-<command>)"
    add_values(
        parser,
        ("--steps", positive, "N", steps, f"timed steps of each turn ({steps})"),
        ("--timeout", positive, "SECONDS", 1800, "time limit of each turn (1800)"),
        ("--output", path_argument, "DIR", None, text),
    )


def device_type_here() -> "DeviceType":
    """Return where ranks of this machine train: on its GPUs if it has any."""
    # Imported here: torch takes seconds to import, and `check` must not wait for it.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def compare(options: argparse.Namespace) -> int:
    """Train every row, then show and write the figures."""
    from megaspeed.measurement.compare import ComparisonResult, baseline_rows, report, zero_rows

    device_type = device_type_here()
    run = load(options, device_type)
    rows = zero_rows(run, options.stages, device_type)
    rows += baseline_rows(run, options.baselines, device_type)
    result = partial(ComparisonResult, run=run)
    return _measure(options, rows, result, report, warm_up=1, extra="memory")


def bench(options: argparse.Namespace) -> int:
    """Let the contestants take their turns, then show and write the figures."""
    from megaspeed.measurement.bench import BenchResult, choose_peers, contestants_of, report
    from megaspeed.measurement.turns import WARM_UP_STEPS

    run = load(options, device_type_here())
    reasons = choose_peers(run, options.peers)
    not_run = {peer: reason for peer, reason in reasons.items() if reason is not None}
    rows = contestants_of(run, [peer for peer in reasons if peer not in not_run])
    result = partial(BenchResult, run=run, not_run=not_run)
    return _measure(options, rows, result, report, warm_up=WARM_UP_STEPS)


def scaling(options: argparse.Namespace) -> int:
    """Train every number of ranks, then show and write the figures."""
    from megaspeed.measurement.scaling import report, scaled_rows
    from megaspeed.measurement.turns import WARM_UP_STEPS, Result

    sizes, device_type = sorted(set(options.world_sizes)), device_type_here()
    overrides = [*options.overrides, "parallel.spare_ranks=false"]
    base = load_checked_run(options.config, overrides, World(sizes[0], _SIZES, device_type))
    rows = scaled_rows(base, sizes, device_type, weak=options.weak)
    report_of = partial(report, weak=options.weak)
    return _measure(
        options, rows, Result, report_of, warm_up=WARM_UP_STEPS, extra="parts", size_option=_SIZES
    )


def _measure(
    options: argparse.Namespace,
    rows: "Sequence[AnyRow]",
    result_of: "Callable[..., Any]",
    report_of: "Callable[[Any], Report]",
    *,
    warm_up: int,
    extra: "Extra | None" = None,
    size_option: str = "--world-size",
) -> int:
    """Let the rows take their turns, then show and write the report. Return the exit code.

    Args:
        options: of the command.
        rows: of the command; the last one has the most ranks.
        result_of: gets the fields of ``Result``.
        report_of: gets the result.
        warm_up: steps of a turn before the timed ones.
        extra: what a turn measures beside the times.
        size_option: the option that states the number of ranks.

    Raises:
        ConfigError: the folder cannot be written, or this machine cannot run as many ranks.
    """
    from megaspeed.data.corpus import prepare_corpus
    from megaspeed.measurement.local_ranks import too_many_ranks
    from megaspeed.measurement.turns import Steps, take_turns

    largest, device_type = rows[-1].run, device_type_here()
    folder: Path = options.output or Path("runs") / f"{largest.name}-{options.command}"
    problem = folder_problem("--output", folder)
    problems = [] if problem is None else [problem]
    problems += too_many_ranks(largest.grid.world_size, device_type, size_option)
    if problems:
        raise ConfigError(problems, where=f"{options.command} of {options.config}")
    with busy("preparing the corpus"):
        corpus = prepare_corpus(largest.config.data, largest.config.model.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    steps = Steps(
        warm_up=warm_up, timed=options.steps, timeout_seconds=options.timeout, extra=extra
    )
    with BarOrLines(options.turns * len(rows)) as bar:
        done, stopped = take_turns(
            rows,
            options.turns,
            corpus,
            steps,
            device_type=device_type,
            folder=folder,
            on_turn=bar.show,
        )
    result = result_of(rows=done, turns=options.turns, steps=options.steps, stopped=stopped)
    report = report_of(result)
    files = report.write(folder, options.command)
    say(report.text)
    write_json(options, report.figures)
    say(f"\nwrote {', '.join(map(str, files))}")
    if stopped:
        say("stopped before the last turn; all ranks have ended", error=True)
    return EXIT_DONE if report.result.succeeded else EXIT_FAILED
