"""Tiny plain models, and rows of documents for them."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.documents import Documents
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import GPT
from megaspeed.model.initialization import initialize
from tests.support.tiny import GPT2, LLAMA

DROPOUTS = {"embedding_dropout": 0.1, "attention_dropout": 0.2, "residual_dropout": 0.3}
# The lengths of the documents in each row of 24 tokens. One has a single token, one fills a row.
LENGTHS = ((5, 1, 10, 8), (24,), (1, 1, 22))

NEAR_TIE = 1e-4
"""If two scores differ by less than this, rounding may change which expert is chosen."""


def gpt2(**changes: Any) -> ModelConfig:
    """Two blocks of 4 heads, width 32, vocabulary 301."""
    return ModelConfig(**{**GPT2, "num_hidden_layers": 2, **changes})


def llama(**changes: Any) -> ModelConfig:
    """Two blocks of 4 query heads on 2 key/value heads, width 32, vocabulary 301."""
    return ModelConfig(**{**LLAMA, "num_hidden_layers": 2, **changes})


def initialized(config: ModelConfig, **options: Any) -> GPT:
    """Return the plain model (or a part of it) with the initial weights of seed 3, in training
    mode.
    """
    model = GPT(config, **options)
    initialize(model, config, seed=3)
    return model


def random_tokens(config: ModelConfig, batch: int, sequence: int) -> Tensor:
    """Return random token ids (B, S)."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(config.vocab_size, (batch, sequence), generator=generator)


def packed(lengths: tuple[tuple[int, ...], ...]) -> Documents:
    """Return documents with these lengths. There is one tuple of lengths for each row."""
    begins = torch.zeros(len(lengths), sum(lengths[0]), dtype=torch.bool)
    for row, of_row in zip(begins, lengths, strict=True):
        row[torch.tensor((0, *of_row[:-1])).cumsum(0)] = True
    return Documents.beginning_at(begins)


def gradients(model: GPT) -> dict[str, Tensor]:
    """Return every parameter's gradient, by name."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters())), "a parameter has no gradient"
    return found


def smallest_gap(model: GPT, tokens: Tensor) -> float:
    """Return the smallest difference between the last chosen score of a token and the next one."""
    gaps = [math.inf]

    def watch(module: nn.Module, _: Any, scores: Tensor, *, active: int) -> None:
        ordered = scores.sort(dim=-1, descending=True).values[:, active - 1 :]
        gaps.extend((ordered[:, :-1] - ordered[:, 1:])[:, :1].flatten().tolist())

    for block in model.blocks.values():
        if isinstance(block.mlp, Experts):
            block.mlp.router.register_forward_hook(partial(watch, active=block.mlp.active))
    with torch.no_grad():
        model(tokens)
    return min(gaps)
