"""A block copies nothing for its collectives. In the backward, they overlap with products."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaspeed.model.attention import Inputs
from megaspeed.tensor_parallel.collectives import Pending, TensorAxis
from megaspeed.tensor_parallel.layers import column_parallel_linear
from megaspeed.tensor_parallel.parallelize import materialize, parallelize
from megaspeed.topology.grid import Grid
from megaspeed.training.rank_model import plain_model, tensor_axis
from tests.paper_gpu.fake_world import GPT2, fake_context, paper_run
from tests.paper_gpu.recorder import Recorder


class Order(TorchDispatchMode):
    """Records the names of products, collectives and waits, in the order of their launch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: list[str] = []
        wait = Pending.wait

        def noted(pending: Pending) -> torch.Tensor:
            self.calls.append("wait")
            return wait(pending)

        patch.setattr(Pending, "wait", noted)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d" or function._opname in ("mm", "sum"):
            self.calls.append(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("split", "order"),
    [
        (False, ["mm", "allreduce_", "mm", "sum", "wait"]),
        (
            True,
            [
                *("_allgather_base_", "mm", "wait"),
                *("_reduce_scatter_base_", "mm", "sum", "wait"),
            ],
        ),
    ],
)
def test_products_of_gradients_are_between_a_collective_and_its_wait(
    split: bool, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_context(Grid(pp=1, dp=1, tp=2), rank=0) as context:
        axis = TensorAxis(context.tp_group, 0, 2, sequence_parallel=split)
        weight, bias = (torch.randn(size, requires_grad=True) for size in ((6, 4), (6,)))
        x = torch.randn(2, 8 // (2 if split else 1), 4, requires_grad=True)
        y = column_parallel_linear(x, weight, bias, axis)
        with Order(monkeypatch) as recorded:
            y.backward(torch.ones_like(y))
    assert recorded.calls == order


@pytest.mark.parametrize("split", [False, True])
def test_no_collective_of_a_block_copies_what_it_sends_or_receives(split: bool) -> None:
    """With several samples, version 0.1 made 20 copies for each block and micro-batch."""
    changes: dict[str, Any] = {"model": GPT2, "parallel": {"sequence_parallel": split}}
    run = paper_run(tp=2, **changes)
    with fake_context(run.grid, rank=0) as context:
        model = plain_model(run)
        shards = parallelize(model, run.config.model, tensor_axis(run, context))
        materialize(
            model,
            lambda name: torch.zeros(shards[name].local_shape),
            device=context.device,
            dtype=torch.bfloat16,
        )
        x = torch.ones(3, 16 // model.sequence_parts, 32, dtype=torch.bfloat16, requires_grad=True)
        with Recorder() as recorder:
            y = model.blocks["0"](x, Inputs())
            y.backward(torch.ones_like(y))
    assert len(recorder.messages) == (10 if split else 4)
    assert not {"clone", "copy_", "_to_copy"} & recorder.launches.keys()
