"""The lines that rank 0 prints during a run, as text; some with rich's markup."""

from collections.abc import Mapping

from rich.markup import escape

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.saving import SaveReport
from megaspeed.checkpoint.stored import BYTES_PER_ELEMENT
from megaspeed.checkpoint.tensors import KINDS
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.pipeline.stages import parameters_of_stages
from megaspeed.topology.grid import Grid
from megaspeed.training.metrics import PartMetrics, StepMetrics
from megaspeed.training.resume import MOST_CHANGES, Start

WORSE_BY_NATS = 0.5
"""If the first loss after a resume is higher than the last one before by more, a warning is shown.

Each step has different samples, so losses of neighbouring steps differ by some tenths.
"""

_GRACE_SECONDS = 30.0
"""How long torchrun and DeepSpeed's launcher wait after SIGTERM before they kill, by default."""

_SLOW_DISK = 200e6
"""Bytes a second. If no save of this start has ended yet, its duration is estimated with it."""

SLOW = 1.5
"""How many times longer than the median rank a rank must work to be named."""


def describe_corpus(corpus: PreparedCorpus, seconds: float) -> str:
    """The sizes of the training and the validation data, in tokens and sequences."""
    train, validation = corpus.train, corpus.validation
    sources = len(train.components)
    mixed = f" mixed from {sources} sources" if sources > 1 else ""
    line = (
        f"corpus: {train.tokens:,} training tokens in {corpus.training_sequences:,} "
        f"sequences{mixed}; "
    )
    if validation is None:
        line += "no validation"
    else:
        share = validation.tokens / (train.tokens + validation.tokens)
        line += (
            f"{validation.tokens:,} validation tokens in {corpus.validation_sequences:,} "
            f"sequences, {share:.1%} of all"
        )
    return f"{line}; ready in {seconds:.1f} s"


def describe_start(start: Start, run: Run) -> list[str]:
    """Lines that state where the run starts, and which checkpoints were skipped."""
    lines = [
        f"[yellow]skipped {escape(str(checkpoint))}:[/yellow] {escape(why)}"
        for checkpoint, why in start.passed_over
    ]
    if start.is_end_of(run):
        lines.append(
            f"nothing is left to train: {escape(str(start.checkpoint))} has step {start.step}, "
            f"and training.steps is {run.config.training.steps}. Raise training.steps to train, or "
            "start at step 0 with --fresh and without --resume DIR."
        )
    elif start.checkpoint is not None:
        begins = "resuming" if start.step else "starting"
        lines.append(f"{begins} from {escape(str(start.checkpoint))}")
        lines += [f"  changed since: {escape(change)}" for change in start.changes[:MOST_CHANGES]]
        if len(start.changes) > MOST_CHANGES:
            lines.append(f"  and {len(start.changes) - MOST_CHANGES} more")
        if start.rate_change is not None:
            lines.append(f"[yellow]warning:[/yellow] {escape(start.rate_change)}")
    return lines


def describe_spare_ranks(run: Run) -> str:
    """Which ranks are not in the grid, and why."""
    first, world = run.grid.world_size, run.grid.world_size + run.spare_ranks
    named = ", ".join(map(str, range(first, world)[:8])) + (", ..." if run.spare_ranks > 8 else "")
    which = f"rank {named} is" if run.spare_ranks == 1 else f"ranks {named} are"
    return (
        f"{which} spare: with train_batch_size "
        f"{run.batch.train_batch_size}, {run.grid} = {first} is the largest layout of {world} ranks"
    )


def describe_step(metrics: StepMetrics) -> str:
    """One console line, of at most 100 columns; without an MFU, as on a CPU, of at most 80.

    The rate of operations is printed only together with MFU. If the device's peak is unknown, there
    is nothing to compare it with.
    """
    line = (
        f"step {metrics.step:>6}  loss {metrics.loss:.4f}  lr {metrics.learning_rate:.2e}  "
        f"grad norm {metrics.grad_norm:.3f}  {metrics.tokens_per_second:,.0f} tok/s"
    )
    if metrics.mfu is not None:
        line += f"  {metrics.tflops_per_rank:.3g} TFLOP/s/rank  MFU {metrics.mfu:.1%}"
    return line + ("  SKIPPED" if metrics.skipped else "")


def describe_resumed(begin: Progress, first: StepMetrics) -> str:
    """The first loss after a resume and the last one before it; a line, with markup."""
    if begin.loss is None:
        before, is_worse = "not finite", False
    else:
        before = f"{begin.loss:.4f}"
        is_worse = not first.loss - begin.loss <= WORSE_BY_NATS  # true for NaN
    line = (
        f"resumed at step {first.step}: loss {first.loss:.4f}; {before} when saved "
        f"(step {begin.step})"
    )
    if not is_worse:
        return line
    return (
        f"[yellow]{line}. It is more than {WORSE_BY_NATS} nats higher: "
        "check that the data and the learning rate are those of the saved run[/yellow]"
    )


def describe_slow_rank(metrics: PartMetrics, grid: Grid) -> str:
    """The rank that the others wait for; a line, with markup."""
    at = grid.coordinates_of(metrics.slowest_rank)
    return (
        f"[yellow]step {metrics.step:>6}  slowest: rank {metrics.slowest_rank} (pp {at.pp}, "
        f"dp {at.dp}, tp {at.tp}) worked {metrics.slowest_rank_seconds:.3g} s, the median rank "
        f"{metrics.median_rank_seconds:.3g} s[/yellow]"
    )


def describe_late_save(
    save_seconds: float | None, run: Run, environ: Mapping[str, str]
) -> str | None:
    """A warning if the launcher may kill the run before its last save is done; with markup.

    Args:
        save_seconds: how long the previous save took; None if none has ended yet.
        run: the run that is saved.
        environ: the environment of this process, which may state torchrun's grace period.
    """
    stated = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    grace = float(stated) if by_torchrun and stated.isdecimal() else _GRACE_SECONDS
    if save_seconds is not None:
        seconds, took = save_seconds, f"the previous save took {save_seconds:.0f} s"
    else:
        size = sum(parameters_of_stages(run)) * len(KINDS) * BYTES_PER_ELEMENT
        seconds = size / _SLOW_DISK
        took = (
            f"how long this save takes is unknown, because it is the first ({size / 1e9:.1f} GB, "
            f"{seconds:.0f} s at {_SLOW_DISK / 1e6:.0f} MB/s)"
        )
    if seconds <= grace:
        return None
    longer = ", or raise TORCH_ELASTIC_SHUTDOWN_TIMEOUT" if by_torchrun else ""
    return (
        f"[yellow]{took}, and a launcher that is stopped kills its ranks after {grace:.0f} s. If "
        "this save is cut off, the run resumes from an earlier checkpoint, if there is one. To "
        f"save in time, send SIGUSR1 to a rank earlier{longer}[/yellow]"
    )


def describe_save(report: SaveReport) -> str:
    """One console line, with markup."""
    if report.error is not None:
        return f"[red]step {report.step:>6}  no checkpoint:[/red] {escape(report.error)}"
    deleted = ", ".join(path.name for path in report.deleted)
    return (
        f"step {report.step:>6}  checkpoint {report.size_bytes / 1e6:,.1f} MB in "
        f"{report.seconds:.1f} s, training paused for {report.stall_seconds:.1f} s"
        + (f"; deleted {deleted}" if deleted else "")
    )
