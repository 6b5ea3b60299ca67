"""A comparison as tables: what the layout computed beside what one process computed."""

from rich.table import Table

from megaspeed.analysis.verification.amplification import FACTOR, LARGEST_WIDENING
from megaspeed.analysis.verification.comparison import Comparison, Difference
from megaspeed.config.resolve import Run


def step_table(run: Run, comparison: Comparison) -> Table:
    """Loss and gradient norm of every step, both ways, with their relative difference."""
    grid = run.grid
    layout = f"pp {grid.pp} x dp {grid.dp} x tp {grid.tp}, ZeRO-{run.zero_stage}"
    table = Table(title=f"{layout}, {run.precision}, against one process", title_justify="left")
    for heading in ("step", "loss", "one process", "difference"):
        table.add_column(heading, justify="right")
    for heading in ("gradient norm", "one process", "difference"):
        table.add_column(heading, justify="right")
    steps = zip(comparison.losses, comparison.grad_norms, strict=True)
    for step, (loss, norm) in enumerate(steps, start=1):
        table.add_row(str(step), *_cells(loss), *_cells(norm))
    return table


def gradient_table(comparison: Comparison) -> Table:
    """The norm of every parameter's gradient at step 1, both ways, and of their difference."""
    table = Table(title="gradients of step 1", title_justify="left")
    table.add_column("parameter")
    for heading in ("norm", "one process", "difference"):
        table.add_column(heading, justify="right")
    for gradient in comparison.gradients:
        table.add_row(gradient.name, *_cells(gradient))
    return table


def widened_tolerances(comparison: Comparison) -> list[str]:
    """One sentence for losses and one for gradient norms, if later steps are allowed more."""
    sentences = []
    for name, steps in (("losses", comparison.losses), ("gradient norms", comparison.grad_norms)):
        base = steps[0].allowed
        wider = [number for number, step in enumerate(steps, 1) if step.allowed > base]
        if wider:
            most = max(step.allowed for step in steps)
            sentences.append(
                f"{name}: {base:.0e} allowed at step 1, up to {most:.1e} from step {wider[0]} on: "
                f"{FACTOR:.0f} times the largest difference in one process if only the order of "
                "the samples in each step changes"
                + (
                    f", limited to {LARGEST_WIDENING:.0f} times what step 1 is allowed"
                    if most >= LARGEST_WIDENING * base
                    else ""
                )
            )
    return sentences


def verdict(comparison: Comparison) -> str:
    """One sentence: equal or not, and the number that is furthest out."""
    if not comparison.weights_bitwise_equal:
        return "DIFFERENT: the initial weights are not bitwise equal"
    if comparison.copies_differ_by != 0.0:
        return (
            "DIFFERENT: ranks that hold copies of the same weights differ by up to "
            f"{comparison.copies_differ_by:.1e}, and must be equal"
        )
    largest = comparison.largest
    word = "EQUAL" if comparison.equal else "DIFFERENT"
    return (
        f"{word}: initial weights bitwise equal; largest difference: {largest.name}, relative "
        f"{largest.relative:.1e} ({largest.allowed:.0e} allowed)"
    )


def _cells(difference: Difference) -> tuple[str, str, str]:
    mark = "" if difference.equal else " !"
    return (
        f"{difference.parallel:.7g}",
        f"{difference.reference:.7g}",
        f"{difference.relative:.1e}{mark}",
    )
