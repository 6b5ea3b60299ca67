"""A config.json gives the same model as transformers reads from it, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from megaspeed.config.errors import ConfigError
from megaspeed.config.hugging_face import hugging_face_config, model_section, read_model_section
from megaspeed.config.model import PRESETS, Llama3Scaling, ModelConfig
from megaspeed.model.parameters import parameters_of
from tests.config.hugging_face_files import GPT2, LLAMA
from tests.config.small import load, only_problem, problems, small, write

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
EVERY_KEY_OF_YARN = {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7}
EVERY_KEY_OF_YARN |= {"mscale_all_dim": 1.5}


def section(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json. It must have no problem."""
    fields, found = model_section(keys)
    assert found == []
    return fields


def model(keys: dict[str, Any]) -> ModelConfig:
    """Return the model of a config.json. It must have no problem."""
    return ModelConfig.model_validate(section(keys))


STOCK = (
    GPT2Config(),
    GPTNeoXConfig(),
    GraniteConfig(),
    LlamaConfig(),
    MistralConfig(),
    MixtralConfig(),
    Olmo2Config(),
    OlmoeConfig(),
    Phi3Config(),
    Qwen2Config(),
    Qwen3Config(),
    Qwen3MoeConfig(),
    SmolLM3Config(),
    StableLmConfig(),
    Starcoder2Config(),
)


@pytest.mark.parametrize("stock", STOCK, ids=[stock.model_type for stock in STOCK])
def test_keys_that_a_file_omits_have_transformers_default(stock: Any) -> None:
    assert model({"model_type": stock.model_type}) == model(stock.to_dict())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back_as_it_was(preset: str) -> None:
    before = ModelConfig.model_validate({"preset": preset})
    assert model(hugging_face_config(before)) == before.model_copy(update={"preset": None})


@pytest.mark.parametrize("preset", PRESETS)
def test_transformers_reads_the_same_from_what_is_written(preset: str, tmp_path: Path) -> None:
    """transformers reads the file and writes it again. The result is the original model."""
    before = ModelConfig.model_validate({"preset": preset, "attention_dropout": 0.25})
    write(tmp_path / "config.json", hugging_face_config(before))
    stock = AutoConfig.from_pretrained(tmp_path)
    assert model(stock.to_dict()) == before.model_copy(update={"preset": None})


SCALINGS = {
    "llama3": (SCALED, SCALED),
    "linear": (LINEAR, LINEAR),
    "yarn": (YARN, {**YARN, **YARN_DEFAULTS}),
    "yarn with nulls": (
        {**YARN, "attention_factor": None, "mscale": None, "mscale_all_dim": None},
        {**YARN, **YARN_DEFAULTS},
    ),
    "yarn with every key": (EVERY_KEY_OF_YARN, EVERY_KEY_OF_YARN),
    "yarn with an attention factor": (
        {**YARN, "attention_factor": 1.25},
        {**YARN, **YARN_DEFAULTS, "attention_factor": 1.25},
    ),
    "yarn with a key that is not read": (
        {**YARN, "finetuned": True},
        {**YARN, **YARN_DEFAULTS},
    ),
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "starcoder2"])
@pytest.mark.parametrize(("stated", "written"), SCALINGS.values(), ids=SCALINGS.keys())
def test_scaled_rotary_positions_come_back_as_they_were(
    tmp_path: Path, stated: dict[str, Any], written: dict[str, Any], family: str
) -> None:
    keys = {**LLAMA, "model_type": family, "rope_theta": 500.0, "rope_scaling": stated}
    before = model(keys)
    assert before.rope_scaling is not None and before.rope_theta == 500.0
    keys = hugging_face_config(before)
    assert model(keys) == before and keys["rope_scaling"] == written
    write(tmp_path / "config.json", keys)
    stock = AutoConfig.from_pretrained(tmp_path)
    assert stock.rope_parameters == {**written, "rope_theta": 500.0}
    run = load(write(tmp_path / "run.json", with_model(from_hf=str(tmp_path))))
    again = load(write(tmp_path / "again.json", run.as_json()))
    assert again.config.model == run.config.model == before


def test_a_family_without_a_scaling_cannot_be_exported_with_it() -> None:
    phi3 = {"architecture": "phi3", "intermediate_size": 96, "rope_scaling": YARN}
    with pytest.raises(ConfigError) as error:
        hugging_face_config(ModelConfig.model_validate({**small()["model"], **phi3}))
    assert any(
        problem.startswith("model.rope_scaling is rope_type='yarn'")
        and "but Phi3ForCausalLM of transformers has None" in problem
        for problem in error.value.problems
    )


@pytest.mark.parametrize("key", ["truncate", "beta_fast"])
def test_a_null_in_place_of_a_default_of_yarn_is_refused(tmp_path: Path, key: str) -> None:
    """transformers takes a null of truncate for false, although its default is true."""
    write(tmp_path / "config.json", {**LLAMA, "rope_scaling": {**YARN, key: None}})
    message = only_problem(model={**dict.fromkeys(small()["model"]), "from_hf": str(tmp_path)})
    assert message.startswith(f"model.rope_scaling.{key}: given null, wanted ")


ROTARY = {
    "nothing": ({}, 10_000.0, None),
    "a base": ({"rope_theta": 500.0}, 500.0, None),
    "transformers 5": ({"rope_parameters": {**SCALED, "rope_theta": 500.0}}, 500.0, 32),
    "transformers 4": ({"rope_theta": 500.0, "rope_scaling": SCALED}, 500.0, 32),
    "a base in both": ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 500.0}}, 500.0, None),
    "null": ({"rope_theta": 500.0, "rope_scaling": None}, 500.0, None),
    "factors without a type": ({"rope_scaling": LLAMA3}, 10_000.0, None),
    "an older name of the type": ({"rope_scaling": {**LLAMA3, "type": "llama3"}}, 10_000.0, 64),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10_000.0, None),
    "linear with an original length": (
        {"rope_scaling": LINEAR, "original_max_position_embeddings": 16},
        10_000.0,
        None,
    ),
    "yarn without an original length": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        10_000.0,
        64,
    ),
    "yarn in transformers 5": ({"rope_parameters": {**YARN, "rope_theta": 500.0}}, 500.0, 16),
}


@pytest.mark.parametrize(("keys", "base", "original"), ROTARY.values(), ids=ROTARY.keys())
def test_rotary_positions_are_read_as_transformers_reads_them(
    keys: dict[str, Any], base: float, original: int | None
) -> None:
    found = model({**LLAMA, **keys})
    stock = LlamaConfig(**LLAMA, **json.loads(json.dumps(keys))).rope_parameters
    scaling = found.rope_scaling
    assert found.rope_theta == stock["rope_theta"] == base
    assert getattr(scaling, "original_max_position_embeddings", None) == original
    assert stock.get("original_max_position_embeddings") == original
    assert (scaling.rope_type if scaling else "default") == stock["rope_type"]


def test_gpt2_keys_have_two_names() -> None:
    renamed = {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 4}
    assert section(renamed)["hidden_size"] == 96 and section(renamed)["num_hidden_layers"] == 4


def test_a_number_that_only_python_writes_does_not_hide_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for kind in ("mamba2", "llama"):
        keys = {**LLAMA, "model_type": kind, "time_step_limit": [0.0, float("inf")]}
        file.write_text(json.dumps({**keys, "unused": float("nan"), "other": -float("inf")}))
        if kind == "llama":
            assert read_model_section(str(tmp_path)) == section(LLAMA)
            continue
        with pytest.raises(ConfigError) as error:
            read_model_section(str(tmp_path))
        (problem,) = error.value.problems
        assert problem.endswith('"mamba2" (a string)')
    write(file, {**LLAMA, "rms_norm_eps": float("nan"), "rope_theta": float("inf")})
    values = {**small(), "model": {"from_hf": str(tmp_path)}}
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path / "run.json", values))
    rope, norm = sorted(error.value.problems, reverse=True)
    assert rope.startswith("model.rope_theta: given Infinity (a decimal number), wanted a finite")
    assert norm.startswith("model.rms_norm_eps: given NaN (a decimal number), wanted a finite")


PHI3_MINI = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}
STARCODER2_3B = {
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}


def test_published_files_of_phi3_and_starcoder2_are_read_and_written_back() -> None:
    phi3, starcoder2 = model(PHI3_MINI), model(STARCODER2_3B)
    assert (phi3.mlp, phi3.norm, phi3.qkv_bias, phi3.sliding_window) == (
        "swiglu",
        "rms_norm",
        False,
        2047,
    )
    assert (starcoder2.mlp, starcoder2.norm, starcoder2.positions) == (
        "gelu",
        "layer_norm",
        "rotary",
    )
    assert starcoder2.qkv_bias and starcoder2.attention_output_bias and starcoder2.mlp_bias
    assert starcoder2.tie_word_embeddings and starcoder2.residual_dropout == 0.1
    for found in (phi3, starcoder2):
        assert model(hugging_face_config(found)) == found


PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
NEOX_20B = {
    **PYTHIA,
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "vocab_size": 50432,
}
STABLELM_3B = {
    "architectures": ["StableLmForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "stablelm",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qkv_bias": False,
    "vocab_size": 50304,
}
STABLELM_2 = {
    **STABLELM_3B,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "use_qkv_bias": True,
    "vocab_size": 100352,
}
GRANITE_2B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


MIXTRAL_8X22B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "model_type": "mixtral",
    "num_attention_heads": 48,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        (PYTHIA, 162_322_944),
        (NEOX_20B, 20_554_567_680),
        (STABLELM_3B, 2_795_443_200),
        (STABLELM_2, 1_644_515_328),
        (GRANITE_2B, 2_533_531_648),
        (SMOLLM3, 3_075_098_624),
        (MIXTRAL_8X22B, 140_620_634_112),
        (QWEN3_30B_A3B, 30_532_122_624),
        (OLMOE_1B_7B, 6_919_161_856),
    ],
)
def test_a_published_file_has_the_published_number_of_parameters(
    keys: dict[str, Any], parameters: int
) -> None:
    """They were counted in the published weights. A tied head counts once."""
    found = model(keys)
    assert sum(each.elements for each in parameters_of(found).values()) == parameters
    assert model(hugging_face_config(found)) == found


@pytest.mark.parametrize("keys", [MIXTRAL_8X22B, QWEN3_30B_A3B, OLMOE_1B_7B])
def test_the_number_of_experts_has_two_names(keys: dict[str, Any]) -> None:
    """Published files of Qwen3-MoE have num_experts, transformers 5.23 writes num_local_experts."""
    right = model(keys)
    stated = {key: value for key, value in keys.items() if not key.endswith("_experts")}
    for names in (["num_experts"], ["num_local_experts"], ["num_experts", "num_local_experts"]):
        assert model({**stated, **dict.fromkeys(names, right.num_experts)}) == right
        stock = AutoConfig.for_model(**{**stated, **dict.fromkeys(names, right.num_experts)})
        assert model(stock.to_dict()) == right


@pytest.mark.parametrize("keys", [MIXTRAL_8X22B, OLMOE_1B_7B])
def test_experts_have_the_width_that_the_file_states(keys: dict[str, Any]) -> None:
    found = model(keys)
    assert found.moe_intermediate_size == found.intermediate_size == keys["intermediate_size"]
    other = {**section(keys), "moe_intermediate_size": 64}
    with pytest.raises(ConfigError, match=r"model\.moe_intermediate_size is 64, but "):
        hugging_face_config(ModelConfig.model_validate(other))


def test_balance_is_neither_read_nor_written() -> None:
    """The auxiliary loss of transformers differs: it pools counts and scores of all blocks."""
    balanced = {"router_aux_loss_coef": 0.01, "router_bias_rate": 0.001}
    found = model(OLMOE_1B_7B)
    assert found.router_aux_loss_coef == 0.0
    written = hugging_face_config(found.model_copy(update=balanced))
    assert "router_aux_loss_coef" not in written and model(written) == found


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500.0},
        {"partial_rotary_factor": 1.0},
        {"rotary_emb_base": 500, "rotary_pct": 0.5, "rope_theta": 100.0},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rotary_pct": 1.0},
    ],
)
def test_keys_of_gpt_neoxs_rotation_count_as_in_transformers(keys: dict[str, Any]) -> None:
    """It has its own names for them, and ignores the names of other families."""
    stock = AutoConfig.for_model(**{**PYTHIA, **keys})
    assert model({**PYTHIA, **keys}) == model(stock.to_dict())


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
        (
            {"architecture": "stablelm", "head_dim": 12, "intermediate_size": 96},
            "model.head_dim is 12, but StableLmForCausalLM of transformers has ",
        ),
        ({"sliding_window": 8}, "model.sliding_window is 8, but GPT2LMHeadModel of transformers "),
    ],
)
def test_features_that_the_family_lacks_cannot_be_exported(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        hugging_face_config(ModelConfig.model_validate({**small()["model"], **changes}))
    assert error.value.problems[0].startswith(message)


def test_everything_is_reported_at_once() -> None:
    wrong = {
        "hidden_act": "relu",
        "pretraining_tp": 2,
        "sliding_window": 5,
        "rope_scaling": {"type": "x"},
    }
    assert len(model_section({**LLAMA, **wrong})[1]) == 4


def with_model(**section: Any) -> dict[str, Any]:
    """Return a run's values with exactly this model section."""
    return {**small(), "model": section}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """Return the folder of a GPT-2."""
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
    """Return the only problem of a model section."""
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
def test_an_original_length_at_the_top_may_be_the_one_of_the_scaling(name: str) -> None:
    """transformers 5.23 documents that the one at the top is used, but uses the other one."""
    key = "original_max_position_embeddings"
    for above in (None, 32):
        scaling = model({**LLAMA, name: SCALED, key: above}).rope_scaling
        assert isinstance(scaling, Llama3Scaling)
        assert scaling.original_max_position_embeddings == 32
    assert model({**LLAMA, key: 16}).rope_scaling is None


def test_the_home_of_an_unknown_user_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="it does not exist"):
        read_model_section("~no-such-user/model")
