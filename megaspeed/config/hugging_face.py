"""Hugging Face's `config.json` in the terms of the `model` section, and back.

    config.json  --model_section-->  fields of `model`  --hugging_face_config-->  config.json

Two tables for each architecture: which of their keys is which of our fields, and which of their
keys must have which value because our model computes nothing else. What a file leaves out has
transformers' default (which differs from ours here and there). A key that is in neither table
changes nothing in transformers' GPT-2 and Llama, and is ignored here as well.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaspeed.config.model import ModelConfig
from megaspeed.config.rotary_keys import rotary_fields, rotary_keys, rotary_problems
from megaspeed.config.strict_json import describe_value

Keys = Mapping[str, Any]
"""What stands in a config.json."""


@dataclass(frozen=True)
class _Taken:
    """Their key, our field, and transformers' default; where that is None, we derive it as well."""

    theirs: str
    ours: str
    default: Any


@dataclass(frozen=True)
class _Fixed:
    """A key that must have one of some values; the first is transformers' default."""

    key: str
    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class _Architecture:
    """How transformers writes one architecture."""

    class_name: str
    taken: tuple[_Taken, ...]
    fixed: tuple[_Fixed, ...]
    other_names: Mapping[str, str]


_EVERYWHERE = (
    _Fixed("quantization_config", (None,)),
    _Fixed("auto_map", (None,)),
    _Fixed("is_encoder_decoder", (False,)),
    _Fixed("add_cross_attention", (False,)),
)

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "gpt2": _Architecture(
        "GPT2LMHeadModel",
        taken=(
            _Taken("vocab_size", "vocab_size", 50257),
            _Taken("n_embd", "hidden_size", 768),
            _Taken("n_layer", "num_hidden_layers", 12),
            _Taken("n_head", "num_attention_heads", 12),
            _Taken("n_inner", "intermediate_size", None),
            _Taken("n_positions", "max_position_embeddings", 1024),
            _Taken("tie_word_embeddings", "tie_word_embeddings", True),
            _Taken("embd_pdrop", "embedding_dropout", 0.1),
            _Taken("attn_pdrop", "attention_dropout", 0.1),
            _Taken("resid_pdrop", "residual_dropout", 0.1),
            _Taken("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
            _Taken("initializer_range", "initializer_range", 0.02),
        ),
        fixed=(
            *_EVERYWHERE,
            _Fixed("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
            _Fixed("scale_attn_weights", (True,)),
            _Fixed("scale_attn_by_inverse_layer_idx", (False,)),
            _Fixed("reorder_and_upcast_attn", (False,)),
        ),
        other_names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    "llama": _Architecture(
        "LlamaForCausalLM",
        taken=(
            _Taken("vocab_size", "vocab_size", 32000),
            _Taken("hidden_size", "hidden_size", 4096),
            _Taken("num_hidden_layers", "num_hidden_layers", 32),
            _Taken("num_attention_heads", "num_attention_heads", 32),
            _Taken("num_key_value_heads", "num_key_value_heads", None),
            _Taken("intermediate_size", "intermediate_size", 11008),
            _Taken("max_position_embeddings", "max_position_embeddings", 2048),
            _Taken("tie_word_embeddings", "tie_word_embeddings", False),
            _Taken("attention_dropout", "attention_dropout", None),
            _Taken("rms_norm_eps", "rms_norm_eps", 1e-6),
            _Taken("initializer_range", "initializer_range", 0.02),
        ),
        fixed=(
            *_EVERYWHERE,
            _Fixed("hidden_act", ("silu", "swish")),
            _Fixed("attention_bias", (False,)),
            _Fixed("mlp_bias", (False,)),
            _Fixed("pretraining_tp", (1, None)),
            _Fixed("sliding_window", (None,)),
            _Fixed("attention_chunk_size", (None,)),
        ),
        other_names={},
    ),
}


def model_section(keys: Keys) -> tuple[dict[str, Any], list[str]]:
    """The fields of `model` that a config.json states, and all that our model cannot express.

    Returns:
        The fields, none for what follows from others; and a sentence for each problem.
    """
    model_type = keys.get("model_type")
    architecture = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None or not isinstance(model_type, str):
        given = "missing" if model_type is None else describe_value(model_type)
        return {}, [f"model_type is {given}, and must be {_listed(_ARCHITECTURES)}"]
    keys, problems = _under_one_name(keys, architecture.other_names)
    fields: dict[str, Any] = {"architecture": model_type}
    for field in architecture.taken:
        value = keys.get(field.theirs, field.default)
        if value is not None or field.default is not None:
            fields[field.ours] = value
    problems += _fixed_problems(keys, architecture.fixed)
    if model_type == "llama":
        problems += [*_head_problems(keys, fields), *rotary_problems(keys)]
        fields |= {} if problems else rotary_fields(keys, fields["max_position_embeddings"])
    return fields, problems


def hugging_face_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, in keys that every transformers 4 and 5 reads; no token ids."""
    architecture = _ARCHITECTURES[model.architecture]
    return {
        "architectures": [architecture.class_name],
        "model_type": model.architecture,
        **{field.theirs: getattr(model, field.ours) for field in architecture.taken},
        **{
            fixed.key: fixed.allowed[0]
            for fixed in architecture.fixed
            if fixed.allowed[0] is not None and fixed not in _EVERYWHERE
        },
        **(rotary_keys(model) if model.architecture == "llama" else {}),
    }


def _under_one_name(keys: Keys, other_names: Mapping[str, str]) -> tuple[Keys, list[str]]:
    """transformers takes a GPT-2 key under a second name as well."""
    renamed, problems = dict(keys), []
    for other, name in other_names.items():
        if other in renamed and renamed.setdefault(name, renamed[other]) != renamed[other]:
            problems.append(
                f"{name} is {describe_value(renamed[name])} and {other}, another name of it, is "
                f"{describe_value(renamed[other])}"
            )
    return renamed, problems


def _fixed_problems(keys: Keys, fixed: tuple[_Fixed, ...]) -> Iterator[str]:
    for key, allowed in ((each.key, each.allowed) for each in fixed):
        value = keys.get(key, allowed[0])
        # True == 1, so that types are compared as well.
        if not any(value == one and type(value) is type(one) for one in allowed):
            yield f"{key} is {describe_value(value)}, and must be {_listed(allowed)}"


def _head_problems(keys: Keys, fields: Keys) -> Iterator[str]:
    stated = keys.get("head_dim")
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    are_counts = all(type(count) is int and count > 0 for count in (stated, hidden, heads))
    if are_counts and stated * heads != hidden:
        yield (
            f"head_dim is {stated}, and must be hidden_size {hidden} / num_attention_heads {heads} "
            f"= {hidden / heads:g}"
        )


def _listed(values: Iterable[Any]) -> str:
    """The values that are possible, as a file writes them."""
    return " or ".join(json.dumps(value) for value in values)
