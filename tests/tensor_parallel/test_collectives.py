"""Each collective does what its name states, and its backward is the forward of its conjugate."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megaspeed.tensor_parallel.collectives import (
    TensorAxis,
    reduce_from_tensor_axis,
    reduce_scatter_sequence,
    split_sequence,
)
from megaspeed.tensor_parallel.layers import (
    SharedRows,
    column_parallel_linear,
    sum_shared_rows,
)
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

Collective = Callable[[Tensor, TensorAxis], Tensor]

B, S, D = 2, 8, 3


def of_rank(rank: int, *shape: int) -> Tensor:
    """Return a tensor that differs between ranks. It has integers, so sums are exact
    in any order.
    """
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-99, 100, shape, generator=generator).float()


def copy(x: Tensor, axis: TensorAxis) -> Tensor:
    """f: a column-parallel layer with a unit matrix as its weight."""
    return column_parallel_linear(x, torch.eye(D), None, axis)


def gather(x: Tensor, axis: TensorAxis) -> Tensor:
    """The same with sequence parallelism."""
    return column_parallel_linear(x, torch.eye(D), None, replace(axis, sequence_parallel=True))


def reduce(x: Tensor, axis: TensorAxis) -> Tensor:
    """g. It overwrites its input."""
    return reduce_from_tensor_axis(x.clone(), axis)


COLLECTIVES: dict[str, Collective] = {
    "copy": copy,
    "reduce": reduce,
    "gather": gather,
    "reduce-scatter": reduce_scatter_sequence,
    "split": split_sequence,
}


@dataclass(frozen=True)
class Both:
    """The results of a collective for ``of_rank``: as its input, and as the gradient
    of its output.
    """

    forward: Tensor
    backward: Tensor


def both_of_each(launch: LaunchEnvironment) -> dict[str, Both]:
    grid = Grid(pp=1, dp=1, tp=launch.world_size)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        axis = TensorAxis(context.tp_group, context.tp_rank, context.grid.tp)
        return {name: _both(collective, axis) for name, collective in COLLECTIVES.items()}


def _both(collective: Collective, axis: TensorAxis) -> Both:
    given = of_rank(axis.rank, B, S, D)
    sequence = {"gather": S // axis.size, "reduce-scatter": S * axis.size, "split": S * axis.size}
    name = next(name for name, known in COLLECTIVES.items() if known is collective)
    x = torch.zeros(B, sequence.get(name, S), D, requires_grad=True)
    # A gradient often has strides of its own.
    gradient = given.transpose(0, 2).contiguous().transpose(0, 2)
    collective(x, axis).backward(gradient)
    assert x.grad is not None
    both = Both(collective(given, axis).clone(), x.grad)
    unchanged = of_rank(axis.rank, B, S, D)
    assert torch.equal(given, unchanged) and torch.equal(gradient, unchanged), name
    return both


@pytest.fixture(scope="module", params=[2, 4])
def results(pool: RankPool, request: pytest.FixtureRequest) -> list[dict[str, Both]]:
    """Return the results by rank, then by the collective's name."""
    return pool.run(request.param, both_of_each)


def test_each_forward_is_worked_out_from_all_inputs(results: list[dict[str, Both]]) -> None:
    size = len(results)
    inputs = [of_rank(rank, B, S, D) for rank in range(size)]
    total = torch.stack(inputs).sum(dim=0)
    for rank, of in enumerate(results):
        assert torch.equal(of["copy"].forward, inputs[rank])
        assert torch.equal(of["reduce"].forward, total)
        assert torch.equal(of["gather"].forward, torch.cat(inputs).view(B, -1, D))
        assert torch.equal(of["reduce-scatter"].forward, part(total, rank, size))
        assert torch.equal(of["split"].forward, part(inputs[rank], rank, size))


def part(x: Tensor, rank: int, size: int) -> Tensor:
    """Return part ``rank`` of ``size`` equal parts of all B S tokens, in memory order."""
    return x.reshape(size, B, S // size, D)[rank]


@pytest.mark.parametrize(
    ("collective", "conjugate"),
    [
        ("copy", "reduce"),
        ("reduce", "copy"),
        ("gather", "reduce-scatter"),
        ("reduce-scatter", "gather"),
        ("split", "gather"),
    ],
)
def test_the_backward_is_the_forward_of_the_conjugate(
    results: list[dict[str, Both]], collective: str, conjugate: str
) -> None:
    for of in results:
        assert torch.equal(of[collective].backward, of[conjugate].forward)


def sum_shared(launch: LaunchEnvironment, replicas: int) -> Tensor:
    size = launch.world_size
    with ParallelContext.create(Grid(1, 1, size), launch, timeout_seconds=limit(30)) as context:
        axis = TensorAxis(context.tp_group, context.tp_rank, size)
        shared = SharedRows(first=3, index=axis.rank // replicas, count=size // replicas)
        parameter = torch.randn(5, 2, requires_grad=True)
        same = sum_shared_rows(parameter, shared, axis)
        assert torch.equal(same, parameter)
        same.backward(of_rank(axis.rank, 5, 2))
        assert parameter.grad is not None
        return parameter.grad


@pytest.mark.parametrize(("replicas", "neighbours"), [(2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])])
def test_shared_rows_are_summed_over_the_ranks_that_hold_them_alone(
    pool: RankPool, replicas: int, neighbours: list[list[int]]
) -> None:
    gradients = pool.run(4, sum_shared, replicas)
    for ranks in neighbours:
        total = sum((of_rank(rank, 5, 2)[3:] for rank in ranks), torch.zeros(()))
        for rank in ranks:
            assert torch.equal(gradients[rank][:3], of_rank(rank, 5, 2)[:3])
            assert torch.equal(gradients[rank][3:], total)


@pytest.mark.parametrize("collective", COLLECTIVES.values())
def test_on_an_axis_of_one_rank_every_collective_is_the_identity(collective: Collective) -> None:
    x = of_rank(0, B, S, D)
    assert torch.equal(collective(x, TensorAxis(None, 0, 1)), x)
