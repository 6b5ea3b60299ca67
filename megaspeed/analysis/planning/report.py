"""A plan as lines and tables, readable at 120 columns."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from megaspeed.analysis.planning.devices import USABLE_FRACTION
from megaspeed.analysis.planning.plan import AxisMap, Plan
from megaspeed.analysis.planning.prediction import (
    AlikeStages,
    StagePrediction,
    alike_stages,
    sent_along,
)
from megaspeed.analysis.planning.what_if import Layout, WhatIf
from megaspeed.analysis.units import (
    GIB,
    Unit,
    counted,
    memory_unit,
    readable_memory,
    short_count,
    traffic_unit,
)
from megaspeed.config.resolve import GradientReduction, Run, dropout_warning
from megaspeed.pipeline.schedules import SCHEDULES, peak_micro_batches_in_flight

# How the tables of a plan look: a heading, a line under it, no more.


def table_of(
    title: str, *, left: Sequence[str] = (), right: Sequence[str] = (), caption: str | None = None
) -> Table:
    """Columns that are read as words, then columns of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


_SHOWN_RANKS = 4


_REDUCTIONS: Mapping[GradientReduction, str] = {
    "per_step": "per step",
    "per_micro_batch": "per micro-batch",
}

_CONFIGURED = "* as configured"


def report(plan: Plan) -> Iterator[str | Table]:
    """All of a plan, from top to bottom: lines and tables."""
    yield from summary(plan)
    for table in (rank_table, stage_table, memory_table, traffic_table):
        yield ""
        yield table(plan)
    yield ""
    yield from refusals(plan)
    yield from verdict(plan)


def summary(plan: Plan) -> Iterator[str]:
    """What is planned, in a few lines."""
    run, batch, model = plan.run, plan.run.batch, plan.run.config.model
    yield (
        f"{run.name}: {plan.ranks.grid} = {counted(run.grid.world_size, 'rank')}, "
        f"ZeRO-{run.zero_stage}, {run.precision}"
    )
    if run.spare_ranks:
        world = run.grid.world_size + run.spare_ranks
        yield f"spare: {run.spare_ranks} of {counted(world, 'rank')} have no work"
    yield (
        f"model: {short_count(plan.parameters)} parameters, "
        f"{counted(model.num_hidden_layers, 'block')} of hidden size {model.hidden_size:,}, "
        f"vocabulary {model.vocab_size:,}"
    )
    yield (
        f"step: {counted(batch.train_batch_size, 'sample')} of "
        f"{run.config.data.sequence_length:,} tokens; each data rank takes "
        f"{counted(batch.gradient_accumulation_steps, 'micro-batch')} of {batch.micro_batch_size:,}"
    )
    recomputed = run.config.parallel.activation_checkpointing == "full"
    sequence = "on" if run.config.parallel.sequence_parallel else "off"
    yield (
        f"activations: {'recomputed in backward' if recomputed else 'kept for backward'}; "
        f"sequence parallelism {sequence}"
    )
    yield from dropout_warning(run)
    if run.grid.pp > 1:
        yield (
            f"pipeline: {run.config.parallel.schedule}, ideal bubble {plan.bubble:.1%} of the step "
            "(pipeline stages of equal cost)"
        )


def rank_table(plan: Plan) -> Table:
    """Each axis: its groups, and whether they stay within a node."""
    ranks = plan.ranks
    table = table_of(
        f"Ranks: {counted(ranks.nodes, 'node')} of {counted(ranks.gpus_per_node, 'GPU')}, "
        "pp outermost, tp innermost",
        left=("axis",),
        right=("size", "stride", "groups"),
    )
    table.add_column("first group")
    table.add_column("")
    for axis in reversed(ranks.axes):
        table.add_row(
            axis.axis,
            f"{axis.size:,}",
            f"{axis.stride:,}" if axis.size > 1 else "",
            f"{axis.groups:,}",
            _ranks(axis),
            _stands(axis),
        )
    return table


def stage_table(plan: Plan) -> Table:
    """Layers, parameters and peak memory at each ZeRO stage; alike pipeline stages in one row."""
    predictions = [planned.prediction for planned in plan.zero_stages]
    unit = memory_unit(
        stage.peak_bytes for each in predictions if each is not None for stage in each.stages
    )
    table = table_of(
        f"Pipeline stages: peak in {unit.name} of a rank, at each ZeRO stage",
        left=("stages", "layers of each"),
        right=("parameters", "per rank", "in flight", *(f"ZeRO-{zero}" for zero in range(4))),
        caption="per rank: parameters after the tensor split, before ZeRO; in flight: most "
        "micro-batches at a time; of alike stages, the first's",
    )
    for row, alike in enumerate(alike_stages(plan.run)):
        first = alike.pipeline_stages.start
        stage = plan.stages[first]
        table.add_row(
            _range(alike.pipeline_stages),
            _layers(alike),
            short_count(stage.parameters),
            short_count(stage.parameters_per_rank),
            f"{_in_flight(plan.run, first):,}",
            *(
                "-" if each is None else unit.of(each.stages[row].peak_bytes)
                for each in predictions
            ),
        )
    return table


def memory_table(plan: Plan) -> Table:
    """What the rank that holds most holds at each ZeRO stage, by category, at its peak."""
    predicted = [each.prediction for each in plan.zero_stages if each.prediction is not None]
    unit = memory_unit(each.fullest.peak_bytes for each in predicted)
    names = ("states", "parameters", "gradients", "optimizer", "activations", "buffers", "peak")
    table = table_of(
        f"Memory in {unit.name} of the rank that holds most: model states, and what its peak is of",
        left=("ZeRO", "reduced"),
        right=names if plan.device is None else (*names, "of usable", "fits"),
        caption=f"{_CONFIGURED}; reduced: when gradients are; states: parameters, gradients and "
        "optimizer states",
    )
    for planned in plan.zero_stages:
        name = _zero_stage(plan, planned.zero_stage)
        prediction = planned.prediction
        if prediction is None:
            table.add_row(name, "refused")
            continue
        peak = prediction.fullest.memory.peak
        cells = (
            prediction.heaviest.state_bytes,
            peak.parameters,
            peak.gradients,
            peak.optimizer_states,
            peak.activations,
            peak.communication_buffers,
            peak.total,
        )
        table.add_row(
            name,
            _REDUCTIONS[prediction.run.gradient_reduction],
            *map(unit.of, cells),
            *_share(plan, planned.zero_stage, peak.total),
        )
    return table


def refusals(plan: Plan) -> Iterator[str]:
    """Why the configuration refuses a ZeRO stage at this layout."""
    for planned in plan.zero_stages:
        for refusal in planned.refusals:
            yield f"ZeRO-{planned.zero_stage} is refused: {refusal}"


def traffic_table(plan: Plan) -> Table:
    """What the rank that sends most sends in one step, by axis, at each ZeRO stage."""
    busiest = {
        planned.zero_stage: planned.prediction.busiest
        for planned in plan.zero_stages
        if planned.prediction is not None
    }
    unit = traffic_unit(stage.sent_bytes for stage in busiest.values())
    table = table_of(
        f"Traffic in {unit.name} that the busiest rank sends in one step",
        left=("ZeRO",),
        right=("tp", "dp", "pp", "all ranks", "together", "across nodes"),
        caption=_CONFIGURED,
    )
    for zero_stage, stage in busiest.items():
        table.add_row(_zero_stage(plan, zero_stage), *_traffic_cells(plan, stage, unit))
    return table


def verdict(plan: Plan) -> Iterator[str]:
    """Whether it fits; if not, the cheapest change after which it does."""
    peak_bytes = plan.prediction.fullest.peak_bytes
    if plan.device is None:
        yield (
            f"predicted peak {readable_memory(peak_bytes)} a rank; name a device "
            "(--device h100-80gb) to be told whether it fits"
        )
        return
    device, usable = plan.device, plan.device.usable_bytes
    of = (
        f"of {GIB.named(usable)} usable ({device.name}: {GIB.named(device.memory_bytes)}, less "
        f"{1 - USABLE_FRACTION:.0%} for CUDA, NCCL and fragmentation)"
    )
    if plan.fits:
        yield f"FITS: predicted peak {readable_memory(peak_bytes)} a rank {of}"
        return
    yield f"DOES NOT FIT: predicted peak {readable_memory(peak_bytes)} a rank {of}"
    change = plan.change
    assert change is not None, "what does not fit has been searched for a change"
    text = f"--set {' '.join(change.set_text)}" if change.set_text else "nothing else"
    if not change.fits:
        excess = readable_memory(change.peak_bytes - usable)
        yield (
            f"no change makes it fit; the smallest found needs "
            f"{readable_memory(change.peak_bytes)} a rank, {excess} too much "
            f"({counted(change.world_size, 'rank')}, {text})"
        )
    elif change.world_size == plan.run.grid.world_size:
        yield f"cheapest change: {text}   (peak {readable_memory(change.peak_bytes)})"
    else:
        yield (
            f"cheapest change: --world-size {change.world_size} {text}   "
            f"(peak {readable_memory(change.peak_bytes)}; no setting is enough on "
            f"{counted(plan.run.grid.world_size, 'rank')})"
        )


def _zero_stage(plan: Plan, zero_stage: int) -> str:
    return f"{zero_stage} *" if zero_stage == plan.run.zero_stage else str(zero_stage)


def _ranks(axis: AxisMap) -> str:
    group = axis.first_group
    if len(group) <= 2 * _SHOWN_RANKS:
        return " ".join(map(str, group))
    shown = " ".join(map(str, group[:_SHOWN_RANKS]))
    return f"{shown} ... {group[-1]}"


def _stands(axis: AxisMap) -> str:
    if axis.size == 1:
        return "alone"
    if not axis.crosses_nodes:
        return "within a node"
    if axis.groups_across_nodes < axis.groups:
        return f"{axis.groups_across_nodes:,} of {axis.groups:,} groups cross nodes"
    return f"crosses nodes: {axis.most_nodes:,} for each group"


def _range(stages: range) -> str:
    first, last = stages.start, stages.stop - 1
    return str(first) if first == last else f"{first} to {last}"


def _layers(alike: AlikeStages) -> str:
    parts = ["embedding"] if alike.has_embedding else []
    parts += [counted(alike.blocks, "block")] if alike.blocks else []
    parts += ["head"] if alike.has_head else []
    return " + ".join(parts)


def _in_flight(run: Run, pipeline_stage: int) -> int:
    schedule = SCHEDULES[run.config.parallel.schedule]
    micro_batches = run.batch.gradient_accumulation_steps
    return peak_micro_batches_in_flight(schedule, run.grid.pp, pipeline_stage, micro_batches)


def _share(plan: Plan, zero_stage: int, peak_bytes: int) -> tuple[str, ...]:
    if plan.device is None:
        return ()
    fits = "yes" if plan.fits_at(zero_stage) else "no"
    return f"{peak_bytes / plan.device.usable_bytes:.0%}", fits


def _traffic_cells(plan: Plan, stage: StagePrediction, unit: Unit) -> Iterator[str]:
    for axis in ("tp", "dp", "pp", "world"):
        yield unit.of(sent_along(stage.traffic, (axis,)))
    yield unit.of(stage.sent_bytes)
    yield unit.of(sent_along(stage.traffic, plan.ranks.axes_across_nodes))


# A what-if as two rankings, readable at 120 columns.

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
