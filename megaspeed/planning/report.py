"""A plan as lines and tables. The tables fit 80 columns."""

import math
from collections.abc import Callable, Iterator, Mapping

from rich.table import Table

from megaspeed.config.resolve import GradientReduction, describe_recomputation, dropout_warning
from megaspeed.pipeline.schedules import SCHEDULES, peak_micro_batches_in_flight
from megaspeed.planning.costs.placement import AxisPlacement
from megaspeed.planning.costs.traffic import axis_totals
from megaspeed.planning.forecast import Forecast, TrainingTime
from megaspeed.planning.plan import Plan, PlannedZero
from megaspeed.planning.prediction import AlikeStages, alike_stages
from megaspeed.planning.variants import CheapestChange
from megaspeed.topology.grid import AXES
from megaspeed.units import (
    GIB,
    counted,
    memory_unit,
    readable_memory,
    short_count,
    table_of,
    traffic_unit,
)

_LONGEST_GROUP = 28
_CONFIGURED = "* as configured"
_REDUCED = "gradients are reduced each"
_REDUCTIONS: Mapping[GradientReduction, str] = {
    "per_step": "step",
    "per_micro_batch": "micro-batch",
}


def report(plan: Plan, training: TrainingTime | None = None) -> Iterator[str | Table]:
    """The lines and tables of a plan, and of the complete training if it is given."""
    yield from summary(plan)
    for part in (_ranks, _stages, _memory, _traffic):
        yield ""
        yield from part(plan)
    yield from _time(plan)
    if training is not None:
        yield from _training(training)
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
    for axis in map(plan.ranks.along, reversed(AXES)):
        table.add_row(
            axis.axis,
            f"{axis.size:,}",
            f"{axis.stride:,}" if axis.size > 1 else "",
            f"{len(axis.groups):,}",
            _first_group(axis),
            _place(axis),
        )
    yield table


def _first_group(axis: AxisPlacement) -> str:
    group = axis.groups[0]
    complete = " ".join(map(str, group))
    if len(complete) <= _LONGEST_GROUP:
        return complete
    return f"{group[0]} {group[1]} ... {group[-1]}"


def _place(axis: AxisPlacement) -> str:
    if axis.size == 1:
        return "one rank"
    crossing, groups = axis.groups_across_nodes, len(axis.groups)
    if not crossing:
        return "within a node"
    if crossing < groups:
        return f"{crossing:,} of {groups:,} cross nodes"
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
    if plan.run.grid.pp > 1 and plan.run.config.model.tie_word_embeddings:
        yield "the last stage also holds a copy of the tied embedding, counted only on a rank"


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
    predictions = [each.prediction for each in plan.zero_stages]
    unit = memory_unit(each.fullest.peak_bytes for each in predictions if each is not None)
    kinds = alike_stages(plan.run)

    def cells(planned: PlannedZero) -> dict[str, str]:
        prediction, reserved = planned.prediction, planned.reserved
        assert prediction is not None, "only for stages that are not refused"
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
        if reserved is not None:
            if reserved.total:
                figures |= {
                    "besides tensors": unit.of(reserved.total),
                    "  CUDA and its kernels": unit.of(reserved.context),
                    "  buffers of NCCL": unit.of(reserved.nccl),
                    "  workspace of cuBLAS": unit.of(reserved.workspace),
                    "  holes in the allocator": unit.of(reserved.fragmentation),
                }
            assert plan.cluster is not None, "memory is reserved on a device"
            share = (peak.total + reserved.total) / plan.cluster.device.memory_bytes
            figures["share of the device"] = f"{share:.0%}"
            figures["verdict"] = str(planned.verdict).replace("does not fit", "too large")
        if len(kinds) > 1:
            for alike, stage in zip(kinds, prediction.stages, strict=True):
                stages = "stages" if len(alike.pipeline_stages) > 1 else "stage"
                figures[f"peak of {stages} {_numbers(alike)}"] = unit.of(stage.peak_bytes)
        return figures

    yield f"Memory in {unit.name} of the rank that holds the most"
    yield _by_zero_stage(plan, cells)
    yield f"{_CONFIGURED}; model states: parameters, gradients and optimizer states"


def _by_zero_stage(plan: Plan, cells: Callable[[PlannedZero], Mapping[str, str]]) -> Table:
    """A table with a column for each ZeRO stage. ``cells`` is name of the row -> text."""
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


def _traffic(plan: Plan) -> Iterator[str | Table]:
    """What the busiest rank sends in one step, by axis and by kind of link."""
    predictions = [each.prediction for each in plan.zero_stages if each.prediction is not None]
    unit = traffic_unit(each.busiest.sent_bytes for each in predictions)
    yield f"Traffic in {unit.name} that the busiest rank sends in one step"
    table = table_of(
        left=("",), right=("tp", "dp", "pp", "all ranks", "within a node", "between nodes")
    )
    for each in predictions:
        sent = each.busiest
        shares = {axis: plan.ranks.along(axis).between_nodes for axis, _ in sent.traffic}
        between = sum(int(shares[axis] * size) for (axis, _), size in sent.traffic.items())
        totals = axis_totals(sent.traffic)
        cells = [totals["tp"], totals["dp"], totals["pp"], totals["world"]]
        cells += [sent.sent_bytes - between, between]
        table.add_row(_zero_stage(plan, each.run.zero_stage), *map(unit.of, cells))
    yield table
    yield f"{_CONFIGURED}; between nodes: on average over the ranks of a group"


def _time(plan: Plan) -> Iterator[str | Table]:
    """The step time by its terms and ZeRO stages, and the throughput."""
    if plan.forecast is None:
        return
    longest = max(each.forecast.seconds for each in plan.zero_stages if each.forecast is not None)
    unit, size = ("s", 1.0) if longest >= 10 else ("ms", 1e-3)

    def cells(planned: PlannedZero) -> dict[str, str]:
        assert planned.forecast is not None, "every stage that is not refused has a forecast"
        terms = planned.forecast.step.terms
        figures = {"step": planned.forecast.seconds}
        figures |= {f"  {TERMS[name]}": seconds for name, seconds in terms.items()}
        return {name: f"{seconds / size:,.4g}" for name, seconds in figures.items()}

    yield ""
    yield f"Time in {unit} of one step"
    yield _by_zero_stage(plan, cells)
    has_no_head = any(
        each.forecast is not None and not each.forecast.step.head for each in plan.zero_stages
    )
    yield _CONFIGURED + "; head and loss: 0 if the slowest stage has no head" * has_no_head
    yield from _throughput(plan.forecast)


TERMS: Mapping[str, str] = {
    "products": "matrix products of blocks",
    "attention": "attention",
    "pointwise": "pointwise operations",
    "head": "head and loss",
    "recomputation": "recomputation",
    "tp": "tensor-parallel collectives",
    "bubble": "pipeline bubble",
    "p2p": "sends between stages",
    "dp": "data-parallel collectives",
    "optimizer": "optimizer",
    "host": "host",
}
"""Term of a step -> its name."""


def _throughput(forecast: Forecast) -> Iterator[str]:
    low, high = forecast.interval
    if forecast.cluster.measured is not None:
        yield f"step: {forecast.seconds:.3g} s predicted from this machine's measured speed"
    elif forecast.cluster.calibration != 1.0:
        yield f"step: {forecast.seconds:.3g} s, {forecast.cluster.calibration:.2f} x the prediction"
    else:
        yield (
            f"step: {forecast.seconds:.3g} s; with the error of nine of ten published runs, "
            f"{low:.3g} to {high:.3g} s"
        )
    line = f"throughput: {forecast.tokens_per_second:,.0f} tokens/s"
    full, causal = forecast.mfu(), forecast.mfu(causal=True)
    if full is not None and causal is not None:
        # With a window, the full square has many times the operations that are computed.
        is_windowed = forecast.run.config.model.sliding_window is not None
        line += f", MFU {causal if is_windowed else full:.1%}"
        line += ", counting attention within the window" * is_windowed
        line += f"; {causal:.1%} if causal attention counts half" * (not is_windowed)
    yield line
    yield from (f"warning: {warning}" for warning in forecast.warnings())


def _training(training: TrainingTime) -> Iterator[str]:
    """Days and cost of a complete training, and the time that its goodput loses."""
    goodput, forecast = training.goodput, training.forecast
    yield ""
    yield f"Training on {short_count(training.tokens)} tokens, {counted(training.steps, 'step')}"
    if not math.isfinite(training.days):
        yield "it never ends: failures come more often than saves; reduce training.save_interval"
        return
    hours = 24 * training.days
    unit, size = (
        ("days", 24) if hours >= 48 else ("hours", 1) if hours >= 2 else ("minutes", 1 / 60)
    )
    duration = f"{_rounded(hours / size)} {unit}"
    if forecast.cluster.measured is not None:
        yield duration
        return
    low, high = (hours / size * bound / forecast.seconds for bound in forecast.interval)
    yield f"{duration}, {_rounded(low)} to {_rounded(high)}"
    gpus = counted(training.gpus, "GPU")
    cost = f"{training.gpu_hours:,.0f} GPU-hours on {gpus}"
    if training.dollars is not None:
        cost += f", ${training.dollars:,.0f}"
    yield cost
    lost = {"validation": goodput.validation, "saves": goodput.saves, "restarts": goodput.restarts}
    parts = ", ".join(f"{name} {1 - kept:.1%}" for name, kept in lost.items())
    yield f"goodput {goodput.total:.1%}; lost: {parts}"
    if goodput.best_save_interval is not None:
        yield (
            f"a failure every {_rounded(goodput.hours_between_failures)} hours; best "
            f"training.save_interval: {goodput.best_save_interval:,} steps"
        )


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _verdict(plan: Plan) -> Iterator[str]:
    """Whether the run fits; if not, the cheapest change that makes it fit."""
    own = plan.zero_stages[plan.run.zero_stage]
    peak = readable_memory(plan.prediction.fullest.peak_bytes)
    if plan.cluster is None or own.reserved is None or own.verdict is None:
        yield (
            f"predicted peak {peak} a rank; to see whether it fits and how long a step takes, add "
            "--device h100-80gb"
        )
        return
    device, reserved = plan.cluster.device, own.reserved
    yield f"{own.verdict.upper()}: predicted peak {peak} a rank"
    beside = "with CUDA, NCCL and the allocator: " if reserved.total else ""
    tensors = plan.prediction.fullest.peak_bytes
    total = GIB.named(tensors + reserved.total)
    yield f"{beside}{total} of {GIB.named(device.memory_bytes)} ({device.name})"
    if reserved.unexpected:
        low, high = (GIB.of(tensors + end) for end in (reserved.certain, reserved.most))
        yield f"interval of nine of ten published runs: {low} to {high} GiB"
    if own.verdict == "tight":
        yield "tight: it probably fits, but the upper end of the interval does not"
    if plan.change is not None:
        yield from _change(plan, plan.change)


def _change(plan: Plan, change: CheapestChange) -> Iterator[str]:
    text = f"--set {' '.join(change.set_text)}" if change.set_text else "nothing else"
    changed_peak = readable_memory(change.peak_bytes)
    if not change.fits:
        yield (
            f"no change makes it fit; the smallest run found has a peak of {changed_peak} a rank "
            f"({counted(change.world_size, 'rank')}, {text})"
        )
    elif change.world_size == plan.run.grid.world_size:
        yield f"cheapest change: {text}   (peak {changed_peak})"
    else:
        yield (
            f"cheapest change: --world-size {change.world_size} {text}   (peak {changed_peak}; "
            f"no setting is enough on {counted(plan.run.grid.world_size, 'rank')})"
        )
