"""A config.json gives the model that transformers reads in it, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config, model_section, read_model_section
from megaspeed.config.model import PRESETS, ModelConfig
from tests.config.small import load, only_problem, problems, small, write

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 301,
    "n_embd": 96,
    "n_layer": 4,
    "n_head": 12,
    "n_positions": 64,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}


def section(keys: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json without problems."""
    fields, found = model_section(keys)
    assert found == []
    return fields


def model(keys: dict[str, Any]) -> ModelConfig:
    """The model of a config.json without problems."""
    return ModelConfig.model_validate(section(keys))


def refused(keys: dict[str, Any]) -> str:
    """The only setting of a config.json that our model does not support."""
    (problem,) = model_section(keys)[1]
    return problem


STOCK = (GPT2Config(), LlamaConfig(), MistralConfig(), Qwen2Config(), Qwen3Config())


@pytest.mark.parametrize("stock", STOCK, ids=[stock.model_type for stock in STOCK])
def test_keys_that_a_file_omits_have_transformers_default(stock: Any) -> None:
    assert model({"model_type": stock.model_type}) == model(stock.to_dict())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back_as_it_was(preset: str) -> None:
    before = ModelConfig.model_validate({"preset": preset})
    assert model(hugging_face_config(before)) == before.model_copy(update={"preset": None})


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_reads_the_same_from_what_is_written(preset: str, tmp_path: Path) -> None:
    """Its own reading of the file, written out again, is the model that it was written for."""
    before = ModelConfig.model_validate({"preset": preset, "attention_dropout": 0.25})
    write(tmp_path / "config.json", hugging_face_config(before))
    stock = AutoConfig.from_pretrained(tmp_path)
    assert model(stock.to_dict()) == before.model_copy(update={"preset": None})


def test_scaled_rotary_positions_come_back_as_they_were(tmp_path: Path) -> None:
    before = model({**LLAMA, "rope_theta": 500.0, "rope_scaling": SCALED})
    assert before.rope_scaling is not None and before.rope_theta == 500.0
    keys = hugging_face_config(before)
    assert model(keys) == before
    write(tmp_path / "config.json", keys)
    stock = AutoConfig.from_pretrained(tmp_path)
    assert stock.rope_parameters == {**SCALED, "rope_theta": 500.0}


ROTARY = {
    "nothing": ({}, 10_000.0, None),
    "a base": ({"rope_theta": 500.0}, 500.0, None),
    "transformers 5": ({"rope_parameters": {**SCALED, "rope_theta": 500.0}}, 500.0, 32),
    "transformers 4": ({"rope_theta": 500.0, "rope_scaling": SCALED}, 500.0, 32),
    "a base in both": ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 500.0}}, 500.0, None),
    "null": ({"rope_theta": 500.0, "rope_scaling": None}, 500.0, None),
    "an older name of the type": ({"rope_scaling": {**LLAMA3, "type": "llama3"}}, 10_000.0, 64),
}


@pytest.mark.parametrize(("keys", "base", "original"), ROTARY.values(), ids=ROTARY.keys())
def test_rotary_positions_are_read_as_transformers_reads_them(
    keys: dict[str, Any], base: float, original: int | None
) -> None:
    found = model({**LLAMA, **keys})
    stock = LlamaConfig(**LLAMA, **json.loads(json.dumps(keys))).rope_parameters
    scaling = found.rope_scaling
    assert found.rope_theta == stock["rope_theta"] == base
    assert (scaling and scaling.original_max_position_embeddings) == original
    assert stock.get("original_max_position_embeddings") == original


def test_gpt2_keys_have_two_names() -> None:
    renamed = {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 4}
    assert section(renamed)["hidden_size"] == 96 and section(renamed)["num_hidden_layers"] == 4
    assert refused({**GPT2, "hidden_size": 64}) == (
        "n_embd and hidden_size are two names of one key, but they are 96 (a whole number) and 64 "
        "(a whole number)"
    )


def test_keys_that_transformers_own_models_do_not_read_are_ignored() -> None:
    extra = {"transformers_version": "4.0", "n_ctx": 9, "use_cache": True, "summary_type": "x"}
    assert section({**GPT2, **extra}) == section(GPT2)


def test_biases_and_a_head_size_are_read_and_written_back() -> None:
    found = model({**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16})
    assert (found.qkv_bias, found.attention_output_bias, found.mlp_bias) == (True, True, True)
    assert found.head_dim == 16
    assert model(hugging_face_config(found)) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "llama", "qk_norm": True, "intermediate_size": 96}, "model.qk_norm"),
        ({"architecture": "llama", "qkv_bias": True, "intermediate_size": 96}, "model.qkv_bias"),
        ({"num_key_value_heads": 4}, "model.num_key_value_heads is 4, but GPT2LMHeadModel of "),
        ({"norm": "rms_norm"}, "model.norm is rms_norm, but GPT2LMHeadModel of transformers has "),
        ({"sliding_window": 8}, "model.sliding_window is 8, but GPT2LMHeadModel of transformers "),
    ],
)
def test_features_that_the_family_lacks_cannot_be_exported(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        hugging_face_config(ModelConfig.model_validate({**small()["model"], **changes}))
    assert error.value.problems[0].startswith(message)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": (
        {"model_type": "bloom"},
        'model_type must be "gpt2" or "llama" or "mistral" or "qwen2"',
    ),
    "no kind": (
        {},
        'model_type must be "gpt2" or "llama" or "mistral" or "qwen2" or "qwen3", but it is '
        "missing",
    ),
    "exact gelu": (
        {**GPT2, "activation_function": "gelu"},
        'activation_function must be "gelu_new" or "gelu_pytorch_tanh", but it is "gelu"',
    ),
    "scaled by layer": (
        {**GPT2, "scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx must be false, but it is true (a boolean)",
    ),
    "reordered": (
        {**GPT2, "reorder_and_upcast_attn": True},
        "reorder_and_upcast_attn must be false, but",
    ),
    "unscaled": (
        {**GPT2, "scale_attn_weights": False},
        "scale_attn_weights must be true, but it is false",
    ),
    "cross attention": (
        {**GPT2, "add_cross_attention": True},
        "add_cross_attention must be false, but it is true",
    ),
    "activation": (
        {**LLAMA, "hidden_act": "gelu"},
        'hidden_act must be "silu" or "swish", but it is "gelu"',
    ),
    "a number for a boolean": (
        {**GPT2, "scale_attn_weights": 1},
        "scale_attn_weights must be true, but it is 1 (a whole number)",
    ),
    "window": ({**LLAMA, "sliding_window": 512}, "sliding_window must be null, but it is 512"),
    "sliced": ({**LLAMA, "pretraining_tp": 2}, "pretraining_tp must be 1 or null, but it is 2"),
    "quantised": (
        {**LLAMA, "quantization_config": {"bits": 4}},
        "quantization_config must be null, but",
    ),
    "own code": (
        {**LLAMA, "auto_map": {"AutoConfig": "x.Y"}},
        "auto_map must be null, but it is {",
    ),
    "rotary kind": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        'rope_type in rope_scaling must be "default" or "llama3", but it is "yarn"',
    ),
    "rotary numbers": (
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope_parameters of rope_type llama3 lacks low_freq_factor, high_freq_factor",
    ),
    "part of a head": (
        {**LLAMA, "partial_rotary_factor": 0.5},
        "partial_rotary_factor must be 1.0, but",
    ),
    "rotary by type of layer": (
        {**LLAMA, "model_type": "qwen3", "rope_parameters": {"full_attention": {"factor": 4.0}}},
        "rope_parameters must be the same for all layers, but it differs by type (full_attention)",
    ),
    "layers with a window": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
        'each of layer_types must be "full_attention", but they are ["full_attention", "sl',
    ),
    "rotary text": (
        {**LLAMA, "rope_scaling": "llama3"},
        'rope_scaling must be an object or null, but it is "llama3"',
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_settings_are_refused_with_value_and_alternatives(
    keys: dict[str, Any], message: str
) -> None:
    assert refused(keys).startswith(message)


def test_everything_is_reported_at_once() -> None:
    wrong = {
        "hidden_act": "relu",
        "pretraining_tp": 2,
        "sliding_window": 5,
        "rope_scaling": {"type": "x"},
    }
    assert len(model_section({**LLAMA, **wrong})[1]) == 4


def with_model(**section: Any) -> dict[str, Any]:
    """A run's values whose model section is this and nothing else."""
    return {**small(), "model": section}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """The folder of a GPT-2."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    write(folder / "config.json", GPT2)
    return folder


def test_it_fills_the_section_and_is_not_in_the_resolved_config(gpt2: Path, tmp_path: Path) -> None:
    run = load(write(tmp_path / "run.json", with_model(from_hf=str(gpt2))))
    found = run.config.model
    assert (found.hidden_size, found.vocab_size, found.embedding_dropout) == (96, 301, 0.1)
    (gpt2 / "config.json").unlink()
    again = load(write(tmp_path / "again.json", run.as_json()))
    assert again.config.model == found and "from_hf" not in run.as_json()["model"]


def test_fields_beside_it_override_it_and_what_follows_follows(gpt2: Path, tmp_path: Path) -> None:
    values = with_model(from_hf=str(gpt2 / "config.json"), hidden_size=48, num_attention_heads=6)
    found = load(write(tmp_path / "run.json", values)).config.model
    assert (found.hidden_size, found.intermediate_size, found.num_key_value_heads) == (48, 192, 6)
    assert found.num_hidden_layers == 4


def problem_of(**section: Any) -> str:
    """The only problem of a model section."""
    return only_problem(model={**dict.fromkeys(small()["model"]), **section})


def test_a_file_that_is_missing_or_damaged_is_one_problem(gpt2: Path, tmp_path: Path) -> None:
    assert problem_of(from_hf=str(tmp_path)).startswith(
        f"model.from_hf: {tmp_path}/config.json: there is no config.json; name a folder as "
    )
    (gpt2 / "config.json").write_text('{"model_type": "gpt2"')
    message = problem_of(from_hf=str(gpt2))
    assert "is not JSON: line 1" in message and message.endswith("fetch it again")
    assert problem_of(from_hf=3).startswith("model.from_hf: given 3 (a whole number), wanted")


def test_unsupported_settings_of_the_file_are_reported_with_every_other_problem(gpt2: Path) -> None:
    write(
        gpt2 / "config.json", {**GPT2, "activation_function": "relu", "scale_attn_weights": False}
    )
    model = {**dict.fromkeys(small()["model"]), "from_hf": str(gpt2)}
    message = problems(model=model, train_batch_size="16")
    assert [problem.partition(":")[0] for problem in message] == [
        "model.from_hf",
        "model.from_hf",
        "train_batch_size",
    ]


def test_a_wrong_value_names_the_file_it_is_from(gpt2: Path) -> None:
    write(gpt2 / "config.json", {**GPT2, "n_embd": "96"})
    message = problem_of(from_hf=str(gpt2))
    assert message.startswith('model.hidden_size: given "96" (a string), wanted a whole number')
    assert message.endswith(f"(from {gpt2}/config.json)")


@pytest.mark.parametrize(("key", "value"), [("preset", "gpt2"), ("architecture", "llama")])
def test_two_sources_of_every_field_contradict_each_other(gpt2: Path, key: str, value: str) -> None:
    message = problem_of(**{"from_hf": str(gpt2), key: value})
    assert f"model.{key} '{value}' contradicts it; omit one" in message


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_an_original_length_at_the_top_must_be_the_one_of_the_scaling(name: str) -> None:
    """transformers 5.23 documents that the one at the top counts, and takes the other."""
    key = "original_max_position_embeddings"
    inside = {"rope_type": "llama3", **LLAMA3}
    message = refused({**LLAMA, name: inside, key: 16})
    assert message.startswith(f"{key} at the top level must be omitted or equal to that in {name}")
    assert message.endswith(f"but it is 16 (a whole number), and in {name} it is missing")
    message = refused({**LLAMA, name: {**inside, key: 32}, key: 16})
    assert message.endswith(
        f"but it is 16 (a whole number), and in {name} it is 32 (a whole number)"
    )
    for above in (None, 32):
        scaling = model({**LLAMA, name: {**inside, key: 32}, key: above}).rope_scaling
        assert scaling is not None and scaling.original_max_position_embeddings == 32
    assert model({**LLAMA, key: 16}).rope_scaling is None


def test_the_home_of_an_unknown_user_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="it does not exist"):
        read_model_section("~no-such-user/model")
