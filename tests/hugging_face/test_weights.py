"""The table of names is transformers' own, for every preset."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.config.hugging_face import hugging_face_config
from megaspeed.config.model import PRESETS, ModelConfig
from megaspeed.hugging_face.weights import parts_of
from megaspeed.model.gpt import GPT
from tests.config.small import write
from tests.model.tiny_gpt import gpt2, llama


def stock_shapes(config: ModelConfig, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that transformers writes, built on the meta device."""
    write(folder / "config.json", hugging_face_config(config))
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return dict(
        tensor
        for name, parameter in stock.named_parameters()
        for tensor in as_stored(config.architecture, name, tuple(parameter.shape))
    )


def as_stored(
    family: str, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors in which a parameter is stored. Experts are one parameter, but each has its
    own tensors.
    """
    places = ("block_sparse_moe", "w1", "w3", "w2") if family == "mixtral" else ()
    place, gate, up, down = places or ("mlp", "gate_proj", "up_proj", "down_proj")
    before, is_expert, kind = name.partition(".mlp.experts.")
    if is_expert:
        experts, rows, columns = shape
        names = (gate, up) if kind == "gate_up_proj" else (down,)
        for expert in range(experts):
            for each in names:
                stored = f"{before}.{place}.experts.{expert}.{each}.weight"
                yield stored, (rows // len(names), columns)
    else:
        yield name.replace(".mlp.gate.", f".{place}.gate."), shape


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_transformers_names_shapes_and_number_of_parameters(
    preset: str, tmp_path: Path
) -> None:
    config = ModelConfig.model_validate({"preset": preset})
    theirs = stock_shapes(config, tmp_path)
    assert theirs == {part.theirs: part.shape for part in parts_of(config)}
    with torch.device("meta"):
        ours = sum(parameter.numel() for parameter in GPT(config).parameters())
    assert ours == sum(map(math.prod, theirs.values()))


@pytest.mark.parametrize(
    "config",
    [gpt2(tie_word_embeddings=False), llama(tie_word_embeddings=True), llama(vocab_size=7)],
    ids=["untied", "tied", "small"],
)
def test_every_other_shape_matches_too(config: ModelConfig, tmp_path: Path) -> None:
    parts = {part.theirs: part.shape for part in parts_of(config)}
    assert stock_shapes(config, tmp_path) == parts


@pytest.mark.parametrize("config", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_the_parts_of_a_tensor_are_all_its_rows_in_order(config: ModelConfig) -> None:
    rows: dict[str, list[int]] = defaultdict(list)
    for part in parts_of(config):
        rows[part.ours] += part.rows
    shapes = expected_shapes(config)
    assert rows == {name: list(range(shape[0])) for name, shape in shapes.items()}


def test_queries_keys_and_values_by_hand() -> None:
    """The model has 4 query heads on 2 key/value heads of 8 elements. gate and up have 48 rows."""
    parts = {part.theirs: part for part in parts_of(llama())}
    block = "model.layers.1"
    for name, rows in (
        ("self_attn.q_proj", range(0, 32)),
        ("self_attn.k_proj", range(32, 48)),
        ("self_attn.v_proj", range(48, 64)),
        ("mlp.gate_proj", range(0, 48)),
        ("mlp.up_proj", range(48, 96)),
    ):
        part = parts[f"{block}.{name}.weight"]
        assert (part.rows, part.transposed) == (rows, False)
    turned = next(part for part in parts_of(gpt2()) if part.theirs.endswith("0.mlp.c_fc.weight"))
    assert (turned.ours, turned.full_shape) == ("blocks.0.mlp.up.weight", (128, 32))
    assert (turned.shape, turned.transposed) == ((32, 128), True)
