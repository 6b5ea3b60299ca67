"""A product adds a weight's gradient to its sum, with the bits of autograd's sum on a CPU."""

import gc
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megaspeed.tensor_parallel import weight_gradients
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megaspeed.tensor_parallel.weight_gradients import MatrixLayer, add_product
from tests.support.wide_product import wide_products

WIDTH, INNER, TOKENS = 32, 48, 24


class Pair(nn.Module):
    """A block: two linear layers with a nonlinearity between them."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, INNER, bias=True, axis=axis)
        self.down = RowParallelLinear(INNER, WIDTH, bias=True, axis=axis)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return x + down


def pairs(count: int) -> list[Pair]:
    torch.manual_seed(3)
    made = [Pair(TensorAxis()).to_empty(device="cpu").bfloat16() for _ in range(count)]
    for pair in made:
        for parameter in pair.parameters():
            nn.init.normal_(parameter, std=0.2)
    return made


def gradients_of(blocks: Sequence[nn.Module], micro_batches: int) -> list[Tensor]:
    """Return the gradient of each micro-batch's input, after forward and backward."""
    torch.manual_seed(5)
    found = []
    for _ in range(micro_batches):
        x = torch.randn(2, TOKENS // 2, WIDTH).bfloat16().requires_grad_()
        y = x
        for block in blocks:
            y = block(y)
        y.float().square().mean().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def matrices(blocks: Sequence[nn.Module]) -> list[MatrixLayer]:
    modules = (module for block in blocks for module in block.modules())
    return [module for module in modules if isinstance(module, MatrixLayer)]


def sums_by_products(blocks: Sequence[nn.Module]) -> list[Tensor]:
    """Return a sum in fp32 for each layer, to which its products add."""
    sums = []
    for layer in matrices(blocks):
        total = torch.zeros(layer.weight.shape)
        layer.add_products_by(partial(add_product, total))
        sums.append(total)
    return sums


def sums_by_hooks(blocks: Sequence[nn.Module]) -> list[Tensor]:
    """Return a sum in fp32 for each layer, to which hooks add what autograd has computed."""
    sums = []
    for layer in matrices(blocks):
        total = torch.zeros(layer.weight.shape)

        def add(parameter: Tensor, total: Tensor = total) -> None:
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None

        layer.weight.register_post_accumulate_grad_hook(add)
        sums.append(total)
    return sums


def test_sums_input_gradients_and_biases_have_the_bits_of_autograd() -> None:
    ours, torchs = pairs(2), pairs(2)
    sums, expected = sums_by_products(ours), sums_by_hooks(torchs)
    assert all(map(torch.equal, gradients_of(ours, 3), gradients_of(torchs, 3)))
    assert all(map(torch.equal, sums, expected)) and all(float(each.norm()) > 0 for each in sums)
    assert all(layer.weight.grad is None for layer in matrices(ours))
    for one, other in zip(matrices(ours), matrices(torchs), strict=True):
        mine, autograds = one.get_parameter("bias").grad, other.get_parameter("bias").grad
        assert mine is not None and autograds is not None and torch.equal(mine, autograds)


def test_compiled_blocks_share_a_graph_and_add_to_their_own_sums() -> None:
    """An operator without a result must be neither dropped nor repeated."""
    ours, torchs = pairs(3), pairs(3)
    sums, expected = sums_by_products(ours), sums_by_hooks(torchs)
    torch.compiler.reset()
    counters.clear()
    for block in ours:
        block.forward = torch.compile(  # type: ignore[method-assign]
            block.forward, fullgraph=True, dynamic=False
        )
    gradients_of(ours, 2)
    gradients_of(torchs, 2)
    assert counters["stats"]["unique_graphs"] == 1
    for ours_, torchs_ in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours_, torchs_, rtol=0, atol=2e-2 * float(torchs_.abs().max()))
        assert float(ours_.norm()) > 0


def test_where_a_kernel_adds_a_product_to_fp32_it_is_not_rounded_before() -> None:
    """Two micro-batches, beside fp64."""
    torch.manual_seed(7)
    factors = [(torch.randn(24, 33).bfloat16(), torch.randn(24, 32).bfloat16()) for _ in range(2)]
    exact = torch.stack([a.double().t() @ b.double() for a, b in factors]).sum(0)

    def error() -> float:
        total = torch.zeros(33, 32)
        for a, b in factors:
            add_product(total, a, b)
        return float((total - exact).norm() / exact.norm())

    assert error() > 1e-4
    with wide_products():
        assert error() < 1e-6


def test_a_device_without_such_a_kernel_is_not_asked_for_it() -> None:
    assert not weight_gradients._adds_wider(torch.device("cpu"))


def test_layers_that_add_products_are_freed_with_their_model() -> None:
    blocks = pairs(1)
    sums_by_products(blocks)
    gradients_of(blocks, 1)
    layers = [weakref.ref(layer) for layer in matrices(blocks)]
    del blocks
    gc.collect()
    assert [layer() for layer in layers] == [None, None]
