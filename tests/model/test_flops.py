"""The FLOPs counted from the shapes equal those that torch counts while it runs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import (
    forward_flops_per_token,
    layer_count,
    training_flops_per_token,
)
from tests.model.tiny_gpt import gpt2, llama, random_tokens

BATCH, SEQUENCE = 3, 24
CONFIGS = {
    "gpt2": gpt2(),
    "gpt2 with a feed-forward of its own": gpt2(intermediate_size=80),
    "llama": llama(),
    "llama ungrouped": llama(num_key_value_heads=4, num_hidden_layers=3),
    "llama tied": llama(tie_word_embeddings=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def counted(run: Callable[[], Tensor]) -> float:
    """Return the operations per token in the matrix products of ``run``."""
    # torch 2.13 does not count the CPU's fused attention. The unfused form has two products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / (BATCH * SEQUENCE)


@every_config
def test_a_training_step_costs_what_torch_counts(config: ModelConfig) -> None:
    model, tokens = GPT(config), random_tokens(config, BATCH, SEQUENCE)
    measured = counted(lambda: model(tokens).sum().backward())
    assert training_flops_per_token(config, SEQUENCE) == pytest.approx(measured, rel=0.01)


@every_config
def test_each_layer_costs_what_torch_counts(config: ModelConfig) -> None:
    tokens, hidden = random_tokens(config, BATCH, SEQUENCE), torch.zeros(BATCH, SEQUENCE, 32)
    predicted = forward_flops_per_token(config, SEQUENCE)
    assert len(predicted) == layer_count(config)
    for layer in range(1, layer_count(config)):
        part = GPT(config, chunks=[range(layer, layer + 1)])
        assert predicted[layer] == pytest.approx(counted(partial(part, hidden)), rel=0.01)
    embedding = GPT(config, chunks=[range(1)])
    assert counted(lambda: embedding(tokens)) == 0  # it has a cost, but no products
    assert 0 < predicted[0] < predicted[1] / 10


def test_recomputation_is_not_counted_as_useful_work() -> None:
    config, tokens = gpt2(), random_tokens(gpt2(), BATCH, SEQUENCE)
    recomputing = GPT(config, recomputation="full")
    measured = counted(lambda: recomputing(tokens).sum().backward())
    # A recomputation stops when it has all that the backward needs: before the last product.
    last_product = 2 * config.intermediate_size * config.hidden_size
    again = sum(block - last_product for block in forward_flops_per_token(config, SEQUENCE)[1:-1])
    assert measured == pytest.approx(training_flops_per_token(config, SEQUENCE) + again, rel=0.01)


@every_config
def test_selective_recomputation_repeats_no_product(config: ModelConfig) -> None:
    tokens, recomputing = (
        random_tokens(config, BATCH, SEQUENCE),
        GPT(config, recomputation="selective"),
    )
    measured = counted(lambda: recomputing(tokens).sum().backward())
    assert measured == pytest.approx(training_flops_per_token(config, SEQUENCE), rel=0.01)


def test_a_large_model_costs_six_operations_a_parameter_and_token() -> None:
    """The rule of thumb is 6 N (Kaplan et al. 2020), for the matrices of a large model."""
    config = ModelConfig.model_validate({"preset": "llama-2-70b"})
    # All but the embedding look-up.
    matrices = 68_976_648_192 - config.vocab_size * config.hidden_size
    assert training_flops_per_token(config, 1) == pytest.approx(6 * matrices, rel=1e-3)


def test_longer_sequences_cost_more_only_in_attention() -> None:
    config = gpt2()
    short, long = (training_flops_per_token(config, s) for s in (100, 300))
    # scores and mix: 2 blocks x 3 (forward and backward) x 4 S D operations a token
    assert long - short == 2 * 3 * 4 * 200 * config.hidden_size
