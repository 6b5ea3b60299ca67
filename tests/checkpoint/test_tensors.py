"""The tensors of a checkpoint, and the error if they are those of another model."""

from collections.abc import Iterable

import pytest

from megaspeed.checkpoint.tensors import expected_shapes, expected_tensors, mismatches
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Shape
from tests.model.tiny_gpt import gpt2, initialized, llama


def adamw(model: ModelConfig) -> dict[str, Shape]:
    return expected_tensors(model, "AdamW")


@pytest.mark.parametrize(
    "model",
    [gpt2(), gpt2(tie_word_embeddings=False), llama(), llama(tie_word_embeddings=True)],
    ids=["gpt2", "gpt2 untied", "llama", "llama tied"],
)
def test_every_parameter_of_the_model_is_there_once(model: ModelConfig) -> None:
    parameters = initialized(model).named_parameters()
    assert expected_shapes(model) == {name: tuple(values.shape) for name, values in parameters}
    assert ("head.output.weight" in expected_shapes(model)) != model.tie_word_embeddings


def kinds(tensors: Iterable[str], name: str) -> list[str]:
    """Return the kinds of tensors of one parameter."""
    split = (tensor.split(".", 1) for tensor in tensors)
    return [kind for kind, other in split if other == name]


def test_each_parameter_comes_with_the_state_of_its_optimizer() -> None:
    """Muon updates the matrices of blocks. An imported model has no state."""
    model, moments = gpt2(num_hidden_layers=1), ["weights", "exp_avg", "exp_avg_sq"]
    muon = expected_tensors(model, "Muon")
    matrices = [f"blocks.0.{n}.weight" for n in ("attention.qkv", "attention.output", "mlp.up")]
    for name in expected_shapes(model):
        is_matrix = name in (*matrices, "blocks.0.mlp.down.weight")
        assert kinds(muon, name) == (["weights", "momentum"] if is_matrix else moments)
        assert kinds(adamw(model), name) == kinds(expected_tensors(model, "Adam"), name) == moments
        assert kinds(expected_tensors(model, None), name) == ["weights"]
    assert adamw(gpt2())["exp_avg_sq.embedding.tokens.weight"] == (301, 32)
    assert muon["momentum.blocks.0.mlp.up.weight"] == (128, 32)


def test_the_same_model_matches() -> None:
    assert mismatches(adamw(gpt2()), adamw(gpt2())) == []
    assert mismatches(expected_shapes(llama()), expected_shapes(llama())) == []


def test_another_shape_is_reported_once_with_both() -> None:
    small, large = adamw(gpt2()), adamw(gpt2(vocab_size=512))
    assert mismatches(large, small) == [
        "weights.embedding.tokens.weight is 301 x 32 in the checkpoint, but 512 x 32 in the model"
    ]


def test_tied_and_untied_are_distinguished_both_ways() -> None:
    tied, untied = adamw(gpt2()), adamw(gpt2(tie_word_embeddings=False))
    assert mismatches(untied, tied) == [
        "weights.head.output.weight (301 x 32) is missing in the checkpoint"
    ]
    assert mismatches(tied, untied) == [
        "weights.head.output.weight (301 x 32) is in the checkpoint, but not in the model"
    ]


def test_one_moment_alone_is_reported_by_its_full_name() -> None:
    expected = adamw(gpt2())
    saved = {name: shape for name, shape in expected.items() if name != "exp_avg.head.norm.bias"}
    assert mismatches(expected, saved) == [
        "exp_avg.head.norm.bias (32) is missing in the checkpoint"
    ]


def test_a_momentum_is_reported_alone_and_not_beside_its_weight() -> None:
    expected = expected_tensors(gpt2(num_hidden_layers=4), "Muon")
    saved = expected_tensors(gpt2(), "Muon")
    assert not any("momentum" in problem for problem in mismatches(expected, saved))
    del saved["momentum.blocks.0.mlp.up.weight"]
    assert mismatches(expected_tensors(gpt2(), "Muon"), saved) == [
        "momentum.blocks.0.mlp.up.weight (128 x 32) is missing in the checkpoint"
    ]


def test_parameters_can_be_compared_without_kinds() -> None:
    assert mismatches({"a": (2,), "b": (3,)}, {"a": (2, 1), "c": (4, 4)}) == [
        "a is 2 x 1 in the checkpoint, but 2 in the model",
        "b (3) is missing in the checkpoint",
        "c (4 x 4) is in the checkpoint, but not in the model",
    ]


def test_after_ten_sentences_the_rest_is_counted() -> None:
    """Two more blocks have 24 parameters."""
    problems = mismatches(adamw(gpt2(num_hidden_layers=4)), adamw(gpt2()))
    assert len(problems) == 11
    assert problems[0] == "weights.blocks.2.attention_norm.weight (32) is missing in the checkpoint"
    assert problems[-1] == "and 14 more"
