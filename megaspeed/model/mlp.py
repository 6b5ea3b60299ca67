"""The two feed-forward networks: GELU (GPT-2) and SwiGLU (Shazeer 2020, "GLU variants")."""

import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.config import ModelConfig


class GeluMlp(nn.Module):
    """down(gelu(up(x))), GELU in its tanh approximation as in GPT-2; (B, S, D) -> (B, S, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=config.architecture == "gpt2"
        )
        self.down = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.architecture == "gpt2"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network to ``x`` (B, S, D)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate's F rows first, then up's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(
            config.hidden_size, 2 * config.intermediate_size, bias=config.architecture == "gpt2"
        )
        self.down = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.architecture == "gpt2"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network to ``x`` (B, S, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, S, F)
        return self.down(F.silu(gate) * up)
