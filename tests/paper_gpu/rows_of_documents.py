"""Attention within documents, computed as on a CPU, as on a GPU, or with a mask."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from megaspeed.config.model import ModelConfig
from megaspeed.model.documents import Documents, segments_of_rows
from tests.model.tiny_gpt import LENGTHS, gpt2, gradients, initialized, llama, packed

# Before torch 2.13, the kernel does not support shared key/value heads, and a mask replaces it.
SHARES_HEADS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
KEY_VALUE_HEADS = 2 if SHARES_HEADS else 4

CONFIGS = {
    "gpt2": gpt2(),
    "llama": llama(),
    "one key/value head": llama(num_key_value_heads=1),
    "head norms": llama(qk_norm=True),
    "a window": llama(sliding_window=3),
    "a window of one": llama(sliding_window=1),
    "a window longer than the row": llama(sliding_window=30),
}
# A row may end with a document of one token, be one document, or begin with several of one token.
ROWS = packed((*LENGTHS, (23, 1)))
OTHERS = [packed(((24,),) * 4), packed(((1,) * 24,) * 4), packed(((2, 22),) * 4)]


def has_kernel(config: ModelConfig, *_: object) -> bool:
    """Return whether a GPU's kernel has the heads of this model."""
    return SHARES_HEADS or config.num_key_value_heads == config.num_attention_heads


@contextmanager
def path(name: str) -> Iterator[None]:
    """Compute attention within documents on a "cpu", on a "gpu" in 16 bits, or with a "mask"."""
    with pytest.MonkeyPatch.context() as patch:
        if name != "cpu":
            decide = has_kernel if name == "gpu" else lambda *_: False
            patch.setattr("megaspeed.model.gpt.attends_without_mask", decide)
        if name == "gpu":
            patch.setattr("megaspeed.model.documents._is_on_cpu", lambda _: False)
        yield


def trained(
    config: ModelConfig,
    documents: Documents | None,
    device: torch.device | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return logits and gradients, computed in fp32, or in bf16 if a device is given."""
    segments_of_rows.cache_clear()
    model = initialized(config, **options)
    tokens = torch.arange(96).view(4, 24) * 7 % config.vocab_size
    if device is not None:
        model, tokens = model.to(device, torch.bfloat16), tokens.to(device)
        if documents is not None:
            documents = documents.moved(lambda tensor: tensor.to(device))
    logits = model(tokens, None, documents)
    (logits * torch.linspace(-1, 1, logits.shape[-1], device=device)).sum().backward()
    return [x.float() for x in (logits.detach(), *gradients(model).values())]


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest norm of a difference, relative to the other's norm or to 1 if that is
    less.
    """
    pairs = zip(some, others, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1.0)) for a, b in pairs)


def compare_with_mask(config: ModelConfig, device: torch.device) -> None:
    """Raise AssertionError if attention on this device differs in bf16 from that with a mask."""
    for documents in (ROWS, OTHERS[2], None):
        found = trained(config, documents, device)
        with path("mask"):
            expected = trained(config, documents, device)
        assert largest_difference(found, expected) < 3e-2
