"""Causal self-attention with a fused query/key/value projection and grouped key/value heads.

    x (B, S, D) -> qkv (B, S, (H + 2 H_kv) K) -> softmax(q k^T / sqrt(K)) v -> output (B, S, D)

If the model has a norm of each head (Henry et al. 2020), it is applied to q and k first. If it has
rotary positions, q and k are rotated after that.

The rows of ``qkv.weight`` are all query heads, then all key heads, then all value heads, so that a
tensor split takes a contiguous run of heads from each of the three sections. With H_kv < H, H /
H_kv query heads share one key/value head (Ainslie et al. 2023, GQA).
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.documents import window_mask
from megaspeed.model.dropout import SampleDropout
from megaspeed.model.rotary import inverse_frequencies, rotate, turns


class Attention(nn.Module):
    """Multi-head attention; ``query_heads`` and ``key_value_heads`` are those of this rank.

    A tensor-parallel plan replaces ``qkv`` and ``output`` by column- and row-parallel layers and
    sets the two head counts to the local ones; the forward pass does not change.
    """

    def __init__(
        self, config: ModelConfig, modules: Mapping[str, nn.Module], *, name: str, seed: int
    ) -> None:
        super().__init__()
        self.query_heads = config.num_attention_heads
        self.key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv = modules["attention.qkv"]
        self.query_norm = modules.get("attention.query_norm")
        self.key_norm = modules.get("attention.key_norm")
        self.output = modules["attention.output"]
        self.window = config.sliding_window
        self.dropout = SampleDropout(
            config.attention_dropout, name=f"{name}.attention.dropout", seed=seed
        )
        # A plain attribute, not a buffer: a dtype cast of the module must not touch it.
        self.frequencies = inverse_frequencies(config) if config.positions == "rotary" else None

    def forward(
        self,
        x: Tensor,
        samples: Tensor | None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attends over ``x`` (B, S, D), returns (B, S, D).

        Args:
            x: normalised hidden states.
            samples: (B,) int64, the sample indices; None if nothing is dropped.
            positions: (B, S); 0 ... S - 1 in every row where left out.
            mask: (B, 1, S, S), added to the scores; if omitted, each token sees the tokens of the
                sliding window, or all that are not later.
        """
        qkv = self.qkv(x)  # (B, S, (H + 2 H_kv) K)
        batch, sequence, _ = qkv.shape
        kv_width = self.key_value_heads * self.head_dim
        q, k, v = qkv.split([self.query_heads * self.head_dim, kv_width, kv_width], dim=-1)
        q = q.view(batch, sequence, self.query_heads, self.head_dim)
        k = k.view(batch, sequence, self.key_value_heads, self.head_dim)
        v = v.view(batch, sequence, self.key_value_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.frequencies is not None:
            self.frequencies = self.frequencies.to(x.device)
            if positions is None:
                positions = torch.arange(sequence, device=x.device, dtype=torch.float32)
            cos, sin = turns(positions, self.frequencies, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, S, K)
        if mask is None and self.window is not None and self.window < sequence:
            mask = window_mask(sequence, self.window, q.dtype, q.device)
        if self.dropout.active:
            mixed = self._attend_with_dropout(q, k, v, samples, mask)
        else:
            grouped = self.query_heads != self.key_value_heads
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    def _attend_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, samples: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """The same attention written out: the fused kernel would draw its own mask, by layout."""
        group = self.query_heads // self.key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (B, H, S, S)
        if mask is None:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        else:
            scores = scores + mask
        scores = scores.softmax(dim=-1, dtype=torch.float32)  # frees the scores before dropout
        return self.dropout(scores.to(q.dtype), samples) @ v
