r"""Trains a layout and one process from the same JSON, and compares them.

    run (this layout) --N processes--> losses, norms, weights and gradients, gathered
                                        | choices of experts, replayed
    run (plain torch) --this process-> losses, norms, weights and gradients
                                        \-> Comparison

If only later steps differ, the single process trains again with shuffled samples. This determines
the tolerance of those steps (``comparison``). Everything runs on this machine: on the CPU with
gloo, or on GPUs with NCCL and a GPU for each rank. The single process uses the first GPU.

The shards and partitions of all ranks are gathered on rank 0, which must have the memory for this:

    fragments (ZeRO)  --sum over dp-->          local tensors (tensor shards)
                      --place rows, columns-->  logical tensors
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import LoaderShape, TrainingLoader
from megaspeed.measurement.local_ranks import DeviceType, run_on_ranks
from megaspeed.measurement.verification.comparison import (
    TIMES_SHUFFLED,
    TOLERANCES,
    Comparison,
    Difference,
    allowed_at_steps,
    compare_experts,
    compare_gradients,
    compare_numbers,
    shuffled,
)
from megaspeed.measurement.verification.experts import ExpertRecord, experts_of, record_choices
from megaspeed.measurement.verification.reference import CPU, ReferenceRun, train_reference
from megaspeed.model.gpt import DTYPES
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.model.parameters import logical_name, parameter_named
from megaspeed.supervision.answers import gather
from megaspeed.tensor_parallel.shards import ParameterShard
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.spikes import Recent, is_refused, with_step
from megaspeed.training.worker import StepInputs, Worker
from megaspeed.zero.model_states import Fragment

_TIMEOUT_SECONDS = 300.0


@dataclass
class ParallelRun(ReferenceRun):
    """The record of the ranks' training."""

    copies_differ_by: float = 0.0  # largest absolute difference of ranks' copies of an element


def verify(
    run: Run, corpus: PreparedCorpus, steps: int, device_type: DeviceType = "cpu"
) -> Comparison:
    """Trains the layout and one process for ``steps`` steps, and compares them.

    If only steps after the first differ too much, the single process trains ``TIMES_SHUFFLED``
    more times, with the samples of each step in other orders. In fp16, the loss scale must be
    constant. TF32 is turned off, because its rounding is a thousand times as large as the
    tolerance. In the single process, each token uses the experts that the layout chose for it
    (``verification/experts.py``). Raises RanksFailed.
    """
    run = replace(run, config=run.config.changed({"training.allow_tf32": False}))
    device = torch.device(device_type)
    ranks = run.grid.world_size
    parallel: ParallelRun = run_on_ranks(
        train_rank, run, corpus, steps, world_size=ranks, device_type=device_type
    )[0]
    choices = parallel.experts.choices
    batches = functools.partial(whole_batch, run, corpus)
    reference = train_reference(run, batches, steps, device, choices)
    comparison = compare(run, parallel, reference)
    if not comparison.differs_only_after_step_1:
        return comparison
    return compare(run, parallel, reference, train_shuffled(run, corpus, steps, device, choices))


def train_shuffled(
    run: Run,
    corpus: PreparedCorpus,
    steps: int,
    device: torch.device = CPU,
    choices: Tensor | None = None,
) -> list[ReferenceRun]:
    """The reference again, ``TIMES_SHUFFLED`` times, with each step's samples in another order."""

    def batches(times: int, step: int) -> list[MicroBatch]:
        return shuffled(whole_batch(run, corpus, step), seed=times * steps + step)

    return [
        train_reference(run, functools.partial(batches, times), steps, device, choices)
        for times in range(TIMES_SHUFFLED)
    ]


def compare(
    run: Run, parallel: ParallelRun, reference: ReferenceRun, again: Sequence[ReferenceRun] = ()
) -> Comparison:
    """Compares every number of the two trainings, with the tolerance of the run's precision.

    ``again`` are trainings of the reference with reordered samples. The more these differ from the
    reference, the more later steps of the layout may differ.
    """
    allowed = TOLERANCES[run.precision]
    dtype = DTYPES[run.precision]

    def differences(
        name: str, base: float, numbers: Callable[[ReferenceRun], list[float]]
    ) -> list[Difference]:
        limits = allowed_at_steps(base, numbers(reference), list(map(numbers, again)))
        return compare_numbers(name, numbers(parallel), numbers(reference), limits)

    return Comparison(
        losses=differences("loss", allowed.loss, lambda one: one.losses),
        grad_norms=differences("gradient norm", allowed.grad_norm, lambda one: one.grad_norms),
        gradients=compare_gradients(
            parallel.first_gradients, reference.first_gradients, allowed.gradient
        ),
        weights_bitwise_equal=parallel.initial_weights.keys() == reference.initial_weights.keys()
        and all(
            torch.equal(value.to(dtype), reference.initial_weights[name].to(dtype))
            for name, value in parallel.initial_weights.items()
        ),
        copies_differ_by=parallel.copies_differ_by,
        auxiliary_losses=differences(
            "auxiliary loss", allowed.loss, lambda one: one.experts.auxiliary_losses
        )
        if run.config.model.router_aux_loss_coef > 0.0
        else [],
        z_losses=differences("z-loss", allowed.loss, lambda one: one.z_losses)
        if run.config.training.z_loss
        else [],
        experts=compare_experts(parallel.experts, reference.experts, allowed.gradient),
        choices=0 if parallel.experts.choices is None else parallel.experts.choices.numel(),
        flipped=reference.experts.flipped,
    )


def whole_batch(run: Run, corpus: PreparedCorpus, step: int) -> list[MicroBatch]:
    """All samples of step ``step`` (from 0), in parts of the run's micro-batch size."""
    *_, (start, batch) = run.schedule.first_steps(corpus.sequence_length, step + 1)
    size = run.batch.micro_batch_size
    parts = batch // size
    loader = TrainingLoader(corpus, LoaderShape(size, parts, dp_rank=0, dp_size=1))
    return [loader.micro_batch(start, part) for part in range(parts)]


def train_rank(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> ParallelRun | None:
    """One rank's part of the training. Rank 0 returns the record, other ranks return None."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=_TIMEOUT_SECONDS) as context:
        worker, inputs = Worker(run, context), StepInputs(run, corpus, context)
        record = ParallelRun()
        choices = record_choices(worker.engine.module, run, inputs.shape, steps)
        initial = gather_weights(worker)
        gradients: LogicalTensors | None = None
        recent: Recent = ()
        spikes = run.config.training.skip_spikes
        batches = run.schedule.first_steps(corpus.sequence_length, steps)
        for step, (samples, batch) in enumerate(batches):
            worker.use_batch(batch)
            executor = worker.compute_gradients(inputs.load(samples, batch))
            if step == 0:
                gradients = gather_gradients(worker)
            rate = inputs.learning_rate(step - sum(record.skipped))
            refuses = functools.partial(is_refused, spikes, recent)
            result = worker.update_weights(executor, rate, refuses=refuses)
            if spikes is not None:
                recent = with_step(spikes, recent, result.loss, result.grad_norm)
            record.skipped.append(result.skipped)
            record.losses.append(result.loss)
            record.grad_norms.append(result.grad_norm)
            record.z_losses.append(result.z_loss or 0.0)
            record.experts.loads.append([list(of_block) for of_block in result.loads])
            record.experts.auxiliary_losses.append(result.auxiliary_loss)
        final = gather_weights(worker)
        bias_differs_by = gather_experts(worker, choices, record.experts)
    if initial is None or gradients is None or final is None:
        return None
    record.initial_weights = dict(initial.tensors)
    record.first_gradients = dict(gradients.tensors)
    record.weights = dict(final.tensors)
    differences = (gathered.copies_differ_by for gathered in (initial, gradients, final))
    record.copies_differ_by = max(bias_differs_by, *differences)
    return record


@dataclass(frozen=True)
class LogicalTensors:
    """Tensors by logical parameter name, fp32 on the CPU."""

    tensors: Mapping[str, Tensor]  # one for each logical parameter, unpadded
    # Largest absolute difference between two ranks' copies of the same element; infinite if one of
    # them is NaN.
    copies_differ_by: float


def gather_gradients(worker: Worker) -> LogicalTensors | None:
    """The reduced gradients without fp16's loss scale, on rank 0 (None elsewhere).

    They exist between the worker's ``compute_gradients`` and ``update_weights``.
    """
    scale = float(worker.engine.optimizer.loss_scale)
    fragments = worker.engine.gradients.fragments
    return gather_fragments(worker, (replace(f, values=f.values / scale) for f in fragments))


def gather_weights(worker: Worker) -> LogicalTensors | None:
    """The parameters that the model computes with, on rank 0 (None elsewhere)."""
    local = {name: value.float().cpu() for name, value in worker.engine.gather_parameters()}
    return _gather(worker, local)


def gather_fragments(worker: Worker, fragments: Iterable[Fragment]) -> LogicalTensors | None:
    """The tensors of which each rank holds these fragments, on rank 0 (None elsewhere)."""
    shapes = {name: shard.local_shape for name, shard in worker.shards.items()}
    grid, context, model = worker.run.grid, worker.context, worker.run.config.model
    experts = {name for name in shapes if parameter_named(model, name).is_expert}
    own = list(fragments)
    local: dict[str, Tensor] = {}
    for names, copies in ((shapes.keys() - experts, grid.copies), (experts, grid.expert_copies)):
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if name in names}
        flat = torch.zeros(sum(sizes.values()))
        parts = dict(zip(sizes, flat.split([*sizes.values()]), strict=True))
        for one in (one for one in own if one.name in names):
            parts[one.name][one.start : one.start + one.values.numel()] = one.values
        if copies.shard > 1:
            on_device = flat.to(context.device)
            dist.all_reduce(on_device, group=context.group_along(copies.shard_axis))
            flat.copy_(on_device)
        local |= {name: part.view(shapes[name]) for name, part in parts.items()}
    return _gather(worker, {name: local[name] for name in shapes})


def _gather(worker: Worker, local: Mapping[str, Tensor]) -> LogicalTensors | None:
    config, context = worker.run.config.model, worker.context
    # As numpy arrays, because a pickled tensor takes ten times as long to load.
    mine = [
        (logical_name(config, name), worker.shards[name], value.numpy())
        for name, value in local.items()
    ]
    everyones = gather(context.world_group, lambda: mine)
    if context.rank != 0:
        return None
    return merge_shards(
        (name, shard, torch.from_numpy(array)) for rank in everyones for name, shard, array in rank
    )


def gather_experts(worker: Worker, choices: Tensor, record: ExpertRecord) -> float:
    """Put the choices and biases of all ranks into the record, if the model has experts.

    Returns the largest difference between two ranks' copies of a bias.
    """
    if worker.balance is None:
        return 0.0
    context, bias = worker.context, worker.balance.bias
    own = list(experts_of(worker.engine.module))
    # After the maximum over ranks: the largest copy of each element, and minus the smallest one.
    ends = bias.new_full((2, len(choices), bias.shape[1]), -math.inf)
    ends[:, own] = torch.stack((bias, -bias))
    chosen = choices.to(context.device)
    for each in (ends, chosen):
        dist.all_reduce(each, op=dist.ReduceOp.MAX, group=context.world_group)
    record.choices, record.bias = chosen.cpu(), ends[0].cpu()
    return float(ends.sum(0).max())


def merge_shards(parts: Iterable[tuple[str, ParameterShard, Tensor]]) -> LogicalTensors:
    """Places the rows and columns of every shard in its logical tensor.

    If several shards hold an element, the first is used and the others are compared with it.
    """
    merged: dict[str, Tensor] = {}
    placed: dict[str, Tensor] = {}
    difference = 0.0
    for name, shard, value in parts:
        if name not in merged:
            merged[name] = torch.zeros(shard.full_shape)
            placed[name] = torch.zeros(shard.full_shape, dtype=torch.bool)
        held = value.split([*(len(rows) for rows in shard.rows), shard.padding_rows])
        for rows, part in zip(shard.rows, held, strict=False):
            there, known = _part(merged[name], rows, shard), _part(placed[name], rows, shard)
            distances = (there[known] - part[known]).abs()
            if distances.numel():
                largest = distances.nan_to_num(nan=math.inf, posinf=math.inf).max()
                difference = max(difference, float(largest))
            there.copy_(torch.where(known, there, part))
            known.fill_(True)
    return LogicalTensors(merged, difference)


def _part(tensor: Tensor, rows: range, shard: ParameterShard) -> Tensor:
    """A view of the logical tensor: these rows and the shard's columns."""
    part = tensor[rows.start : rows.stop]
    return part if shard.columns is None else part[:, shard.columns.start : shard.columns.stop]
