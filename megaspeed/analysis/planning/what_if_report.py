"""A what-if as two rankings, readable at 120 columns."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from megaspeed.analysis.planning.plan import Plan
from megaspeed.analysis.planning.tables import table_of
from megaspeed.analysis.planning.what_if import Layout, WhatIf
from megaspeed.analysis.units import memory_unit, readable_memory, traffic_unit

SHOWN_LAYOUTS = 12
"""Rows of each ranking of a what-if; the JSON has all."""


def what_if_report(found: WhatIf, plan: Plan) -> Iterator[str | Table]:
    """All of a what-if: lines and tables."""
    if found.layouts:
        for table in layout_tables(found):
            yield ""
            yield table
    yield ""
    yield from layout_summary(found, plan)


def layout_tables(found: WhatIf) -> Iterator[Table]:
    """The layouts that hold least, and those that send least."""
    yield _layout_table("least memory", found.layouts)
    yield _layout_table("least traffic", found.by_traffic)


def layout_summary(found: WhatIf, plan: Plan) -> Iterator[str]:
    """How many layouts there are, and how many were left out."""
    if found.layouts:
        yield "best: no other layout has both less memory and less traffic (Pareto-optimal)"
    elif found.least_peak_bytes is not None:
        yield f"the smallest layout needs {readable_memory(found.least_peak_bytes)} a rank"
    said = "fit" if plan.device is not None else "are possible"
    yield (
        f"{len(found.layouts):,} layouts {said}, {found.too_large:,} are too large, "
        f"{found.refused:,} are refused by the configuration's laws"
    )
    yield (
        f"all with micro-batches of {plan.run.batch.micro_batch_size}; for others, "
        "--set train_micro_batch_size_per_gpu=N"
    )


def _layout_table(order: str, layouts: Sequence[Layout]) -> Table:
    shown = layouts[:SHOWN_LAYOUTS]
    memory = memory_unit(layout.peak_bytes for layout in shown)
    traffic = traffic_unit(layout.sent_bytes for layout in shown)
    table = table_of(
        f"What if: the {len(shown)} of {len(layouts):,} layouts with the {order}",
        right=("pp", "dp", "tp", "ZeRO"),
    )
    table.add_column("recompute")
    for heading in (
        "micro-batches",
        f"peak {memory.name}",
        f"sent {traffic.name}",
        "across nodes",
        "bubble",
    ):
        table.add_column(heading, justify="right")
    table.add_column("")
    for layout in shown:
        grid = layout.run.grid
        marks = ["best"] if layout.is_best else []
        marks += ["as configured"] if not layout.set_text else []
        table.add_row(
            str(grid.pp),
            str(grid.dp),
            str(grid.tp),
            str(layout.run.zero_stage),
            layout.run.config.parallel.activation_checkpointing,
            f"{layout.run.batch.gradient_accumulation_steps:,}",
            memory.of(layout.peak_bytes),
            traffic.of(layout.sent_bytes),
            traffic.of(layout.sent_across_nodes_bytes),
            f"{layout.bubble:.1%}",
            ", ".join(marks),
        )
    return table
