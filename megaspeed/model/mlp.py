"""The two feed-forward networks: GELU (GPT-2) and SwiGLU (Shazeer 2020, "GLU variants")."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn


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
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate's F rows first, then up's."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.gate_up = modules["mlp.gate_up"]
        self.down = modules["mlp.down"]

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network to ``x`` (B, S, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, S, F)
        return self.down(F.silu(gate) * up)
