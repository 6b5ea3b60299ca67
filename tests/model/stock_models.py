"""Hugging Face's models with random weights, and these weights under our names."""

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.model import ModelConfig

Weights = dict[str, Tensor]


def randomize(model: PreTrainedModel) -> None:
    """Set every weight, bias and norm to random values, so that a missing one is noticed."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)


def stock_gpt2(config: ModelConfig) -> PreTrainedModel:
    """Return Hugging Face's GPT-2 of this shape."""
    stock = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    randomize(stock)
    return stock.eval()


def stock_llama(config: ModelConfig) -> PreTrainedModel:
    """Return Hugging Face's Llama or Qwen2 of this shape."""
    scaling = {} if config.rope_scaling is None else config.rope_scaling.model_dump()
    is_qwen = config.architecture == "qwen2"
    model_class = Qwen2ForCausalLM if is_qwen else LlamaForCausalLM
    config_class = Qwen2Config if is_qwen else LlamaConfig
    stock = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **scaling},
        )
    )
    randomize(stock)
    return stock.eval()


def stock_experts(config: ModelConfig) -> PreTrainedModel:
    """Return Hugging Face's mixture of experts of this shape, with random weights."""
    ids = {"bos_token_id": None, "eos_token_id": None}
    stock_config = AutoConfig.for_model(**hugging_face_config(config), **ids)
    torch.manual_seed(6)  # with this seed, no two scores are nearly equal
    stock: PreTrainedModel = AutoModelForCausalLM.from_config(stock_config)
    randomize(stock)
    return stock.eval()


def stock_of(config: ModelConfig) -> PreTrainedModel:
    """Return Hugging Face's model of this shape, with random weights."""
    if config.num_experts is not None:
        return stock_experts(config)
    return stock_gpt2(config) if config.architecture == "gpt2" else stock_llama(config)


def from_gpt2(stock: PreTrainedModel) -> Weights:
    """Return GPT-2's weights under our names. Its Conv1D has (in, out), a Linear has (out, in)."""
    theirs = stock.state_dict()
    ours = {
        "embedding.tokens.weight": theirs["transformer.wte.weight"],
        "embedding.positions.weight": theirs["transformer.wpe.weight"],
        "head.norm.weight": theirs["transformer.ln_f.weight"],
        "head.norm.bias": theirs["transformer.ln_f.bias"],
        "head.output.weight": theirs["lm_head.weight"],
    }
    names = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for block in range(stock.config.n_layer):
        for name, their_name in names.items():
            weight = theirs[f"transformer.h.{block}.{their_name}.weight"]
            ours[f"blocks.{block}.{name}.weight"] = weight if weight.ndim == 1 else weight.T
            ours[f"blocks.{block}.{name}.bias"] = theirs[f"transformer.h.{block}.{their_name}.bias"]
    return ours


def from_llama(stock: PreTrainedModel) -> Weights:
    """Return the weights of Llama or of a mixture of experts under our names.

    q, k and v are stacked, gate above up, and each expert below the previous one.
    """
    theirs = stock.state_dict()
    ours = {
        "embedding.tokens.weight": theirs["model.embed_tokens.weight"],
        "head.norm.weight": theirs["model.norm.weight"],
        "head.output.weight": theirs["lm_head.weight"],
    }
    names = {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    for block in range(stock.config.num_hidden_layers):
        for name, their_names in names.items():
            for kind in ("weight", "bias"):
                parts = [f"model.layers.{block}.{their}.{kind}" for their in their_names]
                if parts[0] in theirs:
                    joined = torch.cat([theirs[part] for part in parts])
                    ours[f"blocks.{block}.{name}.{kind}"] = joined
        experts = {
            "mlp.router": "mlp.gate.weight",
            "mlp.gate_up": "mlp.experts.gate_up_proj",
            "mlp.down": "mlp.experts.down_proj",
            "attention.query_norm": "self_attn.q_norm.weight",
            "attention.key_norm": "self_attn.k_norm.weight",
        }
        for name, their in experts.items():
            weight = theirs.get(f"model.layers.{block}.{their}")
            if weight is not None:
                stacked = weight.flatten(0, 1) if weight.ndim == 3 else weight
                ours[f"blocks.{block}.{name}.weight"] = stacked
    return ours
