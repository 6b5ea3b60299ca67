"""Each preset has as many parameters as the published model of the same name."""

import pytest
import torch

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import active_parameters, parameters_in_words

# Counted in the published weights. A tied head counts once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "olmo2-1b": 1_484_916_736,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
}
# Parameters that a token uses. The published figures are 12.9, 3.3 and 1.3 billion.
ACTIVE = {
    "mixtral-8x7b": 12_879_925_248,
    "qwen3-30b-a3b": 3_353_032_704,
    "olmoe-1b-7b": 1_282_017_280,
}


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig.model_validate({"preset": preset}))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_token_uses_the_published_number_of_parameters(preset: str) -> None:
    config = ModelConfig.model_validate({"preset": preset})
    total, active = PUBLISHED[preset], active_parameters(config)
    assert active == ACTIVE.get(preset, total)
    if config.num_experts is None or config.num_experts_per_tok is None:
        assert parameters_in_words(config) == f"{total:,} parameters"
        return
    assert parameters_in_words(config) == f"{total:,} parameters ({active:,} active)"
    unused = config.num_experts - config.num_experts_per_tok
    expert = 3 * config.hidden_size * config.expert_width
    assert total - active == config.num_hidden_layers * unused * expert


@pytest.mark.parametrize(
    ("preset", "billions"), [("gpt-7.5b", 7.5), ("gpt3-175b", 175), ("mt-nlg-530b", 530)]
)
def test_a_shape_from_a_paper_has_as_many_parameters_as_the_papers_equation(
    preset: str, billions: float
) -> None:
    """Narayanan et al. 2021, equation 2, for l layers of size h, V words and s positions:

    P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)). The paper omits the last norm's 2 h.
    """
    config = ModelConfig.model_validate({"preset": preset})
    with torch.device("meta"):
        model = GPT(config)
    parameters = sum(p.numel() for p in model.parameters())
    layers, hidden = config.num_hidden_layers, config.hidden_size
    words, positions = config.vocab_size, config.max_position_embeddings
    equation = 12 * layers * hidden**2 + 13 * layers * hidden + (words + positions) * hidden
    assert parameters == equation + 2 * hidden
    assert parameters == pytest.approx(billions * 1e9, rel=0.005)
