"""Causal self-attention with a fused query/key/value projection and grouped key/value heads.

    x (B, S, D) -> qkv (B, S, (H + 2 H_kv) K) -> softmax(q k^T / sqrt(K)) v -> output (B, S, D)

If the model has a norm of each head (Henry et al. 2020), it is applied to q and k first. If it has
rotary positions, q and k are rotated after that.

The rows of ``qkv.weight`` are all query heads, then all key heads, then all value heads, so that a
tensor split takes consecutive heads from each of the three sections. With H_kv < H, H / H_kv query
heads share one key/value head (Ainslie et al. 2023, GQA).

Several documents may be packed into one row. Then attention and positions may restart at each
document (``documents.py``).
"""

import math
from collections.abc import Mapping
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig, RopeScaling
from megaspeed.model.documents import varlen_attention
from megaspeed.model.dropout import SampleDropout
from megaspeed.model.recomputation import Compose, keeping


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Frequencies theta^(-2i/K) of rotary position embedding (Su et al. 2021, RoFormer, 3.2.2).

    One for each pair i in [0, K/2) of head dims: (K/2,), fp32.
    """
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


Angles = tuple[Tensor, Tensor]
"""Cosines and sines by which queries and keys are rotated: two of (S, 1, K/2) or (B, S, 1, K/2)."""


class RotaryAngles:
    """The angles of a model with rotary positions. All blocks of a rank share them.

    Those of rows that are one document are computed once and kept, because they depend only on the
    length of the rows.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config)
        self._kept: tuple[object, Angles] | None = None

    def of(
        self, positions: Tensor | None, sequence: int, dtype: torch.dtype, device: torch.device
    ) -> Angles:
        """Cosines and sines in ``dtype``.

        Args:
            positions: (B, S); None for 0 ... S - 1 in every row.
            sequence: S.
            dtype: of queries and keys.
            device: where they are.
        """
        self._frequencies = self._frequencies.to(device)
        if positions is not None:
            return cos_sin(positions, self._frequencies, dtype)
        key = (sequence, dtype, device)
        if self._kept is None or self._kept[0] != key:
            # A later step saves them for backward. An inference tensor cannot be saved.
            with torch.inference_mode(False):
                places = torch.arange(sequence, device=device, dtype=torch.float32)
                self._kept = key, cos_sin(places, self._frequencies, dtype)
        return self._kept[1]


def cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Angles:
    """Cosine and sine of the angle position x frequency, computed in fp32.

    Args:
        positions: (S,), the same for every row, or (B, S).
        frequencies: (K/2,), fp32.
        dtype: of the result.

    Returns:
        Two of (S, 1, K/2) or (B, S, 1, K/2), the same for all heads.
    """
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) of ``x`` (B, S, heads, K) by the angle of ``cos_sin``.

    Hugging Face's Llama weights pair the same dims.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention_mask(positions: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The mask that is added to the attention scores: 0 if a query attends to a key, else -inf.

    All blocks share it. With a boolean mask, each block would convert it and save its own copy for
    backward.

    Args:
        positions: (B, S), the position of each token in its document.
        dtype: of queries and keys.
        window: how many tokens a query attends to, including itself; None for all earlier ones.

    Returns:
        (B, 1, S, S), the same for all heads; dim 2 is the query's position, dim 3 the key's.
    """
    places = torch.arange(positions.shape[1], device=positions.device)
    first = places - (positions if window is None else positions.clamp(max=window - 1))
    seen = places >= first.unsqueeze(2)  # (B, S, S)
    return _additive(seen.tril_(), dtype).unsqueeze(1)


@lru_cache(maxsize=1)
def window_mask(sequence: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask (S, S) of a sliding window for rows of one document. It is cached for all blocks."""
    # A later step saves the mask for backward. An inference tensor cannot be saved.
    with torch.inference_mode(False):
        seen = torch.ones(sequence, sequence, dtype=torch.bool, device=device)
        return _additive(seen.tril_().triu_(1 - window), dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.full(seen.shape, float("-inf"), dtype=dtype, device=seen.device)
    return mask.masked_fill_(seen, 0.0)


class Attention(nn.Module):
    """Multi-head attention.

    ``parallelize`` replaces ``qkv`` and ``output`` by column- and row-parallel layers, and sets
    ``query_heads`` and ``key_value_heads`` to those of this rank. The forward pass does not change.
    """

    def __init__(
        self,
        config: ModelConfig,
        modules: Mapping[str, nn.Module],
        *,
        name: str,
        seed: int,
        compose: Compose = keeping,
    ) -> None:
        super().__init__()
        self.compose = compose
        self.query_heads = config.num_attention_heads
        self.key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        self.qkv = modules["attention.qkv"]
        self.query_norm = modules.get("attention.query_norm")
        self.key_norm = modules.get("attention.key_norm")
        self.output = modules["attention.output"]
        self.dropout = SampleDropout(
            config.attention_dropout, name=f"{name}.attention.dropout", seed=seed
        )
        self.is_rotary = config.positions == "rotary"

    def forward(
        self,
        x: Tensor,
        samples: Tensor | None,
        angles: Angles | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:
        """Map ``x`` (B, S, D) to (B, S, D).

        Args:
            x: normalised hidden states.
            samples: (B,) int64, the sample indices; None if there is no dropout.
            angles: of rotary positions; None if the model has other positions.
            mask: (S, S) or (B, 1, S, S), added to the scores; if omitted, each token attends to
                itself and all earlier tokens.
            cu_seqlens: where documents begin, if attention stays within each document without a
                mask (``documents.py``).
            longest: tokens of the longest document; S if omitted.
        """
        qkv = self.qkv(x)  # (B, S, (H + 2 H_kv) K)
        if self.dropout.active:
            attend = partial(self._attend_with_dropout, samples=samples, angles=angles, mask=mask)
            return self.compose(attend, self.output, qkv)
        attend = partial(self._attend, mask=mask, cu_seqlens=cu_seqlens, longest=longest)
        return self.output(self.compose(partial(self._heads, angles=angles), attend, qkv))

    def _heads(self, qkv: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, heads, S, K), normalised and rotated."""
        batch, sequence, _ = qkv.shape
        kv_width = self.key_value_heads * self.head_dim
        q, k, v = qkv.split([self.query_heads * self.head_dim, kv_width, kv_width], dim=-1)
        q = q.view(batch, sequence, self.query_heads, self.head_dim)
        k = k.view(batch, sequence, self.key_value_heads, self.head_dim)
        v = v.view(batch, sequence, self.key_value_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.is_rotary:
            assert angles is not None, "rotary positions need angles"
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        longest: int | None,
    ) -> Tensor:
        if cu_seqlens is not None:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return varlen_attention(q, k, v, cu_seqlens, longest, self.window)
        grouped = self.query_heads != self.key_value_heads
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return mixed.transpose(1, 2).flatten(2)  # (B, S, H K)

    def _attend_with_dropout(
        self,
        qkv: Tensor,
        samples: Tensor | None,
        angles: Angles | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Unfused attention with dropout. A fused kernel's dropout mask depends on the layout."""
        q, k, v = self._heads(qkv, angles)
        sequence = q.shape[2]
        # The rows of all query heads that share a key/value head: (B, H_kv, (H / H_kv) S, K).
        q = q.unflatten(1, (self.key_value_heads, -1)).flatten(2, 3)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        scores = scores.view(len(q), self.query_heads, sequence, sequence)
        if mask is None:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        else:
            scores = scores + mask
        scores = scores.softmax(dim=-1, dtype=torch.float32)  # frees the scores before dropout
        weights = self.dropout(scores.to(q.dtype), samples).view(*q.shape[:3], sequence)
        mixed = (weights @ v).view(len(q), self.query_heads, sequence, self.head_dim)
        return mixed.transpose(1, 2).flatten(2)  # (B, S, H K)
