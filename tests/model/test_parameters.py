"""The computed shapes equal those of the model that torch builds."""

import itertools
from typing import Any

import pytest
import torch

from megaspeed.config.model import PRESETS, ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import layer_count, parameters_of
from tests.support.tiny import GPT2, LLAMA


def built_shapes(config: ModelConfig, layers: range) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = GPT(config, chunks=[layers])
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def table_shapes(config: ModelConfig, layers: range) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, parameter.shape) for name, parameter in parameters_of(config, layers).items()]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_whole_model_has_these_shapes_in_this_order(preset: str) -> None:
    config = ModelConfig.model_validate({"preset": preset, "num_hidden_layers": 3})
    layers = range(layer_count(config))
    assert table_shapes(config, layers) == built_shapes(config, layers)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_contiguous_part_has_these_shapes(shape: dict[str, Any], tied: bool) -> None:
    config = ModelConfig.model_validate({**shape, "tie_word_embeddings": tied})
    for start, stop in itertools.combinations(range(layer_count(config) + 1), 2):
        layers = range(start, stop)
        assert table_shapes(config, layers) == built_shapes(config, layers)
