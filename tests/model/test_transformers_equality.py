"""The plain GPT gives the logits of Hugging Face's models for the same weights."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.model.attention import RotaryAngles, inverse_frequencies
from megaspeed.model.gpt import GPT
from tests.model.stock_models import (
    Weights,
    from_gpt2,
    from_llama,
    stock_experts,
    stock_gpt2,
    stock_llama,
    stock_of,
)
from tests.model.tiny_gpt import NEAR_TIE, gpt2, gradients, llama, random_tokens, smallest_gap

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
_EIGHT: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 24}
EXPERTS = {
    "Mixtral": llama(architecture="mixtral", num_experts=8, num_experts_per_tok=2),
    "Mixtral, tied, with a window": llama(
        architecture="mixtral",
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        sliding_window=12,
    ),
    "Qwen3-MoE": llama(architecture="qwen3_moe", num_experts_per_tok=3, **_EIGHT),
    "Qwen3-MoE, normalized": llama(
        architecture="qwen3_moe", num_experts_per_tok=3, norm_topk_prob=True, **_EIGHT
    ),
    "OLMoE": llama(architecture="olmoe", num_experts=8, num_experts_per_tok=2),
    "OLMoE, every expert": llama(architecture="olmoe", num_experts=3, num_experts_per_tok=3),
    "OLMoE, one expert": llama(architecture="olmoe", num_experts=8, num_experts_per_tok=1),
}


@pytest.mark.parametrize("config", GPT2_SHAPES.values(), ids=GPT2_SHAPES.keys())
def test_gpt2_has_the_logits_of_transformers(config: ModelConfig) -> None:
    stock = stock_gpt2(config)
    assert largest_difference(config, stock, from_gpt2(stock)) < ROUNDING


@pytest.mark.parametrize("config", LLAMA_SHAPES.values(), ids=LLAMA_SHAPES.keys())
def test_llama_has_the_logits_of_transformers(config: ModelConfig) -> None:
    stock = stock_llama(config)
    assert largest_difference(config, stock, from_llama(stock)) < ROUNDING


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS.keys())
def test_experts_have_the_logits_of_transformers(config: ModelConfig) -> None:
    stock = stock_experts(config)
    model = GPT(config).eval()
    model.load_state_dict(from_llama(stock))
    tokens = random_tokens(config, batch=2, sequence=config.max_position_embeddings)
    assert smallest_gap(model, tokens) > NEAR_TIE
    assert largest_difference(config, stock, from_llama(stock)) < ROUNDING


WITH_GRADIENTS = [
    *(LLAMA_SHAPES[name] for name in ("linearly scaled rotary", "Qwen2 scaled by YaRN")),
    *EXPERTS.values(),
]


@pytest.mark.parametrize("config", WITH_GRADIENTS)
def test_gradients_are_those_of_transformers(config: ModelConfig) -> None:
    stock = stock_of(config)
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
WRONG_EXPERTS: dict[str, Callable[[Weights], Weights]] = {
    "up above gate": lambda w: swapped(w, "blocks.0.mlp.gate_up.weight", [48, 48, 672], [1, 0, 2]),
    "two experts exchanged": lambda w: swapped(
        w, "blocks.0.mlp.down.weight", [32, 32, 192], [1, 0, 2]
    ),
    "two scores exchanged": lambda w: swapped(
        w, "blocks.1.mlp.router.weight", [1, 1, 6], [1, 0, 2]
    ),
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


@pytest.mark.parametrize("wrong", WRONG_EXPERTS.values(), ids=WRONG_EXPERTS.keys())
def test_a_wrong_mapping_of_experts_is_noticed(wrong: Callable[[Weights], Weights]) -> None:
    stock, config = stock_experts(EXPERTS["Mixtral"]), EXPERTS["Mixtral"]
    assert largest_difference(config, stock, wrong(from_llama(stock))) > PLAINLY_WRONG


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"num_experts_per_tok": 3}], ids=str)
def test_a_wrong_use_of_the_scores_is_noticed(change: dict[str, Any]) -> None:
    stock = stock_experts(EXPERTS["Mixtral"])
    config = EXPERTS["Mixtral"].model_copy(update=change)
    assert largest_difference(config, stock, from_llama(stock)) > PLAINLY_WRONG


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
