"""A dropout mask depends only on seed, name and sample."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Recomputation
from megaspeed.measurement.allocations import AllocationLog
from megaspeed.model.attention import Inputs
from megaspeed.model.dropout import MaskShard, SampleDropout
from megaspeed.model.gpt import GPT, Block
from tests.model.tiny_gpt import DROPOUTS, gpt2, gradients, initialized, llama, random_tokens

BITS = [
    "....x.x.x..x..x.",
    "........x....x.x",
    "xxx.....x.......",
    "..x..x.xx.x...x.",
    "..x..xx......x.x",
    "......x...xx...x",
    "x..x..xxx..xx..x",
    "..xxxx...x...x.x",
]
"""Two rows of each of four samples; x is dropped."""
DIGEST = "846246b6f8c6b564aacfe388d341530cac35db9a74fb4ed1fdcc9e6ec4069fe6"

CONFIGS = {"gpt2": gpt2(**DROPOUTS), "llama": llama(**DROPOUTS)}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def dropout(probability: float = 0.3, *, name: str = "blocks.0.x", seed: int = 1) -> SampleDropout:
    return SampleDropout(probability, name=name, seed=seed)


def mask(layer: SampleDropout, samples: Sequence[int], *shape: int) -> Tensor:
    """Return a mask that is True where an element is kept, with one row for each sample."""
    return layer(torch.ones(len(samples), *shape), torch.tensor(samples)) != 0


def test_these_are_the_bits() -> None:
    """A change of these bits changes every run that uses dropout."""
    layer = dropout(0.25, name="blocks.7.mlp_dropout", seed=1234)
    rows = mask(layer, [0, 1, -1, 2**40 + 3], 2, 16).flatten(0, 1)
    assert ["".join(".x"[bit] for bit in row) for row in (~rows).int().tolist()] == BITS
    large = mask(layer, range(10), 8, 64, 64).numpy().tobytes()
    assert hashlib.sha256(large).hexdigest() == DIGEST


def test_a_sample_has_its_mask_in_every_batch_and_at_every_place() -> None:
    alone = {sample: mask(dropout(), [sample], 8, 16)[0] for sample in (4, 7, 9)}
    together = mask(dropout(), [9, 4, 7], 8, 16)
    for row, sample in zip(together, (9, 4, 7), strict=True):
        assert torch.equal(row, alone[sample])


def test_a_mask_does_not_touch_the_global_generator_nor_depend_on_it() -> None:
    torch.manual_seed(0)
    first, state = mask(dropout(), [4], 8, 16), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(mask(dropout(), [4], 8, 16), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_has_the_same_mask(dtype: torch.dtype) -> None:
    y = dropout()(torch.ones(2, 8, 16, dtype=dtype), torch.tensor([4, 9]))
    assert y.dtype == dtype
    assert torch.equal(y != 0, mask(dropout(), [4, 9], 8, 16))
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / 0.7))


def test_gradients_pass_where_the_forward_passed() -> None:
    x = torch.ones(2, 8, 16, requires_grad=True)
    y = dropout()(x, torch.tensor([4, 5]))
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_evaluation_and_probability_zero_are_the_identity() -> None:
    x = torch.randn(2, 8, 16)
    assert dropout().eval()(x, None) is x
    assert dropout(0.0)(x, None) is x


@pytest.mark.parametrize("count", [2, 4])
def test_shards_are_chunks_of_the_full_mask(count: int) -> None:
    full = mask(dropout(), [4, 9], 8, 3, 16)
    for index, chunk in enumerate(full.chunk(count, dim=1)):
        sharded = dropout()
        sharded.shard = MaskShard(index=index, count=count)
        assert torch.equal(mask(sharded, [4, 9], *chunk.shape[1:]), chunk)


@pytest.mark.parametrize("count", [2, 4])
def test_shards_across_samples_are_parts_of_all_their_rows(count: int) -> None:
    full = mask(dropout(), [4, 9, 5], 8, 16)
    for index, rows in enumerate(full.view(count, -1, 16)):
        sharded = dropout()
        sharded.shard = MaskShard(index=index, count=count, across_samples=True)
        assert torch.equal(mask(sharded, [4, 9, 5], 8 // count, 16).view(-1, 16), rows)


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor has that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_a_rank_computes_the_mask_of_its_own_shard_only() -> None:
    """Version 0.1 drew the full mask on every rank and kept a part of it."""
    layer, x = dropout(), torch.ones(2, 4, 16, requires_grad=True)
    layer.shard = MaskShard(index=3, count=8)
    with LargestTensor() as largest:
        layer(x, torch.tensor([4, 9])).sum().backward()
    assert largest.elements == x.numel()


def test_nothing_is_stored_for_the_backward() -> None:
    """Neither a mask nor the input is saved. Only the result of the forward remains."""
    layer, samples = dropout(), torch.tensor([4, 5])
    x = torch.randn(2, 64, 64, requires_grad=True)
    log = AllocationLog(x.device)
    log.claim_everything_else_alive("parameters")
    with log:
        y = layer(x, samples)
        assert log.live().activations == y.nbytes


def loss_and_gradients(
    model: GPT, tokens: Tensor, samples: Tensor
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, model(tokens, samples).shape[-1])
    loss = (model(tokens, samples) * weights).sum()
    loss.backward()
    return loss.item(), {name: gradient.clone() for name, gradient in gradients(model).items()}


@every_config
@pytest.mark.parametrize("recomputation", ["selective", "full"])
def test_recomputed_blocks_drop_the_same_elements_again(
    config: ModelConfig, recomputation: Recomputation
) -> None:
    tokens, samples = random_tokens(config, 3, 12), torch.tensor([5, 0, 8])
    kept = loss_and_gradients(initialized(config, seed=2), tokens, samples)
    recomputing = initialized(config, seed=2, recomputation=recomputation)
    again = loss_and_gradients(recomputing, tokens, samples)
    assert kept[0] == again[0]
    for name, gradient in kept[1].items():
        assert torch.equal(gradient, again[1][name]), name


@every_config
def test_every_dropout_of_the_model_is_active_in_training_only(config: ModelConfig) -> None:
    tokens, samples = random_tokens(config, 2, 12), torch.tensor([5, 0])
    training = initialized(config, seed=2)
    without = training(tokens, samples)
    for layer in [m for m in training.modules() if isinstance(m, SampleDropout)]:
        layer.eval()
        other = training(tokens, samples)
        assert not torch.equal(other, without), layer.name
        without = other
    torch.testing.assert_close(without, training.eval()(tokens), rtol=1e-5, atol=1e-6)


@every_config
def test_a_models_rows_do_not_depend_on_their_batch(config: ModelConfig) -> None:
    model, tokens, samples = (
        initialized(config, seed=2),
        random_tokens(config, 3, 12),
        torch.tensor([5, 0, 8]),
    )
    together = model(tokens, samples)
    for row in range(3):
        alone = model(tokens[row : row + 1], samples[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
    other = model(tokens, torch.tensor([5, 0, 9]))
    assert not torch.allclose(other[2], together[2], atol=1e-3)


@every_config
def test_each_dropout_has_a_name_of_its_own(config: ModelConfig) -> None:
    model = GPT(config, seed=2)
    layers = [m for m in model.modules() if isinstance(m, SampleDropout)]
    assert len({layer.name for layer in layers}) == len(layers) == 1 + 3 * 2
    stage = GPT(config, chunks=[range(2, 4)], seed=2)  # the second block, and the head
    names = [m.name for m in stage.modules() if isinstance(m, SampleDropout)]
    assert names == [layer.name for layer in layers[-3:]]


@pytest.mark.parametrize("config", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_attention_written_out_for_dropout_equals_the_fused_one(config: ModelConfig) -> None:
    model = GPT(config)
    (block, _) = model.blocks.values()
    assert isinstance(block, Block)
    attention = block.attention
    x, angles = torch.randn(2, 12, 32), None
    if model.angles is not None:
        angles = model.angles.of(None, 12, x.dtype, x.device)
    fused = attention(x, Inputs(angles=angles))
    attention.dropout = SampleDropout(1e-12, name="x", seed=0)  # active, but it drops nothing
    assert attention.dropout.active
    again = attention(x, Inputs(torch.arange(2), angles))
    torch.testing.assert_close(again, fused, rtol=1e-5, atol=1e-6)
