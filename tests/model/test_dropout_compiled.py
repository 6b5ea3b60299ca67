"""torch.compile takes a block with dropout as one graph, and compiles it once.

The backend runs the traced graph with torch's own operations, so that no compiler is needed.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Recomputation
from megaspeed.model.dropout import SampleDropout
from tests.model.tiny_gpt import DROPOUTS, gpt2, initialized, llama


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_and_gradient(block: torch.nn.Module, x: Tensor, samples: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, samples)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize(
    "config", [gpt2(**DROPOUTS), llama(**DROPOUTS)], ids=lambda config: config.architecture
)
def test_all_blocks_and_steps_share_one_graph(config: ModelConfig) -> None:
    """Version 0.1 passed samples as integers, which are compiled in. Keys are tensors for the same
    reason: an integer would make a graph for each block.
    """
    compiled, eager = initialized(config, seed=2), initialized(config, seed=2)
    compiler = CompileCounterWithBackend("aot_eager")
    for block in compiled.blocks.values():
        block.forward = torch.compile(
            block.forward, fullgraph=True, dynamic=False, backend=compiler
        )
    assert len(compiled.blocks) > 1
    for step in range(4):
        x, samples = torch.randn(3, 12, 32), 3 * step + torch.arange(3)
        for name, block in compiled.blocks.items():
            found = forward_and_gradient(block, x, samples)
            torch.testing.assert_close(found, forward_and_gradient(eager.blocks[name], x, samples))
    assert compiler.frame_count == 1


def test_a_compiled_mask_has_the_same_bits() -> None:
    layer, x = SampleDropout(0.3, name="blocks.0.x", seed=1), torch.ones(2, 8, 16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    for first in (0, 5, 2**40):
        samples = torch.arange(first, first + 2)
        assert torch.equal(compiled(x, samples), layer(x, samples))


@pytest.mark.parametrize("recomputation", ["none", "selective", "full"])
def test_a_compiled_block_may_be_recomputed(recomputation: Recomputation) -> None:
    config = gpt2(**DROPOUTS)
    results = []
    for compiles in (False, True):
        model = initialized(config, seed=2, layers=range(1, 3), recomputation=recomputation)
        if compiles:
            for block in model.blocks.values():
                block.forward = torch.compile(
                    block.forward, fullgraph=True, dynamic=False, backend="aot_eager"
                )
        torch.manual_seed(0)
        results.append(forward_and_gradient(model, torch.randn(2, 12, 32), torch.arange(2)))
    torch.testing.assert_close(results[0], results[1])
