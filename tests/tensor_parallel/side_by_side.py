"""One step of the plain GPT and the same step over tensor ranks, from the same weights.

    plain_step(config)                   -> the reference: one process, torch's own cross-entropy
    pool.run(tp, steps_on_rank, cases)   -> the results of each rank, for each case
    differences(plain, ranks)            -> the tensors that differ, and by how much

This file joins the shards only by their ranges. So the code under test takes no part in
the comparison.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Recomputation
from megaspeed.model.gpt import GPT
from megaspeed.model.micro_batch import NOT_COUNTED
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, parameter_named
from megaspeed.tensor_parallel import shards
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.loss import TokenLosses, VocabParallelLoss
from megaspeed.tensor_parallel.parallelize import materialize, parallelize
from megaspeed.tensor_parallel.shards import ParameterShard
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit

Mutation = Callable[[pytest.MonkeyPatch, TensorAxis], None]

TOLERANCE = 1e-5  # of a tensor's norm
SAMPLES = torch.tensor([4, 9, 1])
SEQUENCE = 8
SEED = 2

# Rows of padding have this value instead of zero, because no result may depend on it.
_PADDING_VALUE = 3.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the tensor axis is used, and the mistake that is made. A mutation is a top-level
    function.
    """

    config: ModelConfig
    sequence_parallel: bool = False
    recomputation: Recomputation = "none"
    mutation: Mutation | None = None


@dataclass(frozen=True)
class Step:
    """Results of a forward and a backward pass. On a rank, these are its own parts."""

    logits: Tensor
    losses: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class RankStep:
    """A rank's part of a step, and which part of each parameter it has."""

    step: Step
    shards: dict[str, ParameterShard]
    vocabulary: range


def weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return every logical parameter. All are random: no bias is zero, and all norm
    weights differ.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(config).named_parameters()}
    generator = torch.Generator().manual_seed(5)
    return {
        name: 0.2 * torch.randn(shape, generator=generator) + float(name.endswith("norm.weight"))
        for name, shape in shapes.items()
    }


def batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return tokens (B, S) and targets. The first and the last token of the vocabulary occur."""
    generator = torch.Generator().manual_seed(6)
    shape = (len(SAMPLES), SEQUENCE)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    targets = torch.randint(config.vocab_size, shape, generator=generator)
    tokens[0, :2] = targets[1, :2] = torch.tensor([0, config.vocab_size - 1])
    targets[0, 3:5] = targets[2, -1] = NOT_COUNTED
    return tokens, targets


def plain_step(config: ModelConfig) -> Step:
    """Return the step of the plain model in this process."""
    model = GPT(config, seed=SEED)
    full = weights(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(full[name])
    tokens, targets = batch(config)
    logits = model(tokens, SAMPLES)
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_COUNTED, reduction="none"
    ).view_as(targets)
    return _backward(model, logits, losses, targets)


def steps_on_rank(launch: LaunchEnvironment, cases: Sequence[Case]) -> list[RankStep]:
    """Return each case's step on this tensor rank. This runs in a rank process."""
    grid = Grid(pp=1, dp=1, tp=launch.world_size)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        return [_step_on_rank(context, case) for case in cases]


def differences(plain: Step, ranks: Sequence[RankStep]) -> dict[str, float]:
    """Return the relative difference of loss, logits and gradients that differ by more than
    rounding.

    An entry "copies of <name>" states that ranks have copies of an element that differ in any bit.
    """
    gradients = {name: _Merged(plain.gradients[name]) for name in plain.gradients}
    logits = torch.cat([r.step.logits[..., : len(r.vocabulary)] for r in ranks], dim=-1)
    errors = {"logits": _error(logits, plain.logits)}
    for rank in ranks:
        errors["losses"] = max(errors.get("losses", 0), _error(rank.step.losses, plain.losses))
        assert rank.step.gradients.keys() == gradients.keys()
        for name, gradient in rank.step.gradients.items():
            gradients[name].add(gradient, rank.shards[name])
    for name, merged in gradients.items():
        errors[name] = _error(merged.value, plain.gradients[name])
        errors[f"copies of {name}"] = 1.0 if merged.copies_differ else 0.0
    return {what: error for what, error in errors.items() if not error <= TOLERANCE}


class _Merged:
    """A tensor joined from shards. An element that no shard has stays NaN."""

    def __init__(self, like: Tensor) -> None:
        self.value = torch.full_like(like, torch.nan)
        self.copies_differ = False

    def add(self, local: Tensor, shard: ParameterShard) -> None:
        rows = [row for run in shard.rows for row in run]
        columns = slice(None)
        if shard.columns is not None:
            columns = slice(shard.columns.start, shard.columns.stop)
        whole = self.value if self.value.ndim == 2 else self.value.unsqueeze(1)
        mine = local if local.ndim == 2 else local.unsqueeze(1)
        place = whole[rows, columns]
        there = ~place.isnan()
        self.copies_differ |= not torch.equal(place[there], mine[: len(rows)][there])
        whole[rows, columns] = torch.where(there, place, mine[: len(rows)])


def _step_on_rank(context: ParallelContext, case: Case) -> RankStep:
    axis = TensorAxis(
        context.tp_group, context.tp_rank, context.grid.tp, sequence_parallel=case.sequence_parallel
    )
    with pytest.MonkeyPatch.context() as patch:
        if case.mutation is not None:
            case.mutation(patch, axis)
        model, shards = _parallel_model(case, axis)
        vocabulary = shards.get(HEAD_WEIGHT, shards[EMBEDDING_WEIGHT]).rows[0]
        tokens, targets = batch(case.config)
        step = _loss_step(model, tokens, targets, vocabulary, axis)
        _sum_partial_gradients(step.gradients, case, axis)
        return RankStep(step, shards, vocabulary)


def _loss_step(
    model: GPT, tokens: Tensor, targets: Tensor, vocabulary: range, axis: TensorAxis
) -> Step:
    loss = VocabParallelLoss(vocabulary, axis)
    seen: list[Tensor] = []

    def chunk_losses(logits: Tensor, targets: Tensor, scales: Tensor | None) -> TokenLosses:
        seen.append(logits.clone())
        found = loss.cross_entropy(logits, targets, scales)
        seen.append(found.losses)
        return found

    def gradient_sum(weight: nn.Parameter) -> Tensor:
        weight.grad = torch.zeros_like(weight)
        return weight.grad

    loss.chunk_losses = chunk_losses
    scale = 1 / float((targets != NOT_COUNTED).sum())
    of_hidden = functools.partial(loss, targets=targets, scale=scale, gradient_sum=gradient_sum)
    model(tokens, SAMPLES, None, of_hidden).backward()
    logits, losses = seen
    return Step(logits.view(*targets.shape, -1), losses.view_as(targets), _gradients(model))


def _sum_partial_gradients(gradients: dict[str, Tensor], case: Case, axis: TensorAxis) -> None:
    """Sum partial gradients, as ``Gradients`` does once a step."""
    for name, gradient in gradients.items():
        parameter = parameter_named(case.config, name)
        if shards.gradient_is_partial(
            parameter, size=axis.size, sequence_parallel=axis.sequence_parallel
        ):
            dist.all_reduce(gradient, group=axis.group)


def _parallel_model(case: Case, axis: TensorAxis) -> tuple[GPT, dict[str, ParameterShard]]:
    with torch.device("meta"):
        model = GPT(case.config, seed=SEED, recomputation=case.recomputation)
    shards = parallelize(model, case.config, axis)
    full = weights(case.config)
    materialize(
        model,
        lambda name: _cut(full[name], shards[name]),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return model, shards


def _cut(full: Tensor, shard: ParameterShard) -> Tensor:
    part = torch.cat([full[run.start : run.stop] for run in shard.rows])
    if shard.columns is not None:
        part = part[:, shard.columns.start : shard.columns.stop]
    padding = part.new_full((shard.padding_rows, *part.shape[1:]), _PADDING_VALUE)
    return torch.cat((part, padding))


def _backward(model: GPT, logits: Tensor, losses: Tensor, targets: Tensor) -> Step:
    (losses.sum() / (targets != NOT_COUNTED).sum()).backward()
    return Step(logits.detach(), losses.detach(), _gradients(model))


def _gradients(model: GPT) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters())), "a parameter has no gradient"
    return gradients


def _error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())
