"""The plain GPT gives the logits of Hugging Face's GPT-2 and Llama for the same weights."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from megaspeed.config.model import ModelConfig
from megaspeed.model.attention import RotaryAngles, inverse_frequencies
from megaspeed.model.gpt import GPT
from tests.model.tiny_gpt import gpt2, gradients, llama, random_tokens

Weights = dict[str, Tensor]

ROUNDING = 1e-5  # relative to the largest logit
PLAINLY_WRONG = 1e-2

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# With a rotary base of 100 and heads of 16 elements, there are wavelengths on both sides of 16 and
# of 64.
SCALED = {"hidden_size": 64, "rope_theta": 100.0, "rope_scaling": LLAMA3_SCALING}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# With these betas some pairs are kept, some are blended, and some are stretched in full.
YARN |= {"beta_fast": 4.0, "beta_slow": 1.0}
SCALINGS = {
    "llama3": LLAMA3_SCALING,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn with its defaults": {**YARN, "beta_fast": 32.0},
    "yarn without truncation": {**YARN, "truncate": False},
    "yarn with an attention factor": {**YARN, "attention_factor": 1.5},
    "yarn with DeepSeek's factors": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
    "yarn with an ineffective mscale": {**YARN, "mscale": 1.5},
    "yarn of a short context": {**YARN, "original_max_position_embeddings": 2},
    "yarn of factor 1": {**YARN, "factor": 1.0},
}


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
    """Return Llama's weights under our names: q, k, v below each other, and gate above up."""
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
    return ours


def largest_difference(config: ModelConfig, stock: PreTrainedModel, weights: Weights) -> float:
    """Return the largest difference between our logits and the stock model's, relative to the
    largest logit.
    """
    model = GPT(config).eval()
    model.load_state_dict(weights)
    tokens = random_tokens(config, batch=2, sequence=config.max_position_embeddings)
    with torch.no_grad():
        expected = stock(tokens).logits
        difference = model(tokens) - expected
    return float(difference.abs().max() / expected.abs().max())


GPT2_SHAPES = {"tied": gpt2(), "untied": gpt2(tie_word_embeddings=False)}
LLAMA_SHAPES = {
    "grouped": llama(),
    "ungrouped": llama(num_key_value_heads=4),
    "one key/value head": llama(num_key_value_heads=1),
    "tied": llama(tie_word_embeddings=True),
    "another rotary base and epsilon": llama(rope_theta=500.0, rms_norm_eps=1e-2),
    "scaled rotary": llama(**SCALED),
    "linearly scaled rotary": llama(**{**SCALED, "rope_scaling": SCALINGS["linear"]}),
    "rotary scaled by YaRN": llama(**{**SCALED, "rope_scaling": YARN}),
    "Qwen2 scaled by YaRN": llama(architecture="qwen2", **{**SCALED, "rope_scaling": YARN}),
}


@pytest.mark.parametrize("config", GPT2_SHAPES.values(), ids=GPT2_SHAPES.keys())
def test_gpt2_has_the_logits_of_transformers(config: ModelConfig) -> None:
    stock = stock_gpt2(config)
    assert largest_difference(config, stock, from_gpt2(stock)) < ROUNDING


@pytest.mark.parametrize("config", LLAMA_SHAPES.values(), ids=LLAMA_SHAPES.keys())
def test_llama_has_the_logits_of_transformers(config: ModelConfig) -> None:
    stock = stock_llama(config)
    assert largest_difference(config, stock, from_llama(stock)) < ROUNDING


@pytest.mark.parametrize("name", ["linearly scaled rotary", "Qwen2 scaled by YaRN"])
def test_scaled_rotary_positions_have_the_gradients_of_transformers(name: str) -> None:
    config = LLAMA_SHAPES[name]
    stock = stock_llama(config)
    model = GPT(config)
    model.load_state_dict(from_llama(stock))
    tokens = random_tokens(config, batch=2, sequence=config.max_position_embeddings)
    for each, logits in ((stock, stock(tokens).logits), (model, model(tokens))):
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        assert each.training == (each is model)
    with torch.no_grad():  # from_llama gives the gradients our names, too
        for parameter in stock.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    theirs = from_llama(stock)
    for parameter_name, ours in gradients(model).items():
        expected = theirs[parameter_name]
        assert (ours - expected).abs().max() < ROUNDING * expected.abs().max(), parameter_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_scaled_angles_are_those_of_transformers(
    scaling: dict[str, object], dtype: torch.dtype
) -> None:
    """Bit for bit, because the export is verified in fp64 and angles are computed in fp32."""
    config = llama(**{**SCALED, "rope_scaling": scaling})
    stock = stock_llama(config).model.rotary_emb
    assert torch.equal(inverse_frequencies(config), stock.inv_freq)
    cos, sin = RotaryAngles(config).of(None, 64, dtype, torch.device("cpu"))
    expected = stock(torch.zeros(1, dtype=dtype), torch.arange(64).unsqueeze(0))
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert torch.equal(ours.squeeze(1), theirs[0, :, :8])


def test_the_scalings_by_yarn_differ() -> None:
    """Otherwise the test above would not notice a key without effect."""
    found = [
        RotaryAngles(llama(**{**SCALED, "rope_scaling": scaling})).of(
            None, 64, torch.float32, torch.device("cpu")
        )[0]
        for name, scaling in SCALINGS.items()
        if "ineffective" not in name
    ]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(found, 2))


def test_scaled_frequencies_are_kept_blended_and_stretched() -> None:
    scaled = inverse_frequencies(llama(**SCALED))
    plain = inverse_frequencies(llama(**{**SCALED, "rope_scaling": None}))
    shrunk_by = plain / scaled
    wavelengths = 2 * torch.pi / plain
    short, long = wavelengths < 64 / 4, wavelengths > 64 / 1
    assert short.any() and long.any() and (~short & ~long).any()
    assert torch.equal(shrunk_by[short], torch.ones_like(shrunk_by[short]))
    torch.testing.assert_close(shrunk_by[long], torch.full_like(shrunk_by[long], 8.0))
    between = shrunk_by[~short & ~long]
    assert ((between > 1) & (between < 8)).all()


# --- the comparison notices a wrong model ---------------------------------------------------------


def swapped(weights: Weights, name: str, sizes: list[int], order: list[int]) -> Weights:
    """Return the weights with the sections of dim 0 in another order."""
    sections = weights[name].split(sizes)
    return {**weights, name: torch.cat([sections[i] for i in order])}


QKV = "blocks.1.attention.qkv.weight"
SQUARE = "blocks.1.attention.output.weight"
NORMS = ("blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight")

WRONG_GPT2: dict[str, Callable[[Weights], Weights]] = {
    "q, k and v in the order k, v, q": lambda w: swapped(w, QKV, [32, 32, 32], [1, 2, 0]),
    "k and v exchanged": lambda w: swapped(w, QKV, [32, 32, 32], [0, 2, 1]),
    "heads exchanged": lambda w: swapped(w, QKV, [8, 8, 80], [1, 0, 2]),
    "transposed matrix": lambda w: {**w, SQUARE: w[SQUARE].T},
    "norms exchanged": lambda w: {**w, NORMS[0]: w[NORMS[1]], NORMS[1]: w[NORMS[0]]},
    "bias forgotten": lambda w: {**w, "blocks.1.mlp.down.bias": torch.zeros(32)},
    "positions shifted": lambda w: {
        **w,
        "embedding.positions.weight": w["embedding.positions.weight"].roll(1, 0),
    },
}
WRONG_LLAMA: dict[str, Callable[[Weights], Weights]] = {
    "k and v exchanged": lambda w: swapped(w, QKV, [32, 16, 16], [0, 2, 1]),
    "key/value heads exchanged": lambda w: swapped(w, QKV, [32, 8, 8, 16], [0, 2, 1, 3]),
    "up above gate": lambda w: swapped(w, "blocks.0.mlp.gate_up.weight", [48, 48], [1, 0]),
    "transposed matrix": lambda w: {**w, SQUARE: w[SQUARE].T},
}
WRONG_SHAPE = {
    "rotary base": llama(rope_theta=9000.0),
    "rotary scaling": llama(rope_scaling=LLAMA3_SCALING),
    "attention factor": llama(rope_scaling={**YARN, "factor": 1.0, "attention_factor": 1.01}),
    "epsilon": llama(rms_norm_eps=1e-1),
}


@pytest.mark.parametrize("wrong", WRONG_GPT2.values(), ids=WRONG_GPT2.keys())
def test_a_wrong_mapping_of_gpt2_is_noticed(wrong: Callable[[Weights], Weights]) -> None:
    stock = stock_gpt2(gpt2())
    assert largest_difference(gpt2(), stock, wrong(from_gpt2(stock))) > PLAINLY_WRONG


@pytest.mark.parametrize("wrong", WRONG_LLAMA.values(), ids=WRONG_LLAMA.keys())
def test_a_wrong_mapping_of_llama_is_noticed(wrong: Callable[[Weights], Weights]) -> None:
    stock = stock_llama(llama())
    assert largest_difference(llama(), stock, wrong(from_llama(stock))) > PLAINLY_WRONG


@pytest.mark.parametrize("config", WRONG_SHAPE.values(), ids=WRONG_SHAPE.keys())
def test_a_wrong_constant_of_llama_is_noticed(config: ModelConfig) -> None:
    stock = stock_llama(llama())
    assert largest_difference(config, stock, from_llama(stock)) > 10 * ROUNDING


def test_the_exact_gelu_in_place_of_the_tanh_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = stock_gpt2(gpt2())
    exact = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: exact(x))
    assert largest_difference(gpt2(), stock, from_gpt2(stock)) > 10 * ROUNDING
