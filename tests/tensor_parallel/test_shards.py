"""Shards: the tensor ranks hold every logical element, and count each exactly once."""

from collections.abc import Iterator

import pytest
import torch

from megaspeed.config.model import ModelConfig
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.shards import (
    ParameterShard,
    optimizer_group,
    shard_of,
    vocabulary_rows_per_rank,
)
from tests.model.tiny_gpt import gpt2, llama
from tests.support.tiny import MOE

CONFIGS = {
    "gpt2": gpt2(num_attention_heads=8),
    "gpt2 untied": gpt2(num_attention_heads=8, tie_word_embeddings=False),
    "vocabulary of 5": gpt2(num_attention_heads=8, vocab_size=5),
    "llama kv 8": llama(num_attention_heads=8, num_key_value_heads=8, vocab_size=64),
    "llama kv 4": llama(num_attention_heads=8, num_key_value_heads=4),
    "llama kv 2 tied": llama(num_attention_heads=8, tie_word_embeddings=True),
    "llama kv 1": llama(num_attention_heads=8, num_key_value_heads=1),
}
every_layout = pytest.mark.parametrize("size", [1, 2, 4, 8])
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

Element = tuple[int, int]


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}


def shards(
    config: ModelConfig, name: str, shape: tuple[int, ...], size: int
) -> list[ParameterShard]:
    parts = [shard(config, name, rank, size) for rank in range(size)]
    assert {part.full_shape for part in parts} == {shape}
    return parts


def shard(config: ModelConfig, name: str, rank: int, size: int) -> ParameterShard:
    return shard_of(config, parameter_named(config, name), rank=rank, size=size)


def held_rows(shard: ParameterShard) -> list[int]:
    return [row for run in shard.rows for row in run]


def elements(shard: ParameterShard, rows: list[int]) -> Iterator[Element]:
    width = shard.full_shape[1] if len(shard.full_shape) == 2 else 1
    for row in rows:
        for column in shard.columns or range(width):
            yield row, column


@every_layout
@every_config
def test_every_element_is_held_and_owned_by_exactly_one_rank(
    config: ModelConfig, size: int
) -> None:
    for name, shape in shapes(config).items():
        everything = {(r, c) for r in range(shape[0]) for c in range((*shape, 1)[1])}
        held: list[Element] = []
        owned: list[Element] = []
        for shard in shards(config, name, shape, size):
            rows = held_rows(shard)
            assert len(set(rows)) == len(rows) == shard.logical_rows, name
            held += elements(shard, rows)
            owned += elements(shard, rows[: shard.owned_rows])
        assert set(held) == everything, name
        assert sorted(owned) == sorted(everything), name  # each once


@every_layout
@every_config
def test_all_ranks_have_the_same_local_shape(config: ModelConfig, size: int) -> None:
    for name, shape in shapes(config).items():
        parts = shards(config, name, shape, size)
        assert len({part.local_shape for part in parts}) == 1, name
        assert {part.full_shape for part in parts} == {shape}, name
        if size == 1 and parameter_named(config, name).split != "vocabulary":
            assert parts[0].local_shape == shape, name


@every_layout
@every_config
def test_only_the_vocabulary_is_padded(config: ModelConfig, size: int) -> None:
    for name, shape in shapes(config).items():
        padding = [part.padding_rows for part in shards(config, name, shape, size)]
        if name in ("embedding.tokens.weight", "head.output.weight"):
            rows = vocabulary_rows_per_rank(config.vocab_size, size)
            assert sum(padding) == size * rows - config.vocab_size
        else:
            assert padding == [0] * size, name


@pytest.mark.parametrize(
    ("vocab_size", "size", "rows"),
    [(5, 4, 8), (301, 1, 304), (301, 2, 152), (301, 4, 80), (50257, 8, 6288), (64, 8, 8)],
)
def test_a_vocabulary_shard_is_the_least_multiple_of_eight_that_is_enough(
    vocab_size: int, size: int, rows: int
) -> None:
    assert vocabulary_rows_per_rank(vocab_size, size) == rows
    assert rows % 8 == 0 and (rows - 8) * size < vocab_size <= rows * size


def test_five_tokens_on_four_ranks_stand_on_the_first() -> None:
    parts = shards(gpt2(vocab_size=5), "embedding.tokens.weight", (5, 32), 4)
    assert [held_rows(part) for part in parts] == [[0, 1, 2, 3, 4], [], [], []]
    assert [part.padding_rows for part in parts] == [3, 8, 8, 8]
    assert [part.owned_rows for part in parts] == [5, 0, 0, 0]


def test_a_rank_holds_its_heads_of_each_of_the_three_sections() -> None:
    """There are 4 query heads of 8 rows, then 2 key heads, then 2 value heads. The ranks are 3 of
    4, and 1 of 2.
    """
    config, name = llama(), "blocks.0.attention.qkv.weight"
    last = shard(config, name, 3, 4)
    assert last.rows == (range(24, 32), range(40, 48), range(56, 64))
    assert last.owned_rows == 8  # rank 2 has already counted key and value
    half = shard(config, name, 1, 2)
    assert half.rows == (range(16, 32), range(40, 48), range(56, 64))
    assert half.owned_rows == 32


def test_gate_and_up_are_cut_each_by_itself() -> None:
    half = shard(llama(), "blocks.1.mlp.gate_up.weight", 1, 4)
    assert half.rows == (range(12, 24), range(60, 72))


def test_a_row_parallel_layer_has_columns_and_its_whole_bias() -> None:
    weight = shard(gpt2(), "blocks.0.mlp.down.weight", 2, 4)
    assert (weight.rows, weight.columns) == ((range(32),), range(64, 96))
    biases = shards(gpt2(), "blocks.0.mlp.down.bias", (32,), 4)
    assert {bias.local_shape for bias in biases} == {(32,)}
    assert [bias.owned_rows for bias in biases] == [32, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blocks.0.mlp.router.weight", "partial and decaying"),
        ("blocks.0.mlp_norm.weight", "partial"),
        ("blocks.0.attention.qkv.weight", "decaying"),
        ("embedding.tokens.weight", "decaying"),
    ],
)
def test_optimizer_groups_of_experts_with_sequence_parallelism(name: str, group: str) -> None:
    config = ModelConfig.model_validate(MOE)
    found = optimizer_group(
        config,
        parameter_named(config, name),
        None,
        has_pipeline=False,
        has_muon=False,
        size=2,
        sequence_parallel=True,
    )
    assert found == group
