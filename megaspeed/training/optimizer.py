"""AdamW over two groups: matrices and embeddings decay, biases and norms do not (law 4)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megaspeed.config.model import ModelConfig
from megaspeed.config.optimizer import OptimizerConfig
from megaspeed.model.parameters import parameter_named


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], model: ModelConfig, optimizer: OptimizerConfig
) -> list[dict[str, Any]]:
    """Groups for ``torch.optim``: those that decay, then those that do not; empty ones left out."""
    decaying = [p for name, p in parameters.items() if parameter_named(model, name).decays]
    others = [p for name, p in parameters.items() if not parameter_named(model, name).decays]
    groups = [
        {"params": decaying, "weight_decay": optimizer.params.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig
) -> torch.optim.Optimizer:
    """torch's AdamW in its fused form: one kernel a group, on CPU and GPU, nothing compiled."""
    params = optimizer.params
    return torch.optim.AdamW(groups, lr=params.lr, betas=params.betas, eps=params.eps, fused=True)
