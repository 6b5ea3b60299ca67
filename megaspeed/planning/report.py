"""A plan and a what-if as lines and tables. The tables fit 80 columns."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table

from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import BYTES_OF
from megaspeed.data_axis.buckets import reduction_of_matrices
from megaspeed.pipeline.schedules import pipeline_of
from megaspeed.planning.costs.placement import AxisPlacement, Placement
from megaspeed.planning.costs.traffic import axis_totals
from megaspeed.planning.forecast import Forecast, TrainingTime
from megaspeed.planning.longest_sequence import LongestSequence
from megaspeed.planning.plan import Plan, PlannedStage, PlannedZero
from megaspeed.planning.prediction import alike_stages
from megaspeed.planning.what_if import Variant, WhatIf
from megaspeed.topology.grid import AXES, Axis
from megaspeed.units import (
    GIB,
    counted,
    memory_unit,
    readable_memory,
    short_count,
    table_of,
    traffic_unit,
)

_SHOWN_VARIANTS = 12
"""Rows of the table of a what-if. ``--json`` has all variants."""

_LONGEST_GROUP = 28
_CONFIGURED = "* as configured"
_REDUCED_EACH = {"micro_batch": "micro-batch", "visit": "visit", "step": "step", "after": "step"}

TERMS: Mapping[str, str] = {
    "products": "matrix products of blocks",
    "attention": "attention",
    "pointwise": "pointwise operations",
    "head": "head and loss",
    "recomputation": "recomputation",
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "exchange of experts' tokens",
    "bubble": "pipeline bubble",
    "p2p": "sends between stages",
    "dp": "data-parallel collectives",
    "optimizer": "optimizer",
    "host": "host",
}
"""Term of a step -> its name."""

ReportParts = Iterator[str | Table]


def report(plan: Plan, training: TrainingTime | None = None) -> ReportParts:
    """Yield the lines and tables of a plan, and of the complete training if it is given."""
    yield from summary(plan)
    for part in (_ranks, _stages, _memory, _traffic):
        yield ""
        yield from part(plan)
    if plan.forecast is not None:
        yield ""
        yield from _time(plan, plan.forecast)
    if training is not None and plan.forecast is not None:
        yield ""
        yield from _training(training, plan.forecast)
    yield ""
    for planned in plan.zero_stages:
        for refusal in planned.refusals:
            yield f"ZeRO-{planned.zero_stage} is refused: {refusal}"
    yield from _verdict(plan)


def summary(plan: Plan) -> Iterator[str]:
    """Yield lines that describe the planned run."""
    run, batch, model = plan.run, plan.run.batch, plan.run.config.model
    yield (
        f"{run.name}: {run.grid} = {counted(run.grid.world_size, 'rank')}, "
        f"ZeRO-{run.zero_stage}, {run.precision}"
    )
    if run.spare_ranks:
        world = run.grid.world_size + run.spare_ranks
        yield f"spare: {run.spare_ranks} of {counted(world, 'rank')} have no work"
    active = f", {short_count(plan.active_parameters)} of them active for each token"
    if model.num_experts is None:
        active = ""
    yield (
        f"model: {short_count(plan.parameters)} parameters{active}, "
        f"{counted(model.num_hidden_layers, 'block')} of hidden size {model.hidden_size:,}, "
        f"vocabulary {model.vocab_size:,}"
    )
    if model.num_experts is not None:
        yield (
            f"experts: {model.num_experts:,} in each block, {model.num_experts_per_tok:,} for each "
            f"token, of width {model.expert_width:,}; {_who_has_experts(plan)}"
        )
    yield (
        f"step: {counted(batch.train_batch_size, 'sample')} of "
        f"{run.config.data.sequence_length:,} tokens; a data rank has "
        f"{counted(batch.gradient_accumulation_steps, 'micro-batch')} of {batch.micro_batch_size:,}"
    )
    if others := run.schedule.batches[:-1]:
        smaller = ", ".join(f"{batch:,}" for batch in others)
        yield f"smaller batches of the schedule: {smaller} samples"
    yield (
        f"activations: {run.config.parallel.recomputation_in_words}; "
        f"sequence parallelism {'on' if run.sequence_parallel else 'off'}"
    )
    if run.context_method is not None:
        yield (
            f"context: {run.context_method}; a rank has "
            f"{run.config.data.sequence_length // run.grid.cp:,} tokens of each sample"
        )
    if plan.mask_bytes:
        why = model.why_mask(plan.prediction.fullest.device_type, BYTES_OF[run.precision])
        each = " for each micro-batch" if run.config.data.reset_at_documents else ""
        yield f"attention mask: {readable_memory(plan.mask_bytes)}{each}, because {why}"
    yield from model.warnings()
    if run.grid.pp > 1:
        shape = pipeline_of(run)
        groups = f"{counted(shape.groups, 'group')} of micro-batches"
        chunks = f", {shape.chunks} chunks a stage, {groups}" if shape.chunks > 1 else ""
        if shape.extra_in_flight:
            chunks = f", up to {counted(shape.extra_in_flight, 'more micro-batch')} in flight"
        yield (
            f"pipeline: {shape.schedule}{chunks}, ideal bubble {plan.bubble:.1%} of the step "
            "(pipeline stages of equal cost)"
        )


def _who_has_experts(plan: Plan) -> str:
    run, ep = plan.run, plan.run.grid.ep or 1
    if run.expert_exchange is None:
        return "a rank has all experts of its blocks"
    count = (run.config.model.num_experts or ep) // ep
    load = f", {run.load_factor:g} x the mean rows" if run.load_factor > 1.0 else ""
    return f"ep {ep}: a rank has {counted(count, 'expert')}, exchange {run.expert_exchange}{load}"


def _ranks(plan: Plan) -> ReportParts:
    """Yield the groups of each axis, and whether they stay within a node."""
    nodes, per_node = plan.ranks.nodes, plan.ranks.gpus_per_node
    yield (
        f"Ranks: {counted(nodes, 'node')} of {counted(per_node, 'GPU')}, pp outermost, tp innermost"
    )
    table = table_of(left=("axis",), right=("size",))
    table.add_column("first group", no_wrap=True)
    table.add_column("each group", no_wrap=True)
    shown = [axis for axis in reversed(AXES) if axis != "cp" or plan.run.grid.cp > 1]
    if plan.run.expert_exchange is not None:
        shown.append("ep")
    for axis in map(plan.ranks.along, shown):
        group = axis.groups[0]
        text = " ".join(map(str, group))
        if len(text) > _LONGEST_GROUP:
            text = f"{group[0]} {group[1]} ... {group[-1]}"
        table.add_row(axis.axis, f"{axis.size:,}", text, _place(axis))
    yield table


def _place(axis: AxisPlacement) -> str:
    if axis.size == 1:
        return "one rank"
    return "within a node" if axis.most_nodes == 1 else f"across {axis.most_nodes:,} nodes"


def _stages(plan: Plan) -> ReportParts:
    """Yield the layers and parameters of the pipeline stages; alike stages share a row."""
    run = plan.run
    yield "Pipeline stages"
    table = table_of(
        left=("stages", "layers of each"),
        right=("parameters", "on a rank", "messages\na step", "forwards\nin flight"),
    )
    for alike in alike_stages(run):
        first = plan.stages[alike.start]
        table.add_row(
            _numbers(alike),
            _layers(first, is_last=alike.stop == run.grid.pp),
            short_count(first.parameters),
            short_count(first.parameters_per_rank),
            f"{first.messages:,}",
            f"{first.in_flight:,}",
        )
    yield table
    yield "on a rank: after the tensor split, before ZeRO; in flight: in the first stage"
    if run.grid.pp > 1 and run.config.model.tie_word_embeddings:
        yield "the last stage also holds a copy of the tied embedding, counted only on a rank"


def _numbers(stages: range) -> str:
    return str(stages.start) if len(stages) == 1 else f"{stages.start} to {stages.stop - 1}"


def _layers(stage: PlannedStage, *, is_last: bool) -> str:
    is_first = stage.pipeline_stage == 0
    blocks = len(stage.layers) - is_first - is_last
    parts = ["embedding"] * is_first + [counted(blocks, "block")] * (blocks > 0)
    return " + ".join(parts + ["head"] * is_last)


def _memory(plan: Plan) -> ReportParts:
    """Yield the memory of the fullest rank and the peaks of all pipeline stages, by ZeRO stage."""
    predictions = [each.prediction for each in plan.zero_stages]
    unit = memory_unit(each.fullest.peak_bytes for each in predictions if each is not None)
    kinds = alike_stages(plan.run)

    def cells(planned: PlannedZero) -> dict[str, str]:
        prediction, reserved = planned.prediction, planned.reserved
        assert prediction is not None, "only for stages that are not refused"
        peak = prediction.fullest.memory.peak
        sizes = {"model states": prediction.heaviest.state_bytes, "peak": peak.total}
        sizes |= {f"  {name.replace('_', ' ')}": size for name, size in vars(peak).items()}
        if reserved is not None and reserved.total:
            sizes["besides tensors"] = reserved.total
        reduction = prediction.fullest.memory.axis.matrix_reduction
        figures = {"gradients are reduced each": _REDUCED_EACH[reduction.when]}
        if plan.run.config.parallel.virtual_stages > 1:
            count = f"{prediction.reductions}, {planned.chunk_gathers}"
            figures["reductions, gathers of chunks"] = count
        figures |= {row: unit.of(size) for row, size in sizes.items()}
        if reserved is not None and plan.cluster is not None:
            share = (peak.total + reserved.total) / plan.cluster.device.memory_bytes
            figures["share of the device"] = f"{share:.0%}"
            figures["verdict"] = str(planned.verdict).replace("does not fit", "too large")
        if len(kinds) > 1:
            for alike, stage in zip(kinds, prediction.stages, strict=True):
                name = f"peak of stage{'s' * (len(alike) > 1)} {_numbers(alike)}"
                figures[name] = unit.of(stage.peak_bytes)
        return figures

    yield f"Memory in {unit.name} of the rank that holds the most"
    yield _by_zero_stage(plan, cells)
    yield f"{_CONFIGURED}; model states: parameters, gradients and optimizer states"
    if plan.cluster is not None:
        yield "besides tensors: CUDA, NCCL's buffers, cuBLAS's workspace, the allocator's holes"


def _by_zero_stage(plan: Plan, cells: Callable[[PlannedZero], Mapping[str, str]]) -> Table:
    """Return a table with a column for each ZeRO stage. ``cells`` is name of the row -> text."""
    columns = [None if each.prediction is None else cells(each) for each in plan.zero_stages]
    table = table_of(left=("",), right=[_zero_stage(plan, stage) for stage in range(len(columns))])
    own = columns[plan.run.zero_stage]
    assert own is not None, "the run itself was accepted"
    for index, name in enumerate(own):
        missing = "-" if index else "refused"
        table.add_row(name, *(missing if each is None else each[name] for each in columns))
    return table


def _zero_stage(plan: Plan, zero_stage: int) -> str:
    return f"ZeRO-{zero_stage}{' *' * (zero_stage == plan.run.zero_stage)}"


def _traffic(plan: Plan) -> ReportParts:
    """Yield what the busiest rank sends in one step, by axis and by kind of link."""
    predictions = [each.prediction for each in plan.zero_stages if each.prediction is not None]
    unit = traffic_unit(each.busiest.sent_bytes for each in predictions)
    yield f"Traffic in {unit.name} that the busiest rank sends in one step"
    has_context, has_experts = plan.run.grid.cp > 1, plan.run.expert_exchange is not None
    axes = ("tp", *["cp"] * has_context, *["ep"] * has_experts, "dp", "pp", "all ranks")
    table = table_of(left=("",), right=(*axes, "within a node", "between nodes"))
    for each in predictions:
        sent = each.busiest
        ranks = Placement(each.run.grid, plan.ranks.gpus_per_node)
        shares = {axis: ranks.along(axis).between_nodes for axis, _ in sent.traffic}
        between = sum(int(shares[axis] * size) for (axis, _), size in sent.traffic.items())
        totals = axis_totals(sent.traffic)
        groups: tuple[Axis, ...] = ("dp", "shard", "replica", "expert_shard", "expert_replica")
        data = sum(totals[axis] for axis in groups)
        context = [totals["cp"]] * has_context + [totals["ep"]] * has_experts
        cells = [totals["tp"], *context, data, totals["pp"], totals["world"]]
        cells += [sent.sent_bytes - between, between]
        table.add_row(_zero_stage(plan, each.run.zero_stage), *map(unit.of, cells))
    yield table
    yield f"{_CONFIGURED}; between nodes: on average over the ranks of a group"


def _time(plan: Plan, forecast: Forecast) -> ReportParts:
    """Yield the step time by its terms and ZeRO stages, and the throughput."""
    methods = {"cp": plan.run.context_method, "ep": plan.run.expert_exchange}
    unused = [name for name, method in methods.items() if method is None]
    steps = [each.forecast.step for each in plan.zero_stages if each.forecast is not None]
    unit, size = ("s", 1.0) if max(step.total for step in steps) >= 10 else ("ms", 1e-3)

    def cells(planned: PlannedZero) -> dict[str, str]:
        assert planned.forecast is not None, "every stage that is not refused has a forecast"
        step = planned.forecast.step
        figures = {"step": step.total}
        figures |= {
            f"  {TERMS[name]}": seconds
            for name, seconds in step.terms.items()
            if name not in unused
        }
        return {name: f"{seconds / size:,.4g}" for name, seconds in figures.items()}

    yield f"Time in {unit} of one step"
    yield _by_zero_stage(plan, cells)
    has_no_head = not all(step.head for step in steps)
    yield _CONFIGURED + "; head and loss: 0 if the slowest stage has no head" * has_no_head
    yield from _throughput(forecast)


def _throughput(forecast: Forecast) -> Iterator[str]:
    cluster, (low, high) = forecast.cluster, forecast.interval_seconds
    step = f"step: {forecast.seconds:.3g} s"
    if cluster.measured is not None:
        yield f"{step} predicted from this machine's measured speed"
    elif cluster.calibration != 1.0:
        yield f"{step}, {cluster.calibration:.2f} x the prediction"
    else:
        yield f"{step}; with the error of nine of ten published runs, {low:.3g} to {high:.3g} s"
    line = f"throughput: {forecast.tokens_per_second:,.0f} tokens/s"
    full, causal = forecast.mfu, forecast.mfu_causal
    if full is not None and causal is not None:
        if forecast.run.config.model.sliding_window is None:
            line += f", MFU {full:.1%}; {causal:.1%} if causal attention counts half"
        else:  # the full square has many times the operations that are computed
            line += f", MFU {causal:.1%}, counting attention within the window"
    yield line
    yield from (f"warning: {warning}" for warning in forecast.warnings)


def _training(training: TrainingTime, forecast: Forecast) -> Iterator[str]:
    """Yield the days and cost of a complete training."""
    yield f"Training on {short_count(training.tokens)} tokens, {counted(training.steps, 'step')}"
    hours = 24 * training.days
    unit, size = (
        ("days", 24) if hours >= 48 else ("hours", 1) if hours >= 2 else ("minutes", 1 / 60)
    )
    for phase in training.phases if len(training.phases) > 1 else ():
        yield (
            f"from step {phase.first_step:,}, {counted(phase.train_batch_size, 'sample')}: "
            f"{counted(phase.steps, 'step')} of {phase.step_seconds:.3g} s, "
            f"{_rounded(24 * phase.days / size)} {unit}"
        )
    duration = f"{_rounded(hours / size)} {unit}"
    if forecast.cluster.measured is not None:
        yield duration
        return
    low, high = (
        _rounded(hours / size * bound / forecast.seconds) for bound in forecast.interval_seconds
    )
    yield f"{duration}, {low} to {high}"
    cost = f"{training.gpu_hours:,.0f} GPU-hours on {counted(training.gpus, 'GPU')}"
    yield cost + ("" if training.dollars is None else f", ${training.dollars:,.0f}")
    yield "without validations, saves and failures"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _verdict(plan: Plan) -> Iterator[str]:
    """Yield whether the run fits; if not, the cheapest change after which it does."""
    own = plan.zero_stages[plan.run.zero_stage]
    tensors = plan.prediction.fullest.peak_bytes
    peak = f"predicted peak {readable_memory(tensors)} a rank"
    if plan.cluster is None or own.reserved is None or own.verdict is None:
        yield f"{peak}; to see whether it fits and how long a step takes, add --device h100-80gb"
        return
    device, reserved = plan.cluster.device, own.reserved
    yield f"{own.verdict.upper()}: {peak}"
    beside = "with CUDA, NCCL and the allocator: " if reserved.total else ""
    total = GIB.named(tensors + reserved.total)
    yield f"{beside}{total} of {GIB.named(device.memory_bytes)} ({device.name})"
    if reserved.unexpected and own.interval_bytes is not None:
        low, high = map(GIB.of, own.interval_bytes)
        yield f"interval of nine of ten published runs: {low} to {high} GiB"
    if own.verdict == "tight":
        yield "tight: it probably fits, but the upper end of the interval does not"
    if plan.change is not None:
        peak = readable_memory(plan.change.peak_bytes)
        yield f"cheapest change: --set {' '.join(plan.change.set_text)}   (peak {peak})"
    elif own.verdict != "fits":
        yield "no single change is enough; --what-if lists all variants that fit, or use more ranks"


# A what-if.


def what_if_report(found: WhatIf) -> ReportParts:
    """Yield the fastest variants that fit, and how to get the best."""
    yield ""
    best = found.best
    if best is not None:
        grids = found.fastest_of_each_grid()
        yield f"What if: the fastest variant that fits, for each of {counted(len(grids), 'layout')}"
        yield _variants(grids[:_SHOWN_VARIANTS])
        if len(grids) > _SHOWN_VARIANTS:
            yield f"and {len(grids) - _SHOWN_VARIANTS} more: --json"
        yield f"{_CONFIGURED}; tight: the upper end of the interval of its memory does not fit"
        yield "R: replicas of ZeRO's partitions (parallel.replicate); at ZeRO-0, dp x cp"
        if any(variant.settings.virtual_stages > 1 for variant in grids[:_SHOWN_VARIANTS]):
            yield "pp 8x2: 8 pipeline stages of 2 chunks each (parallel.virtual_stages)"
        if any(variant.run.config.parallel.extra_in_flight for variant in grids[:_SHOWN_VARIANTS]):
            yield "pp 8+7: up to 7 more micro-batches in flight (parallel.extra_in_flight)"
        if any(variant.run.grid.ep is not None for variant in grids):
            yield "ep: ranks that share experts (parallel.expert); 8x2: 8 micro-batches of size 2"
        if any(variant.settings.cp > 1 for variant in grids[:_SHOWN_VARIANTS]):
            yield "dp 8x2: 8 data ranks of 2 context ranks each (parallel.context)"
        yield ""
        yield f"best: {best.run.grid}, ZeRO-{best.run.zero_stage}: {best.seconds:.3g} s a step"
        text = (
            f"--set {' '.join(best.set_text)}" if best.set_text else "it is the run as configured"
        )
        yield f"  {text}"
    elif found.least_peak_bytes is not None:
        yield f"the smallest variant needs {readable_memory(found.least_peak_bytes)} a rank"
    yield f"{len(found.variants):,} variants fit, {found.too_large:,} are too large"


def longest_report(found: Sequence[LongestSequence], model: ModelConfig) -> ReportParts:
    """Yield the longest sequence that fits, for each layout."""
    yield ""
    if not found:
        yield "no sequence fits at any layout"
        return
    yield "Longest sequence that fits, for each layout. A micro-batch is one sequence."
    memory = memory_unit(each.peak_bytes for each in found)
    table = table_of(right=("pp", "dp", "cp", "tp", "tokens", f"peak\n{memory.name}"))
    for each in found[:_SHOWN_VARIANTS]:
        degrees = map(str, each.settings.degrees[:4])
        table.add_row(*degrees, f"{each.tokens:,}", memory.of(each.peak_bytes))
    yield table
    if len(found) > _SHOWN_VARIANTS:
        yield f"and {len(found) - _SHOWN_VARIANTS} more: --json"
    if model.positions == "learned":
        yield f"model.max_position_embeddings {model.max_position_embeddings:,} is the limit"


def _variants(shown: Sequence[Variant]) -> Table:
    memory = memory_unit(variant.peak_bytes for variant in shown)
    headings: tuple[str, ...] = ("pp", "dp", "tp", "ZeRO", "R", "sum\neach", "recompute")
    sizes: tuple[str, ...] = ("micro-\nbatches", "of\nsize")
    has_experts = any(variant.run.grid.ep is not None for variant in shown)
    if has_experts:
        headings, sizes = (*headings[:3], "ep", *headings[3:]), ("micro-\nbatches",)
    table = table_of(right=(*headings, *sizes, "step\ns", "MFU", f"peak\n{memory.name}"))
    table.add_column("", no_wrap=True)
    for variant in shown:
        run, grid, mfu = variant.run, variant.run.grid, variant.forecast.mfu
        sizes_of_batch = run.batch.gradient_accumulation_steps, run.batch.micro_batch_size
        batch = [f"{number:,}" for number in sizes_of_batch]
        chunks, extra = variant.settings.virtual_stages, run.config.parallel.extra_in_flight
        table.add_row(
            f"{grid.pp}{f'x{chunks}' if chunks > 1 else ''}{f'+{extra}' if extra else ''}",
            f"{grid.dp}{f'x{grid.cp}' if grid.cp > 1 else ''}",
            str(grid.tp),
            *[str(grid.ep)] * has_experts,
            f"{run.zero_stage}{'' if variant.set_text else ' *'}",
            str(grid.replicate),
            _REDUCED_EACH[reduction_of_matrices(run, "cuda", run.grid.copies).when][:5],
            run.config.parallel.activation_checkpointing.replace("_offloaded", "+host"),
            *(["x".join(batch)] if has_experts else batch),
            f"{variant.seconds:.3g}",
            "" if mfu is None else f"{mfu:.0%}",
            memory.of(variant.peak_bytes),
            "tight" if variant.verdict == "tight" else "",
        )
    return table
