"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2), with Llama-3's scaling."""

import math

import torch
from torch import Tensor

from megaspeed.config.model import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angular frequency theta^(-2i/K) of each pair i in [0, K/2) of head dims: (K/2,), fp32."""
    # On the CPU even while a model is being built on the meta device.
    even_dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    exponents = even_dims / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return frequencies
    return _llama3_scaled(frequencies, config.rope_scaling)


def _llama3_scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling for long contexts ("The Llama 3 herd of models", 2024; its reference code).

    Wavelengths longer than the original context are stretched by ``factor``, short ones are kept,
    and those between are interpolated.
    """
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    longest_kept = original / scaling.high_freq_factor
    shortest_stretched = original / scaling.low_freq_factor
    blend = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def turns(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle position x frequency, computed in fp32.

    Args:
        positions: (S,) where they are those of every row, or (B, S).
        frequencies: (K/2,), fp32.
        dtype: of the result.

    Returns:
        Two of (S, 1, K/2) or (B, S, 1, K/2), the same for all heads.
    """
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + K/2) of ``x`` (B, S, heads, K) by its angle, given by ``turns``.

    The pairing of dim i with dim i + K/2 is the one of Hugging Face's Llama weights.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
