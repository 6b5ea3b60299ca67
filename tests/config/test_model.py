"""Presets have the published shapes, and omitted fields are computed from others."""

from typing import get_args

import pytest

from megaspeed.config.loading import parse_config
from megaspeed.config.model import PRESETS, ModelConfig, PresetName
from tests.config.small import problems, small


def parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the plain model, by a formula for each architecture."""
    d, f, v = model.hidden_size, model.intermediate_size, model.vocab_size
    kv = model.num_key_value_heads * model.head_dim
    head = 0 if model.tie_word_embeddings else v * d
    if model.architecture == "gpt2":
        attention = d * 3 * d + 3 * d + d * d + d
        feed_forward = d * f + f + f * d + d
        block = attention + feed_forward + 4 * d  # two LayerNorms
        positions, final_norm = model.max_position_embeddings * d, 2 * d
    else:
        block = 2 * d * d + 2 * d * kv + 3 * d * f + 2 * d  # two RMSNorms
        positions, final_norm = 0, d
    return v * d + positions + model.num_hidden_layers * block + final_norm + head


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, published: int) -> None:
    assert parameters(ModelConfig.model_validate({"preset": preset})) == published


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_run(preset: str) -> None:
    config = parse_config({**small(), "model": {"preset": preset}})
    assert config.model.preset == preset


def test_fields_beside_a_preset_override_it() -> None:
    model = ModelConfig.model_validate({"preset": "gpt2", "num_hidden_layers": 3})
    assert (model.num_hidden_layers, model.hidden_size) == (3, 768)


def test_gpt2_derives_omitted_keys() -> None:
    model = parse_config(small()).model
    assert model.num_key_value_heads == model.num_attention_heads == 12
    assert model.intermediate_size == 4 * 96
    assert model.tie_word_embeddings is True
    assert model.head_dim == 8


def test_llama_derives_omitted_keys() -> None:
    model = parse_config(small(model={"architecture": "llama", "intermediate_size": 128})).model
    assert model.num_key_value_heads == 12
    assert model.tie_word_embeddings is False


def test_null_counts_as_omitted() -> None:
    model = parse_config(small(model={"intermediate_size": None})).model
    assert model.intermediate_size == 384


def test_what_is_stated_is_not_derived() -> None:
    model = parse_config(small(model={"tie_word_embeddings": False, "intermediate_size": 96})).model
    assert (model.tie_word_embeddings, model.intermediate_size) == (False, 96)


def test_a_wrong_field_is_reported_once_and_not_again_for_fields_computed_from_it() -> None:
    assert problems(model={"num_attention_heads": "12", "hidden_size": 96.5}) == [
        "model.hidden_size: given 96.5 (a decimal number), wanted a whole number",
        'model.num_attention_heads: given "12" (a string), wanted a whole number',
    ]


def test_an_unknown_preset_is_one_problem() -> None:
    (problem,) = problems(
        model={"preset": "gpt3", "hidden_size": None, "num_hidden_layers": None}, world_size=1
    )
    assert problem.startswith('model.preset: given "gpt3" (a string), wanted "gpt2-nano"')
    assert '"llama-3-8b"' in problem


def test_preset_names_are_those_of_the_table() -> None:
    assert get_args(PresetName) == tuple(PRESETS)
