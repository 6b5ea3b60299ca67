"""The three kinds of layer that a GPT is a list of: embedding, block, head.

Embedding   tokens (B, S)    -> hidden (B, S, D)
Block       hidden (B, S, D) -> hidden (B, S, D)
Head        hidden (B, S, D) -> logits (B, S, V)
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.attention import Attention
from megaspeed.model.dropout import SampleDropout
from megaspeed.model.parameters import Row, block_rows, embedding_rows, head_rows


def make_modules(rows: Mapping[str, Row]) -> dict[str, nn.Module]:
    """Name within the layer -> module, with weights as torch initialises them."""
    return {name: _make_module(row) for name, row in rows.items()}


def _make_module(row: Row) -> nn.Module:
    if row.columns is None:
        norm = nn.LayerNorm if row.kind == "layer_norm" else nn.RMSNorm
        return norm(row.rows, eps=row.eps)
    if row.kind == "embedding":
        return nn.Embedding(row.rows, row.columns)
    return nn.Linear(row.columns, row.rows, bias=row.bias)


class Embedding(nn.Module):
    """Token embedding, plus learned positions if the model has them."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        modules = make_modules(embedding_rows(config))
        self.tokens = modules["tokens"]
        self.positions = modules.get("positions")
        self.dropout = SampleDropout(config.embedding_dropout, name="embedding.dropout", seed=seed)

    def forward(
        self, tokens: Tensor, samples: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """Embeds ``tokens`` (B, S) at ``positions`` (B, S) or else 0 ... S - 1 as (B, S, D)."""
        x = self.tokens(tokens)
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.positions(positions)
        return self.dropout(x, samples)


class GeluMlp(nn.Module):
    """down(gelu(up(x))), GELU in its tanh approximation as in GPT-2; (B, S, D) -> (B, S, D)."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.up = modules["mlp.up"]
        self.down = modules["mlp.down"]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network to ``x`` (B, S, D)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate's F rows first, then up's.

    (Shazeer 2020, "GLU variants improve transformer").
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.gate_up = modules["mlp.gate_up"]
        self.down = modules["mlp.down"]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network to ``x`` (B, S, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, S, F)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, name: str, seed: int) -> None:
        super().__init__()
        modules = make_modules(block_rows(config))
        self.attention_norm = modules["attention_norm"]
        self.attention = Attention(config, modules, name=name, seed=seed)
        self.attention_dropout = SampleDropout(
            config.residual_dropout, name=f"{name}.attention_dropout", seed=seed
        )
        self.mlp_norm = modules["mlp_norm"]
        self.mlp = GeluMlp(modules) if config.mlp == "gelu" else SwiGluMlp(modules)
        self.mlp_dropout = SampleDropout(
            config.residual_dropout, name=f"{name}.mlp_dropout", seed=seed
        )

    def forward(
        self,
        x: Tensor,
        samples: Tensor | None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Maps ``x`` (B, S, D) to (B, S, D); for the rest see ``Attention``."""
        x = x + self.attention_dropout(
            self.attention(self.attention_norm(x), samples, positions, mask), samples
        )
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), samples)


class Head(nn.Module):
    """Final normalisation and the projection onto the vocabulary, without a bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        modules = make_modules(head_rows(config))
        self.norm = modules["norm"]
        self.output = modules["output"]

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``x`` (B, S, D) to logits (B, S, V)."""
        return self.output(self.norm(x))
