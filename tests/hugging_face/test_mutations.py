"""What can go wrong between two implementations does not pass the comparison, in either direction.

Each mutation is made where such a mistake would be made: in the table of names, in the model, in
the config. Weights are large, so that what is mutated matters; rounding is some 10^-6.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megaspeed.config import ModelConfig
from megaspeed.hugging_face import exporting, importing, matching
from megaspeed.hugging_face.errors import Disagreement
from megaspeed.hugging_face.exporting import export_model
from megaspeed.hugging_face.importing import import_model
from megaspeed.hugging_face.weights import Part, parts_of
from megaspeed.model import attention
from tests.hugging_face.models import gpt2, llama, saved

Patch = pytest.MonkeyPatch
QKV, GATE_UP, SQUARE = "attention.qkv.weight", "mlp.gate_up.weight", "attention.output.weight"


def exchanged(inner: str, *order: int) -> Callable[[ModelConfig], Iterator[Part]]:
    """The table with the rows of some of one tensor's parts given to others of them."""

    def mutated(model: ModelConfig) -> Iterator[Part]:
        parts = list(parts_of(model))
        for name in {part.ours for part in parts if part.ours.endswith(inner)}:
            places = [i for i, part in enumerate(parts) if part.ours == name]
            theirs = [parts[places[i]].theirs for i in order]
            for place, their_name in zip(places, theirs, strict=True):
                parts[place] = dataclasses.replace(parts[place], theirs=their_name)
        yield from parts

    return mutated


def turned(model: ModelConfig) -> Iterator[Part]:
    """The table with one square matrix taken as it is where it is transposed, or the other way."""
    for part in parts_of(model):
        is_square = part.ours == f"blocks.1.{SQUARE}"
        yield dataclasses.replace(part, transposed=part.transposed != is_square)


def mapped_by(table: Callable[[ModelConfig], Iterator[Part]]) -> Callable[[Patch], None]:
    """Imports and exports by another table."""

    def mutate(patch: Patch) -> None:
        for user in (matching, importing, exporting):
            patch.setattr(user, "parts_of", table)

    return mutate


def interleaved(patch: Patch) -> None:
    """Rotary positions turn neighbours, dims 2i and 2i + 1: the rows of Meta's own Llama files."""
    halves = attention.rotate

    def rotate(x: Tensor, *rest: Any) -> Tensor:
        apart = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        first, second = halves(apart, *rest).chunk(2, dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)

    patch.setattr(attention, "rotate", rotate)


def epsilon_beside_the_root(patch: Patch) -> None:
    """x / (sqrt(mean x^2) + eps), where RMSNorm has x / sqrt(mean x^2 + eps)."""

    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        assert self.eps is not None
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    patch.setattr(nn.RMSNorm, "forward", forward)


def another_epsilon(patch: Patch) -> None:
    """Twice the epsilon of the config."""
    make = nn.RMSNorm.__init__
    patch.setattr(nn.RMSNorm, "__init__", lambda self, *sizes, eps: make(self, *sizes, eps=2 * eps))


def another_base(patch: Patch) -> None:
    """A rotary base that differs by a tenth."""
    frequencies = attention.inverse_frequencies
    patch.setattr(
        attention,
        "inverse_frequencies",
        lambda config: frequencies(
            config.model_copy(update={"rope_theta": 1.1 * config.rope_theta})
        ),
    )


def exact_gelu(patch: Patch) -> None:
    """The GELU that is not GPT-2's."""
    gelu = torch.nn.functional.gelu
    patch.setattr(torch.nn.functional, "gelu", lambda x, approximate="none": gelu(x))


def ungrouped() -> PreTrainedModel:
    """q, k and v of one shape, so that no shape tells them apart."""
    return llama(num_key_value_heads=4)


Make = Callable[[], PreTrainedModel]
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
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], tuple[Path, Path]]:
    """Gives the folder of a model and its checkpoint, made once."""
    made: dict[Make, tuple[Path, Path]] = {}

    def of(make: Make) -> tuple[Path, Path]:
        if make not in made:
            root = tmp_path_factory.mktemp("model")
            made[make] = (saved(make(), root / "hf"), root / "checkpoint")
            import_model(*made[make])
        return made[make]

    return of


@pytest.mark.parametrize(("make", "mutate"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_an_import_with_a_mistake_is_noticed_and_leaves_nothing(
    folders: Callable[[Make], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: Patch,
    make: Make,
    mutate: Callable[[Patch], None],
) -> None:
    folder, _ = folders(make)
    mutate(monkeypatch)
    with pytest.raises(Disagreement, match="logits differ by"):
        import_model(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("make", "mutate"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_an_export_with_a_mistake_is_noticed_and_leaves_nothing(
    folders: Callable[[Make], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: Patch,
    make: Make,
    mutate: Callable[[Patch], None],
) -> None:
    _, checkpoint = folders(make)
    mutate(monkeypatch)
    with pytest.raises(Disagreement, match="logits differ by"):
        export_model(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
