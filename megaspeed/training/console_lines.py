"""The lines that rank 0 prints while a run goes on, as text; some with rich's markup."""

from rich.markup import escape

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.saving import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.training.metrics import StepMetrics
from megaspeed.training.resume import Start

WORSE_BY_NATS = 0.5
"""By how much the first loss after a resume may lie above the last one before without a warning.

A step's loss is of other samples than the one before, so that they differ by some tenths.
"""

_MOST_CHANGES = 12


def describe_start(start: Start, run: Run) -> list[str]:
    """Lines that say from where the run starts, and what was found on the way."""
    lines = [
        f"[yellow]passed over {escape(str(checkpoint))}:[/yellow] {escape(why)}"
        for checkpoint, why in start.passed_over
    ]
    if start.is_end_of(run):
        lines.append(
            f"nothing is left to train: {escape(str(start.checkpoint))} is of step {start.step}, "
            f"and training.steps is {run.config.training.steps}. Raise training.steps to go on, or "
            "start at step 0 with --fresh and without --resume DIR."
        )
    elif start.checkpoint is not None:
        begins = "resuming" if start.step else "starting"
        lines.append(f"{begins} from {escape(str(start.checkpoint))}")
        lines += [f"  changed since: {escape(change)}" for change in start.changes[:_MOST_CHANGES]]
        if len(start.changes) > _MOST_CHANGES:
            lines.append(f"  and {len(start.changes) - _MOST_CHANGES} more")
    return lines


def describe_spare_ranks(run: Run) -> str:
    """Which ranks have no place in the grid, and why."""
    first, world = run.grid.world_size, run.grid.world_size + run.spare_ranks
    named = ", ".join(map(str, range(first, world)[:8])) + (", ..." if run.spare_ranks > 8 else "")
    which = f"rank {named} is" if run.spare_ranks == 1 else f"ranks {named} are"
    return (
        f"{which} spare: with train_batch_size "
        f"{run.batch.train_batch_size}, {run.grid} = {first} is the largest layout of {world} ranks"
    )


def describe_step(metrics: StepMetrics) -> str:
    """One console line."""
    mfu = "n/a" if metrics.mfu is None else f"{metrics.mfu:.1%}"
    skipped = "  SKIPPED: loss or gradient norm is not finite" if metrics.skipped else ""
    return (
        f"step {metrics.step:>6}  loss {metrics.loss:.4f}  lr {metrics.learning_rate:.3e}  "
        f"grad norm {metrics.grad_norm:.3f}  {metrics.tokens_per_second:,.0f} tokens/s  "
        f"{metrics.tflops_per_rank:.3g} TFLOP/s/rank  MFU {mfu}{skipped}"
    )


def describe_resumed(begin: Progress, first: StepMetrics) -> str:
    """The first loss after a resume beside the last one before; a line, with markup."""
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
        "is this the data, and the learning rate, that the run had?[/yellow]"
    )


def describe_save(report: SaveReport) -> str:
    """One console line, with markup."""
    if report.error is not None:
        return f"[red]step {report.step:>6}  no checkpoint:[/red] {escape(report.error)}"
    deleted = ", ".join(path.name for path in report.deleted)
    return (
        f"step {report.step:>6}  checkpoint {report.size_bytes / 1e6:,.1f} MB in "
        f"{report.seconds:.1f} s, training stood still for {report.stall_seconds:.1f} s"
        + (f"; deleted {deleted}" if deleted else "")
    )
