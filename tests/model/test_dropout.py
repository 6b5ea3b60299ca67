"""A dropout mask is a function of seed, name and sample, and of nothing else."""

import math

import pytest
import torch
from torch import Tensor

from megaspeed.config import ModelConfig
from megaspeed.model import GPT, MaskShard, SampleDropout
from megaspeed.model.attention import Attention
from tests.model.tiny_gpt import DROPOUTS, gpt2, gradients, initialized, llama, random_tokens

CONFIGS = {"gpt2": gpt2(**DROPOUTS), "llama": llama(**DROPOUTS)}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def dropout(probability: float = 0.3, *, name: str = "blocks.0.x", seed: int = 1) -> SampleDropout:
    return SampleDropout(probability, name=name, seed=seed)


def mask(layer: SampleDropout, samples: list[int], *shape: int) -> Tensor:
    """True where an element is kept, one row a sample."""
    return layer(torch.ones(len(samples), *shape), samples) != 0


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


def test_samples_names_and_seeds_have_masks_of_their_own() -> None:
    size = 100_000
    one = mask(dropout(), [4], size).double()
    others = {
        "sample": mask(dropout(), [5], size),
        "name": mask(dropout(name="blocks.1.x"), [4], size),
        "seed": mask(dropout(seed=2), [4], size),
    }
    for what, other in others.items():
        correlation = torch.corrcoef(torch.cat((one, other.double())))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(size), what


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_right_share_is_kept_and_scaled_so_that_the_mean_stays(probability: float) -> None:
    size = 200_000
    y = dropout(probability)(torch.full((1, size), 3.0), [0])
    kept = y != 0
    spread = math.sqrt(probability * (1 - probability) / size)
    assert float(kept.double().mean()) == pytest.approx(1 - probability, abs=5 * spread)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 3.0 / (1 - probability)))


def test_gradients_pass_where_the_forward_passed() -> None:
    x = torch.ones(2, 8, 16, requires_grad=True)
    y = dropout()(x, [4, 5])
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_evaluation_and_probability_zero_are_the_identity() -> None:
    x = torch.randn(2, 8, 16)
    assert dropout().eval()(x, [0, 1]) is x
    assert dropout(0.0)(x, [0, 1]) is x


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_shards_are_chunks_of_the_full_mask(dim: int, count: int) -> None:
    full = mask(dropout(), [4, 9], 8, 16)
    for index, chunk in enumerate(full.chunk(count, dim=dim + 1)):
        sharded = dropout()
        sharded.shard = MaskShard(dim=dim, index=index, count=count)
        assert torch.equal(mask(sharded, [4, 9], *chunk.shape[1:]), chunk)


def loss_and_gradients(
    model: GPT, tokens: Tensor, samples: list[int]
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, model(tokens, samples).shape[-1])
    loss = (model(tokens, samples) * weights).sum()
    loss.backward()
    return loss.item(), {name: gradient.clone() for name, gradient in gradients(model).items()}


@every_config
def test_recomputed_blocks_drop_the_same_elements_again(config: ModelConfig) -> None:
    tokens, samples = random_tokens(config, 3, 12), [5, 0, 8]
    kept = loss_and_gradients(initialized(config, seed=2), tokens, samples)
    again = loss_and_gradients(initialized(config, seed=2, recompute_blocks=True), tokens, samples)
    assert kept[0] == again[0]
    for name, gradient in kept[1].items():
        assert torch.equal(gradient, again[1][name]), name


@every_config
def test_every_dropout_of_the_model_is_active_in_training_only(config: ModelConfig) -> None:
    tokens, samples = random_tokens(config, 2, 12), [5, 0]
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
    model, tokens, samples = initialized(config, seed=2), random_tokens(config, 3, 12), [5, 0, 8]
    together = model(tokens, samples)
    for row, sample in enumerate(samples):
        alone = model(tokens[row : row + 1], [sample])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens, [5, 0, 9])[2], together[2], atol=1e-3)


@every_config
def test_each_dropout_has_a_name_of_its_own(config: ModelConfig) -> None:
    model = GPT(config, seed=2)
    layers = [m for m in model.modules() if isinstance(m, SampleDropout)]
    assert len({layer.name for layer in layers}) == len(layers) == 1 + 3 * 2
    stage = GPT(config, layers=range(2, 4), seed=2)  # the second block, and the head
    names = [m.name for m in stage.modules() if isinstance(m, SampleDropout)]
    assert names == [layer.name for layer in layers[-3:]]


@pytest.mark.parametrize("config", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_attention_written_out_for_dropout_equals_the_fused_one(config: ModelConfig) -> None:
    attention = Attention(config, name="blocks.0", seed=0)
    x = torch.randn(2, 12, 32)
    fused = attention(x, [0, 1])
    attention.dropout.probability = 1e-12  # active, but it drops nothing
    assert attention.dropout.active
    torch.testing.assert_close(attention(x, [0, 1]), fused, rtol=1e-5, atol=1e-6)
