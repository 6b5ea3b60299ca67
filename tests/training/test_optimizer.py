"""AdamW decays only matrices and embeddings. Its fused form equals torch's plain AdamW."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megaspeed.config.deepspeed_keys import AdamConfig
from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import parameter_named
from megaspeed.training.rank_model import make_optimizer, parameter_groups
from tests.support.tiny import GPT2, LLAMA

OPTIMIZER = AdamConfig.model_validate(
    {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3},
    }
)


NAMES = ("blocks.0.mlp.down.weight", "blocks.0.mlp.down.bias")


def model(shape: dict[str, Any], *, tied: bool = True) -> ModelConfig:
    return ModelConfig.model_validate({**shape, "tie_word_embeddings": tied})


def built(config: ModelConfig) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        return dict(GPT(config).named_parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_exactly_the_matrices_and_embeddings_decay(shape: dict[str, Any], tied: bool) -> None:
    config = model(shape, tied=tied)
    parameters = built(config)
    matrices = {name for name, parameter in parameters.items() if parameter.dim() == 2}
    assert {name for name in parameters if parameter_named(config, name).decays} == matrices
    assert {"embedding.tokens.weight", "blocks.0.mlp.down.weight"} <= matrices
    assert ("head.output.weight" in matrices) is not tied


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_parameter_is_in_one_group(shape: dict[str, Any]) -> None:
    parameters = built(model(shape))
    decaying, others = parameter_groups(parameters, model(shape), OPTIMIZER)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    grouped = [id(p) for group in (decaying, others) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in parameters.values())


def test_a_group_that_would_be_empty_is_left_out() -> None:
    parameters = {NAMES[0]: nn.Parameter(torch.zeros(2, 2))}
    (group,) = parameter_groups(parameters, model(GPT2), OPTIMIZER)
    assert group["weight_decay"] == 0.3


def test_fused_adamw_is_plain_adamw() -> None:
    torch.manual_seed(0)
    values = dict(zip(NAMES, (torch.randn(33, 17), torch.randn(33)), strict=True))
    fused_parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    plain_parameters = copy.deepcopy(fused_parameters)
    fused = make_optimizer(parameter_groups(fused_parameters, model(GPT2), OPTIMIZER), OPTIMIZER)
    plain = torch.optim.AdamW(
        parameter_groups(plain_parameters, model(GPT2), OPTIMIZER),
        lr=1e-2,
        betas=(0.8, 0.95),
        eps=1e-6,
        fused=False,
        foreach=False,
    )
    for _ in range(20):
        for name, parameter in fused_parameters.items():
            parameter.grad = torch.randn_like(parameter)
            plain_parameters[name].grad = parameter.grad.clone()
        fused.step()
        plain.step()
    for name, parameter in fused_parameters.items():
        torch.testing.assert_close(parameter, plain_parameters[name], rtol=1e-6, atol=1e-6)
        assert not torch.equal(parameter, values[name])
