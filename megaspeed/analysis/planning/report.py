"""A plan and its what-if as lines and tables. The tables fit 80 columns."""

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from megaspeed.analysis.planning.machines import AxisMap
from megaspeed.analysis.planning.plan import Layout, Plan, WhatIf
from megaspeed.analysis.planning.prediction import (
    AlikeStages,
    Prediction,
    alike_stages,
    sent_along,
)
from megaspeed.analysis.units import (
    GIB,
    counted,
    memory_unit,
    readable_memory,
    short_count,
    table_of,
    traffic_unit,
)
from megaspeed.config.resolve import GradientReduction, describe_recomputation, dropout_warning
from megaspeed.pipeline.schedules import SCHEDULES, peak_micro_batches_in_flight
from megaspeed.topology.devices import USABLE_FRACTION

SHOWN_LAYOUTS = 12
"""Rows of each ranking of a what-if. The JSON has all layouts."""

_LONGEST_GROUP = 28
_CONFIGURED = "* as configured"
_REDUCED = "gradients are reduced each"
_REDUCTIONS: Mapping[GradientReduction, str] = {
    "per_step": "step",
    "per_micro_batch": "micro-batch",
}


def report(plan: Plan) -> Iterator[str | Table]:
    """The lines and tables of a complete plan."""
    yield from summary(plan)
    for part in (_ranks, _stages, _memory, _traffic):
        yield ""
        yield from part(plan)
    yield ""
    for planned in plan.zero_stages:
        for refusal in planned.refusals:
            yield f"ZeRO-{planned.zero_stage} is refused: {refusal}"
    yield from _verdict(plan)


def summary(plan: Plan) -> Iterator[str]:
    """Lines that describe the planned run."""
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
        f"{run.config.data.sequence_length:,} tokens; a data rank has "
        f"{counted(batch.gradient_accumulation_steps, 'micro-batch')} of {batch.micro_batch_size:,}"
    )
    sequence = "on" if run.sequence_parallel else "off"
    yield (
        f"activations: {describe_recomputation(run.config.parallel)}; "
        f"sequence parallelism {sequence}"
    )
    yield from dropout_warning(run)
    if run.grid.pp > 1:
        yield (
            f"pipeline: {run.config.parallel.schedule}, ideal bubble {plan.bubble:.1%} of the step "
            "(pipeline stages of equal cost)"
        )


def _ranks(plan: Plan) -> Iterator[str | Table]:
    """The groups of each axis, and whether they stay within a node."""
    nodes, per_node = plan.ranks.nodes, plan.ranks.gpus_per_node
    yield (
        f"Ranks: {counted(nodes, 'node')} of {counted(per_node, 'GPU')}, pp outermost, tp innermost"
    )
    table = table_of(left=("axis",), right=("size", "stride", "groups"))
    table.add_column("first group", no_wrap=True)
    table.add_column("each group", no_wrap=True)
    for axis in reversed(plan.ranks.axes):
        table.add_row(
            axis.axis,
            f"{axis.size:,}",
            f"{axis.stride:,}" if axis.size > 1 else "",
            f"{axis.groups:,}",
            _first_group(axis),
            _place(axis),
        )
    yield table


def _first_group(axis: AxisMap) -> str:
    group = axis.first_group
    complete = " ".join(map(str, group))
    if len(complete) <= _LONGEST_GROUP:
        return complete
    return f"{group[0]} {group[1]} ... {group[-1]}"


def _place(axis: AxisMap) -> str:
    if axis.size == 1:
        return "one rank"
    if not axis.crosses_nodes:
        return "within a node"
    if axis.groups_across_nodes < axis.groups:
        return f"{axis.groups_across_nodes:,} of {axis.groups:,} cross nodes"
    return f"across {axis.most_nodes:,} nodes"


def _stages(plan: Plan) -> Iterator[str | Table]:
    """Layers and parameters of the pipeline stages; alike stages share a row."""
    yield "Pipeline stages"
    schedule = SCHEDULES[plan.run.config.parallel.schedule]
    table = table_of(
        left=("stages", "layers of each"),
        right=("parameters", "on a rank", "micro-batches\nin flight"),
    )
    for alike in alike_stages(plan.run):
        first = alike.pipeline_stages.start
        micro_batches = plan.run.batch.gradient_accumulation_steps
        in_flight = peak_micro_batches_in_flight(schedule, plan.run.grid.pp, first, micro_batches)
        table.add_row(
            _numbers(alike),
            _layers(alike),
            short_count(plan.stages[first].parameters),
            short_count(plan.stages[first].parameters_per_rank),
            f"{in_flight:,}",
        )
    yield table
    yield "on a rank: after the tensor split, before ZeRO; in flight: in the first stage"


def _numbers(alike: AlikeStages) -> str:
    first, last = alike.pipeline_stages.start, alike.pipeline_stages.stop - 1
    return str(first) if first == last else f"{first} to {last}"


def _layers(alike: AlikeStages) -> str:
    parts = ["embedding"] if alike.has_embedding else []
    parts += [counted(alike.blocks, "block")] if alike.blocks else []
    parts += ["head"] if alike.has_head else []
    return " + ".join(parts)


def _memory(plan: Plan) -> Iterator[str | Table]:
    """The memory of the fullest rank and the peaks of all pipeline stages, by ZeRO stage."""
    predictions = [planned.prediction for planned in plan.zero_stages]
    unit = memory_unit(each.fullest.peak_bytes for each in predictions if each is not None)
    kinds = alike_stages(plan.run)

    def cells(prediction: Prediction) -> dict[str, str]:
        peak = prediction.fullest.memory.peak
        figures = {
            _REDUCED: _REDUCTIONS[prediction.run.gradient_reduction],
            "model states": unit.of(prediction.heaviest.state_bytes),
            "peak": unit.of(peak.total),
            "  parameters": unit.of(peak.parameters),
            "  gradients": unit.of(peak.gradients),
            "  optimizer states": unit.of(peak.optimizer_states),
            "  activations": unit.of(peak.activations),
            "  communication buffers": unit.of(peak.communication_buffers),
        }
        if plan.device is not None:
            figures["peak, of usable memory"] = f"{peak.total / plan.device.usable_bytes:.0%}"
            figures["fits"] = "yes" if peak.total <= plan.device.usable_bytes else "no"
        if len(kinds) > 1:
            for alike, stage in zip(kinds, prediction.stages, strict=True):
                stages = "stages" if len(alike.pipeline_stages) > 1 else "stage"
                figures[f"peak of {stages} {_numbers(alike)}"] = unit.of(stage.peak_bytes)
        return figures

    columns = [None if each is None else cells(each) for each in predictions]
    yield f"Memory in {unit.name} of the rank that holds the most"
    table = table_of(
        left=("",), right=[_zero_stage(plan, zero_stage) for zero_stage in range(len(columns))]
    )
    for name in cells(plan.prediction):
        missing = "refused" if name == _REDUCED else "-"
        table.add_row(name, *(missing if each is None else each[name] for each in columns))
    yield table
    yield f"{_CONFIGURED}; model states: parameters, gradients and optimizer states"


def _zero_stage(plan: Plan, zero_stage: int) -> str:
    return f"ZeRO-{zero_stage}{' *' * (zero_stage == plan.run.zero_stage)}"


def _traffic(plan: Plan) -> Iterator[str | Table]:
    """What the busiest rank sends in one step, by axis: a row for each ZeRO stage."""
    predictions = [each.prediction for each in plan.zero_stages if each.prediction is not None]
    unit = traffic_unit(each.busiest.sent_bytes for each in predictions)
    yield f"Traffic in {unit.name} that the busiest rank sends in one step"
    table = table_of(left=("",), right=("tp", "dp", "pp", "all ranks", "together", "across nodes"))
    for each in predictions:
        sent = each.busiest
        cells = [sent_along(sent.traffic, (axis,)) for axis in ("tp", "dp", "pp", "world")]
        cells += [sent.sent_bytes, sent_along(sent.traffic, plan.ranks.axes_across_nodes)]
        table.add_row(_zero_stage(plan, each.run.zero_stage), *map(unit.of, cells))
    yield table
    yield _CONFIGURED


def _verdict(plan: Plan) -> Iterator[str]:
    """Whether the run fits; if not, the cheapest change that makes it fit."""
    peak = readable_memory(plan.prediction.fullest.peak_bytes)
    if plan.device is None:
        yield f"predicted peak {peak} a rank; to see whether it fits, add --device h100-80gb"
        return
    device, usable = plan.device, plan.device.usable_bytes
    word = "FITS" if plan.fits else "DOES NOT FIT"
    yield f"{word}: predicted peak {peak} a rank, of {GIB.named(usable)} usable"
    yield (
        f"usable: the {GIB.named(device.memory_bytes)} of {device.name}, less "
        f"{1 - USABLE_FRACTION:.0%} for CUDA, NCCL and fragmentation"
    )
    if plan.fits:
        return
    change = plan.change
    assert change is not None, "plan() searches for a change if the run does not fit"
    text = f"--set {' '.join(change.set_text)}" if change.set_text else "nothing else"
    changed_peak = readable_memory(change.peak_bytes)
    if not change.fits:
        yield (
            f"no change makes it fit; the smallest run found needs {changed_peak} a rank, "
            f"{readable_memory(change.peak_bytes - usable)} too much "
            f"({counted(change.world_size, 'rank')}, {text})"
        )
    elif change.world_size == plan.run.grid.world_size:
        yield f"cheapest change: {text}   (peak {changed_peak})"
    else:
        yield (
            f"cheapest change: --world-size {change.world_size} {text}   (peak {changed_peak}; "
            f"no setting is enough on {counted(plan.run.grid.world_size, 'rank')})"
        )


def what_if_report(found: WhatIf, plan: Plan) -> Iterator[str | Table]:
    """The layouts with the least memory, those with the least traffic, and how many are omitted."""
    if found.layouts:
        yield from _layouts("least memory", found.layouts)
        by_traffic = sorted(found.layouts, key=lambda layout: layout.sent_bytes)
        yield from _layouts("least traffic", by_traffic)
    yield ""
    if found.layouts:
        yield "best: no other layout has both less memory and less traffic (Pareto-optimal)"
    elif found.least_peak_bytes is not None:
        yield f"the smallest layout needs {readable_memory(found.least_peak_bytes)} a rank"
    verb = "fit" if plan.device is not None else "are possible"
    yield (
        f"{len(found.layouts):,} layouts {verb}, {found.too_large:,} are too large, "
        f"{found.refused:,} break rules of the configuration"
    )
    yield (
        f"all with micro-batches of {plan.run.batch.micro_batch_size}; for others, "
        "--set train_micro_batch_size_per_gpu=N"
    )


def _layouts(order: str, layouts: Sequence[Layout]) -> Iterator[str | Table]:
    shown = layouts[:SHOWN_LAYOUTS]
    memory = memory_unit(layout.peak_bytes for layout in shown)
    traffic = traffic_unit(layout.sent_bytes for layout in shown)
    yield ""
    yield f"What if: the {len(shown)} of {len(layouts):,} layouts with the {order}"
    table = table_of(
        right=(
            "pp",
            "dp",
            "tp",
            "ZeRO",
            "recom-\npute",
            "micro-\nbatches",
            f"peak\n{memory.name}",
            f"sent\n{traffic.name}",
            "across\nnodes",
            "bubble",
            "best",
        )
    )
    for layout in shown:
        grid = layout.run.grid
        table.add_row(
            str(grid.pp),
            str(grid.dp),
            str(grid.tp),
            f"{layout.run.zero_stage}{'' if layout.set_text else ' *'}",
            layout.run.config.parallel.activation_checkpointing,
            f"{layout.run.batch.gradient_accumulation_steps:,}",
            memory.of(layout.peak_bytes),
            traffic.of(layout.sent_bytes),
            traffic.of(layout.sent_across_nodes_bytes),
            f"{layout.bubble:.1%}",
            "best" if layout.is_best else "",
        )
    yield table
    if not all(layout.set_text for layout in shown):
        yield _CONFIGURED
