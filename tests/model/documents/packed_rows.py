"""The library's models for rows of documents, and ours with their weights."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from tests.model.stock_models import from_gpt2, from_llama
from tests.model.tiny_gpt import LENGTHS, gpt2, llama, packed, random_tokens

SHAPES = {
    "gpt2": gpt2(),
    "llama": llama(),
    "llama without groups": llama(num_key_value_heads=4),
}


def pieces(x: Tensor) -> list[Tensor]:
    """Cut ``x`` (B, S, ...) into its documents, each (1, length, ...)."""
    return [
        piece
        for row, lengths in zip(x, LENGTHS, strict=True)
        for piece in row.unsqueeze(0).split(list(lengths), dim=1)
    ]


DOCUMENTS = packed(LENGTHS)


def tokens_of(config: ModelConfig) -> Tensor:
    return random_tokens(config, batch=len(LENGTHS), sequence=24)


def ours(config: ModelConfig, stock: PreTrainedModel, **options: Any) -> GPT:
    """Return our model with the stock model's weights. None is 0, and each affects the result."""
    weights = from_gpt2(stock) if config.architecture == "gpt2" else from_llama(stock)
    model = GPT(config, **options)
    model.load_state_dict(weights)
    return model


def difference(packed: Tensor, alone: list[Tensor]) -> float:
    """Return the largest difference between the documents in a row and each alone, relative to the
    largest number.
    """
    differences = [
        (one - other).abs().max() for one, other in zip(pieces(packed), alone, strict=True)
    ]
    return float(torch.stack(differences).max() / packed.abs().max())
