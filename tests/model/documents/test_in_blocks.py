"""Documents packed into a row, with every other feature of blocks. Without documents, there is no
extra work.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Recomputation
from megaspeed.model.gpt import GPT
from tests.model.documents.packed_rows import DOCUMENTS, ours, tokens_of
from tests.model.tiny_gpt import DROPOUTS, gradients, initialized

ROUNDING = 1e-5  # relative to the largest logit or gradient


def trained(model: GPT, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (logits, gradients) of the packed rows in training mode."""
    logits = model.train()(tokens, torch.arange(len(tokens)), DOCUMENTS)
    (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), gradients(model)


def test_attention_that_drops_sees_the_same_tokens(
    config: ModelConfig, stock: PreTrainedModel
) -> None:
    """The probability is so small that it drops nothing, but it uses the code path with dropout."""
    tokens = tokens_of(config)
    dropping = config.model_copy(update={"attention_dropout": 1e-30})
    logits, found = trained(ours(dropping, stock), tokens)
    expected_logits, expected = trained(ours(config, stock), tokens)
    assert float((logits - expected_logits).abs().max() / logits.abs().max()) < ROUNDING
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < ROUNDING * gradient.norm(), name


@pytest.mark.parametrize("recomputation", ["selective", "full"])
@pytest.mark.parametrize("dropouts", [{}, DROPOUTS], ids=["", "dropout"])
def test_recomputed_blocks_give_the_same_bits(
    config: ModelConfig,
    stock: PreTrainedModel,
    dropouts: dict[str, float],
    recomputation: Recomputation,
) -> None:
    tokens = tokens_of(config)
    config = config.model_copy(update=dropouts)
    kept = trained(ours(config, stock), tokens)
    again = trained(ours(config, stock, recomputation=recomputation), tokens)
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


def test_parts_of_the_model_one_behind_the_other_give_the_same_bits(config: ModelConfig) -> None:
    """Pipeline stages run the parts in this way. Each stage receives the documents."""
    config = config.model_copy(update={"tie_word_embeddings": False})
    tokens = tokens_of(config)
    whole = initialized(config)(tokens, documents=DOCUMENTS)
    x = tokens
    for layers in (range(1), range(1, 2), range(2, 4)):
        x = initialized(config, chunks=[layers])(x, documents=DOCUMENTS)
    assert torch.equal(x, whole)


@torch.no_grad()
def test_bf16_stays_near_fp32(config: ModelConfig) -> None:
    model, tokens = initialized(config), tokens_of(config)
    exact = model(tokens, documents=DOCUMENTS)
    rounded = model.to(torch.bfloat16)(tokens, documents=DOCUMENTS)
    assert rounded.dtype == torch.bfloat16
    assert float((rounded - exact).abs().max() / exact.abs().max()) < 2e-2


def test_without_documents_neither_mask_nor_positions_are_made(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: object) -> Tensor:
        raise AssertionError("made although no documents were given")

    monkeypatch.setattr("megaspeed.model.gpt.attention_mask", unwanted)
    masks: list[object] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        masks.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    initialized(config)(tokens_of(config))
    assert masks == [(None, True)] * config.num_hidden_layers
