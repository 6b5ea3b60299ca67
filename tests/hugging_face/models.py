"""Tiny models of transformers. Most have weights so large that each of them affects the result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

END_OF_TEXT = "<|endoftext|>"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}


def gpt2(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """Return two blocks of 4 heads, width 32, 301 words, 96 positions.

    Args:
        random: whether weights are large; otherwise transformers initializes them.
        changes: keys of its config.
    """
    shape = {"vocab_size": 301, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
    no_ids = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**shape, **no_ids, **changes})).eval()
    return randomized(model) if random else model


def llama(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """Return two blocks of 4 query heads on 2 key/value heads, width 32, 301 words, 96 positions.

    Args:
        random: whether weights are large; otherwise transformers initializes them.
        changes: keys of its config.
    """
    return _like_llama(LlamaForCausalLM, LlamaConfig, random, changes)


def mistral(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with a window of 12 tokens."""
    return _like_llama(MistralForCausalLM, MistralConfig, random, {"sliding_window": 12, **changes})


def qwen2(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with biases of queries, keys and values."""
    return _like_llama(Qwen2ForCausalLM, Qwen2Config, random, changes)


def qwen3(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with norms of queries and keys, and heads of 16 elements instead of 8."""
    return _like_llama(Qwen3ForCausalLM, Qwen3Config, random, {"head_dim": 16, **changes})


def phi3(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with fused matrices of q, k and v and of gate and up."""
    return _like_llama(Phi3ForCausalLM, Phi3Config, random, {"pad_token_id": None, **changes})


def starcoder2(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with the norms, the biases and the feed-forward layer of GPT-2, tied."""
    return _like_llama(Starcoder2ForCausalLM, Starcoder2Config, random, changes)


def olmo2(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with norms after attention and feed-forward layer, and over all heads."""
    return _like_llama(Olmo2ForCausalLM, Olmo2Config, random, {"pad_token_id": None, **changes})


def smollm3(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with three blocks, of which the second has no rotation."""
    shape = {"pad_token_id": None, "num_hidden_layers": 3, "no_rope_layer_interval": 2}
    return _like_llama(SmolLM3ForCausalLM, SmolLM3Config, random, {**shape, **changes})


def granite(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with multipliers."""
    multipliers = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    }
    return _like_llama(GraniteForCausalLM, GraniteConfig, random, {**multipliers, **changes})


def stablelm(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with layer norms, and half of each head rotated."""
    rotation = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}}
    return _like_llama(StableLmForCausalLM, StableLmConfig, random, {**rotation, **changes})


def gpt_neox(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """Two parallel blocks of 4 heads, half of which is rotated, with biases."""
    rotation = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}}
    return _like_llama(GPTNeoXForCausalLM, GPTNeoXConfig, random, {**rotation, **changes})


def mixtral(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with 4 experts, of which a token uses 2."""
    return _like_llama(MixtralForCausalLM, MixtralConfig, random, {"num_experts": 4, **changes})


def qwen3_moe(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with 5 experts of width 24, of which a token uses 3, and with qwen3's norms."""
    shape = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return _like_llama(Qwen3MoeForCausalLM, Qwen3MoeConfig, random, {**shape, **changes})


def olmoe(*, random: bool = True, **changes: Any) -> PreTrainedModel:
    """The same with 6 experts, of which a token uses 2, and norms over all heads."""
    shape = {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}
    return _like_llama(OlmoeForCausalLM, OlmoeConfig, random, {**shape, **changes})


def _like_llama(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    random: bool,
    changes: dict[str, Any],
) -> PreTrainedModel:
    shape = {
        "vocab_size": 301,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
    }
    no_ids = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = model_class(config_class(**{**shape, **no_ids, **changes})).eval()
    return randomized(model) if random else model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2 tied": gpt2,
    "gpt2 untied, narrow": lambda: gpt2(tie_word_embeddings=False, n_inner=48),
    "llama grouped, untied": llama,
    "llama grouped, tied": lambda: llama(tie_word_embeddings=True),
    "llama ungrouped": lambda: llama(num_key_value_heads=4),
    "llama scaled": lambda: llama(rope_parameters={**LLAMA3, "rope_theta": 500.0}),
    "llama scaled linearly": lambda: llama(
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
    ),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=10),
    "gpt_neox": gpt_neox,
    "gpt_neox sequential, tied, without biases": lambda: gpt_neox(
        use_parallel_residual=False,
        tie_word_embeddings=True,
        attention_bias=False,
        hidden_act="gelu_fast",
    ),
    "granite": granite,
    "granite with the usual scale of scores, tied": lambda: granite(
        attention_multiplier=8**-0.5, tie_word_embeddings=True
    ),
    "mistral": mistral,
    "mistral without a window": lambda: mistral(sliding_window=None, head_dim=12),
    "mixtral": mixtral,
    "mixtral with a window, tied": lambda: mixtral(sliding_window=12, tie_word_embeddings=True),
    "olmo2": olmo2,
    "olmo2 tied, with biases": lambda: olmo2(tie_word_embeddings=True, attention_bias=True),
    "olmoe": olmoe,
    "olmoe normalized, with biases": lambda: olmoe(norm_topk_prob=True, attention_bias=True),
    "phi3": phi3,
    "phi3 with a window, tied": lambda: phi3(
        sliding_window=12, tie_word_embeddings=True, num_key_value_heads=4
    ),
    "qwen2": qwen2,
    "qwen2 scaled by YaRN": lambda: qwen2(rope_parameters={**YARN, "rope_theta": 500.0}),
    "qwen2 tied": lambda: qwen2(tie_word_embeddings=True),
    "qwen3": qwen3,
    "qwen3 with biases": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe normalized, with a head size": lambda: qwen3_moe(norm_topk_prob=True, head_dim=16),
    "smollm3": smollm3,
    "smollm3 rotated, untied": lambda: smollm3(
        no_rope_layers=[1, 1, 1], no_rope_layer_interval=0, tie_word_embeddings=False
    ),
    "stablelm": stablelm,
    "stablelm with biases, tied": lambda: stablelm(use_qkv_bias=True, tie_word_embeddings=True),
    "starcoder2": starcoder2,
    "starcoder2 with a window, without biases": lambda: starcoder2(
        sliding_window=12, use_bias=False, tie_word_embeddings=False, norm_epsilon=1e-3
    ),
}


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Add a random value to every weight, bias and norm of the model. Return the model."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Write the model to a folder. Return the folder."""
    model.save_pretrained(folder, **options)
    return folder


def with_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of at most 270 entries to a model's folder. Return the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["to be or not to be"] * 9, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    fast.save_pretrained(folder)
    return folder


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return every tensor in the safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
