"""The comparison notices mistakes in the mapping or in the model, in both directions.

Each mutation is made where such a mistake would be made: in the table of names, in the model, in
the config. The comparison notices it if weights are large, if they are as transformers initializes
them, and if they are so small that it changes the logits by less than fp32 rounding.

Both directions use one comparison, so only the smallest weights are tried in both.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face import exporting, importing, weights
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.verifying import Disagreement
from megaspeed.hugging_face.weights import TensorPart, parts_of
from megaspeed.model import attention, gpt
from megaspeed.model.parameters import Row
from tests.hugging_face.models import (
    gpt2,
    gpt_neox,
    granite,
    llama,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen3_moe,
    saved,
    smollm3,
    starcoder2,
)

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
QKV, GATE_UP, SQUARE = "attention.qkv.weight", "mlp.gate_up.weight", "attention.output.weight"


def exchanged(inner: str, *order: int) -> Callable[[ModelConfig], Iterator[TensorPart]]:
    """Return the table in which parts of one tensor exchange their rows."""

    def mutated(model: ModelConfig) -> Iterator[TensorPart]:
        parts = list(parts_of(model))
        for name in {part.ours for part in parts if part.ours.endswith(inner)}:
            places = [i for i, part in enumerate(parts) if part.ours == name]
            theirs = [parts[places[i]].theirs for i in order]
            for place, their_name in zip(places, theirs, strict=True):
                parts[place] = dataclasses.replace(parts[place], theirs=their_name)
        yield from parts

    return mutated


def turned(model: ModelConfig) -> Iterator[TensorPart]:
    """Yield the table with one mistake: a square matrix is transposed, or is not transposed."""
    for part in parts_of(model):
        is_square = part.ours == f"blocks.1.{SQUARE}"
        yield dataclasses.replace(part, transposed=part.transposed != is_square)


def mapped_by(table: Callable[[ModelConfig], Iterator[TensorPart]]) -> Callable[[Patch], None]:
    """Let imports and exports use another table."""

    def mutate(patch: Patch) -> None:
        for user in (weights, importing, exporting):
            patch.setattr(user, "parts_of", table)

    return mutate


def interleaved(patch: Patch) -> None:
    """Rotate neighbouring dims 2i and 2i + 1, which is the order of rows in Meta's
    own Llama files.
    """
    halves = attention.rotate

    def rotate(x: Tensor, *rest: Any) -> Tensor:
        apart = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        first, second = halves(apart, *rest).chunk(2, dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)

    patch.setattr(attention, "rotate", rotate)


def epsilon_beside_the_root(patch: Patch) -> None:
    """Compute x / (sqrt(mean x^2) + eps), where RMSNorm has x / sqrt(mean x^2 + eps)."""

    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        assert self.eps is not None
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    patch.setattr(nn.RMSNorm, "forward", forward)


def another_epsilon(patch: Patch) -> None:
    """Use twice the epsilon of the config."""
    make = gpt.make_modules

    def mutated(rows: Mapping[str, Row]) -> dict[str, nn.Module]:
        return make({name: dataclasses.replace(row, eps=2 * row.eps) for name, row in rows.items()})

    patch.setattr(gpt, "make_modules", mutated)


def reordered(*order: int) -> Callable[[Patch], None]:
    """Take the thirds of the fused projection's output in another order."""

    def mutate(patch: Patch) -> None:
        make = attention.Attention.__init__

        def exchange(module: nn.Module, given: Any, made: Tensor) -> Tensor:
            thirds = made.chunk(3, dim=-1)
            return torch.cat([thirds[i] for i in order], dim=-1)

        def init(self: attention.Attention, *args: Any, **options: Any) -> None:
            make(self, *args, **options)
            self.qkv.register_forward_hook(exchange)

        patch.setattr(attention.Attention, "__init__", init)

    return mutate


def up_above_gate(patch: Patch) -> None:
    """Take the halves of the fused feed-forward projection in the other order."""

    def swiglu(gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    patch.setattr(gpt, "_swiglu", swiglu)


def another_base(patch: Patch) -> None:
    """Use a rotary base that differs by a tenth."""
    frequencies = attention.inverse_frequencies
    patch.setattr(
        attention,
        "inverse_frequencies",
        lambda config: frequencies(
            config.model_copy(update={"rope_theta": 1.1 * config.rope_theta})
        ),
    )


def exact_gelu(patch: Patch) -> None:
    """Use the exact GELU, unlike GPT-2 and StarCoder2."""
    mlp = gpt.GeluMlp
    patch.setattr(
        gpt, "GeluMlp", lambda modules, compose, approximate: mlp(modules, compose, "none")
    )


def with_field(name: str, value: Any) -> Callable[[Patch], None]:
    """Build each block as if a field of the model had this value."""

    def mutate(patch: Patch) -> None:
        make = gpt.Block.__init__

        def init(self: gpt.Block, config: ModelConfig, **options: Any) -> None:
            make(self, config.model_copy(update={name: value}), **options)

        patch.setattr(gpt.Block, "__init__", init)

    return mutate


def ungrouped(**changes: Any) -> PreTrainedModel:
    """Return a model whose q, k and v have one shape, so that their shapes do not
    distinguish them.
    """
    return llama(num_key_value_heads=4, **changes)


def ungrouped_phi3(**changes: Any) -> PreTrainedModel:
    """Return the same with q, k and v in one matrix."""
    return phi3(num_key_value_heads=4, **changes)


Make = Callable[..., PreTrainedModel]
WEIGHTS: dict[str, dict[str, Any]] = {
    "large": {},
    "of 0.02": {"random": False},
    "of 0.006": {"random": False, "initializer_range": 0.006},
}
MUTATIONS: dict[str, tuple[Make, Callable[[Patch], None]]] = {
    "rows of q and k for neighbouring pairs": (llama, interleaved),
    "k, q, v": (ungrouped, mapped_by(exchanged(QKV, 1, 0, 2))),
    "q, v, k": (llama, mapped_by(exchanged(QKV, 0, 2, 1))),
    "up above gate": (llama, mapped_by(exchanged(GATE_UP, 1, 0))),
    "epsilon beside the root": (llama, epsilon_beside_the_root),
    "another epsilon": (llama, another_epsilon),
    "another rotary base": (llama, another_base),
    "a matrix turned, llama": (llama, mapped_by(turned)),
    "a matrix not turned, gpt2": (gpt2, mapped_by(turned)),
    "k, q, v, gpt2": (gpt2, reordered(1, 0, 2)),
    "q, v, k, gpt2": (gpt2, reordered(0, 2, 1)),
    "another epsilon, gpt2": (gpt2, another_epsilon),
    "another gelu, gpt2": (gpt2, exact_gelu),
    "k, q, v, phi3": (ungrouped_phi3, reordered(1, 0, 2)),
    "up above gate, phi3": (phi3, up_above_gate),
    "q, v, k, starcoder2": (starcoder2, mapped_by(exchanged(QKV, 0, 2, 1))),
    "another gelu, starcoder2": (starcoder2, exact_gelu),
    "norms before, olmo2": (olmo2, with_field("norm_position", "before")),
    "k, q, v of each head, gpt_neox": (gpt_neox, reordered(1, 0, 2)),
    "sequential, gpt_neox": (gpt_neox, with_field("parallel_residual", False)),
    "another block without rotation, smollm3": (smollm3, with_field("no_rope_layer_interval", 3)),
    "no multiplier, granite": (granite, with_field("residual_multiplier", 1.0)),
    "usual scale of scores, granite": (granite, with_field("attention_multiplier", None)),
    "another rotary base, starcoder2": (starcoder2, another_base),
    "up above gate, mixtral": (mixtral, mapped_by(exchanged(GATE_UP, 1, 0, *range(2, 8)))),
    "two experts' gates exchanged, olmoe": (
        olmoe,
        mapped_by(exchanged(GATE_UP, 2, 1, 0, *range(3, 12))),
    ),
    "two experts' downs exchanged, qwen3_moe": (
        qwen3_moe,
        mapped_by(exchanged("mlp.down.weight", 0, 1, 2, 4, 3)),
    ),
    "scores not normalized, mixtral": (mixtral, with_field("norm_topk_prob", False)),
    "scores normalized, olmoe": (olmoe, with_field("norm_topk_prob", True)),
    "one expert too few for each token, olmoe": (olmoe, with_field("num_experts_per_tok", 1)),
}


Folders = Callable[[Make, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function from a model to its folder and its checkpoint, which are created once."""
    made: dict[tuple[Make, str], tuple[Path, Path]] = {}

    def of(make: Make, weights: str) -> tuple[Path, Path]:
        if (make, weights) not in made:
            root = tmp_path_factory.mktemp("model")
            folder = saved(make(**WEIGHTS[weights]), root / "hf")
            made[make, weights] = (folder, root / "checkpoint")
            import_model(folder, root / "checkpoint")
        return made[make, weights]

    return of


@pytest.mark.parametrize("weights", ["large", "of 0.006"])
@pytest.mark.parametrize(("make", "mutate"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_an_import_with_a_mistake_is_noticed_and_leaves_nothing(
    folders: Folders,
    tmp_path: Path,
    monkeypatch: Patch,
    make: Make,
    mutate: Callable[[Patch], None],
    weights: str,
) -> None:
    folder, _ = folders(make, weights)
    mutate(monkeypatch)
    with pytest.raises(Disagreement, match="logits differ by"):
        import_model(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weights", ["of 0.02", "of 0.006"])
@pytest.mark.parametrize(("make", "mutate"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_an_export_with_a_mistake_is_noticed_and_leaves_nothing(
    folders: Folders,
    tmp_path: Path,
    monkeypatch: Patch,
    make: Make,
    mutate: Callable[[Patch], None],
    weights: str,
) -> None:
    _, checkpoint = folders(make, weights)
    mutate(monkeypatch)
    with pytest.raises(Disagreement, match="logits differ by"):
        export_model(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
