"""Initial weights depend on seed, name and shape. Any part of the model has the same bits."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.initialization import initial_slice
from megaspeed.model.parameters import layer_count, logical_name
from tests.model.tiny_gpt import gpt2, initialized, llama

WIDTH = 512
SEVERAL_BLOCKS = torch.Size((5000, WIDTH))  # drawn in blocks of 2**20 elements: 2048 rows
NAME = "blocks.1.mlp.up.weight"


def whole(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int = 3) -> Tensor:
    return initial_slice(config, seed, name, torch.Size(shape))


@pytest.mark.parametrize(
    "rows",
    [
        [range(0, 5000)],
        [range(0, 1)],
        [range(4999, 5000)],
        [range(2048, 4096)],
        [range(2047, 2049)],
        [range(100, 4500)],
        [range(0, 700), range(2000, 2700), range(4300, 5000)],
        [range(4500, 5000), range(0, 500)],
        [range(10, 10)],
        [range(5000, 5000), range(2048, 2050)],
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [None, range(0, 1), range(128, 256), range(300, 300)], ids=str)
def test_a_part_has_the_bits_of_the_whole(rows: list[range], columns: range | None) -> None:
    full = whole(gpt2(), NAME, SEVERAL_BLOCKS)
    part = initial_slice(gpt2(), 3, NAME, SEVERAL_BLOCKS, rows=rows, columns=columns)
    chosen = full[[row for run in rows for row in run]]
    assert torch.equal(part, chosen if columns is None else chosen[:, list(columns)])


def test_a_row_longer_than_a_block_is_drawn_whole() -> None:
    shape = torch.Size((3, (1 << 20) + 5))
    full = whole(gpt2(), NAME, shape)
    part = initial_slice(gpt2(), 3, NAME, shape, rows=[range(1, 3)], columns=range(7, 1 << 20))
    assert torch.equal(part, full[1:3, 7 : 1 << 20])
    assert full.std(dim=1).min() > 0.019


class DrawnElements(TorchDispatchMode):
    """Records the size of every draw of normal numbers, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "normal" in str(function):
            self.sizes.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def test_a_part_draws_only_the_blocks_that_it_touches() -> None:
    with DrawnElements() as drawn:
        initial_slice(gpt2(), 3, NAME, SEVERAL_BLOCKS, rows=[range(2040, 2050)])
    assert drawn.sizes == [2048 * WIDTH, 2048 * WIDTH]
    with DrawnElements() as drawn:
        initial_slice(gpt2(), 3, NAME, SEVERAL_BLOCKS, rows=[range(4100, 4900)])
    assert drawn.sizes == [(5000 - 4096) * WIDTH]


@pytest.mark.parametrize(
    "config", [gpt2(), llama(), llama(tie_word_embeddings=True)], ids=["gpt2", "llama", "tied"]
)
def test_a_pipeline_stage_has_the_bits_of_the_whole_model(config: ModelConfig) -> None:
    model = dict(initialized(config).named_parameters())
    for first in range(layer_count(config)):
        chunk = range(first, min(first + 2, layer_count(config)))
        stage = initialized(config, chunks=[chunk])
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, model[logical_name(config, name)]), name


def deviation(config: ModelConfig, name: str, rows: int, width: int) -> float:
    return float(whole(config, name, (rows, width)).std())


def test_gpt2_has_its_published_standard_deviations() -> None:
    """openai/gpt-2, ``src/model.py``: 0.02, positions 0.01; the paper, section 2.3: 1/sqrt(N)."""
    config = ModelConfig.model_validate({"preset": "gpt2"})  # 12 blocks, so 24 residual layers
    published = {
        "embedding.tokens.weight": 0.02,
        "embedding.positions.weight": 0.01,
        "blocks.3.attention.qkv.weight": 0.02,
        "blocks.3.attention.output.weight": 0.02 / math.sqrt(24),
        "blocks.3.mlp.up.weight": 0.02,
        "blocks.3.mlp.down.weight": 0.02 / math.sqrt(24),
    }
    # The deviation of n numbers is off by sigma / sqrt(2 n): by 0.08 % for n = 786432.
    measured = {name: deviation(config, name, 1024, 768) for name in published}
    assert measured == pytest.approx(published, rel=5e-3)


def test_llama_scales_its_residual_projections_too() -> None:
    config = llama(num_hidden_layers=8, initializer_range=0.1)
    assert deviation(config, "blocks.0.mlp.gate_up.weight", 600, 600) == pytest.approx(
        0.1, rel=5e-3
    )
    assert deviation(config, "head.output.weight", 600, 600) == pytest.approx(0.1, rel=5e-3)
    for name in ("blocks.7.mlp.down.weight", "blocks.0.attention.output.weight"):
        assert deviation(config, name, 600, 600) == pytest.approx(0.1 / 4, rel=5e-3)


def test_the_mean_is_zero() -> None:
    assert abs(float(whole(gpt2(), NAME, (1024, 1024)).mean())) < 5 * 0.02 / 1024


@pytest.mark.parametrize("config", [gpt2(), llama()], ids=["gpt2", "llama"])
def test_biases_are_zero_and_norm_weights_are_one(config: ModelConfig) -> None:
    vectors = {n: p for n, p in initialized(config).named_parameters() if p.ndim == 1}
    assert len(vectors) == {"gpt2": 2 * 8 + 2, "llama": 2 * 2 + 1}[config.architecture]
    for name, vector in vectors.items():
        constant = torch.zeros_like if name.endswith("bias") else torch.ones_like
        assert torch.equal(vector, constant(vector)), name


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_names_seeds_and_blocks_are_independent_draws() -> None:
    shape = (4096, WIDTH)
    one = whole(gpt2(), NAME, shape)
    others = {
        "another name": whole(gpt2(), "blocks.0.mlp.up.weight", shape),
        "another seed": whole(gpt2(), NAME, shape, seed=4),
        "the blocks exchanged": one.roll(2048, dims=0),
    }
    assert torch.equal(one, whole(gpt2(), NAME, shape))
    for what, other in others.items():
        assert abs(correlation(one, other)) < 5 / math.sqrt(one.numel()), what


def test_no_two_parameters_of_a_model_start_alike() -> None:
    first_rows = [p[0] for p in initialized(gpt2()).parameters() if p.ndim == 2]
    starts = {tuple(row[:4].tolist()) for row in first_rows}
    assert len(starts) == len(first_rows) == 2 + 2 * 4


def test_a_model_on_the_meta_device_takes_no_memory_for_its_weights() -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig.model_validate({"preset": "llama-2-70b"}))
    assert {p.device.type for p in model.parameters()} == {"meta"}
