"""Each preset has as many parameters as the model that was published under its name."""

import pytest
import torch

from megaspeed.config import ModelConfig
from megaspeed.model import GPT

# Counted in the published weights, a tied head once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
}


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(preset=preset))
    assert sum(p.numel() for p in model.parameters()) == parameters
