"""A what-if as lines and tables. The tables fit 80 columns."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from megaspeed.planning.forecast import Forecast
from megaspeed.planning.what_if import Layout, WhatIf
from megaspeed.units import counted, memory_unit, readable_memory, table_of

SHOWN_LAYOUTS = 12
"""Rows of each table without ``--all``."""

_SHOWN_PARTS = 3


def what_if_report(found: WhatIf, rows: int | None = SHOWN_LAYOUTS) -> Iterator[str | Table]:
    """The fastest layouts, the Pareto front of time and memory, and why the best is the best.

    Each table has at most ``rows`` rows; all if None.
    """
    yield ""
    if found.layouts:
        grids = found.fastest_of_each_grid()
        yield f"What if: the fastest variant that fits, for each of {counted(len(grids), 'layout')}"
        yield from _layouts(grids, rows)
        pareto = [layout for layout in found.layouts if layout.is_pareto]
        yield ""
        yield "What if: no other variant has both less time and less memory (Pareto-optimal)"
        yield from _layouts(pareto, rows)
        yield ""
        yield from _best(found)
    elif found.least_peak_bytes is not None:
        yield f"the smallest variant needs {readable_memory(found.least_peak_bytes)} a rank"
    yield (
        f"{len(found.layouts):,} variants fit, {found.too_large:,} are too large, "
        f"{found.refused:,} break rules of the configuration"
    )


def _layouts(layouts: Sequence[Layout], rows: int | None) -> Iterator[str | Table]:
    shown = layouts[:rows]
    memory = memory_unit(layout.peak_bytes for layout in shown)
    table = table_of(
        right=(
            "pp",
            "dp",
            "tp",
            "ZeRO",
            "reduce\neach",
            "recompute",
            "micro-\nbatches",
            "of\nsize",
            "step\ns",
            "MFU",
            f"peak\n{memory.name}",
        )
    )
    table.add_column("", no_wrap=True)
    for layout in shown:
        run, grid, mfu = layout.run, layout.run.grid, layout.forecast.mfu()
        table.add_row(
            str(grid.pp),
            str(grid.dp),
            str(grid.tp),
            f"{run.zero_stage}{'' if layout.set_text else ' *'}",
            "step" if run.keeps_complete_gradients else "micro",
            run.config.parallel.activation_checkpointing,
            f"{run.batch.gradient_accumulation_steps:,}",
            f"{run.batch.micro_batch_size:,}",
            f"{layout.seconds:.3g}",
            "" if mfu is None else f"{mfu:.0%}",
            memory.of(layout.peak_bytes),
            "tight" if layout.verdict == "tight" else "",
        )
    yield table
    if len(layouts) > len(shown):
        yield f"and {len(layouts) - len(shown)} more: --all"
    if not all(layout.set_text for layout in shown):
        yield "* as configured"


def _best(found: WhatIf) -> Iterator[str]:
    """The best variant, how to get it, and why it is faster than the next layout."""
    best = found.best
    assert best is not None, "there are layouts"
    yield f"best: {best.run.grid}, ZeRO-{best.run.zero_stage}: {best.seconds:.3g} s a step"
    first = found.layouts[0]
    if first.seconds < best.seconds:
        saved = best.seconds / first.seconds - 1
        yield f"  {first.run.grid} is {saved:.0%} faster, but fits tightly"
    for other in found.layouts:
        if other.run.grid != best.run.grid and other.seconds >= best.seconds:
            yield f"  faster than {other.run.grid} " + _why(best.forecast, other.forecast)
            break
    if not best.set_text:
        yield "  it is the run as configured"
        return
    for own in found.layouts:
        if not own.set_text and own.seconds > best.seconds:
            yield "  faster than the run as configured " + _why(best.forecast, own.forecast)
    yield f"  --set {' '.join(best.set_text)}"


def _why(best: Forecast, other: Forecast) -> str:
    """How much faster ``best`` is, and the parts of the step that differ most."""
    more = {part: seconds - other.parts()[part] for part, seconds in best.parts().items()}
    most = sorted(more, key=lambda part: abs(more[part]), reverse=True)[:_SHOWN_PARTS]
    differ = [
        f"{part} {more[part]:+.2g} s" for part in most if abs(more[part]) > 0.005 * best.seconds
    ]
    return f"by {other.seconds / best.seconds - 1:.1%}:\n    {', '.join(differ)}"
