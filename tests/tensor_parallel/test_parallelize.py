"""Applying shards: each rank gets the bits of its part of the initial weights, layer by layer."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model import initialization
from megaspeed.model import parameters as table
from megaspeed.model.gpt import GPT
from megaspeed.model.parameters import layer_count
from megaspeed.tensor_parallel.collectives import TensorAxis
from megaspeed.tensor_parallel.parallelize import (
    initial_shard,
    materialize,
    parallelize,
    shared_initial_shard,
)
from megaspeed.tensor_parallel.shards import ParameterShard
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.model.tiny_gpt import gpt2, initialized, llama
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

CONFIGS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(tie_word_embeddings=False),
    "llama": llama(),
    "llama tied": llama(tie_word_embeddings=True, num_key_value_heads=1),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def on_meta(
    config: ModelConfig, rank: int, size: int, layers: range | None = None
) -> tuple[GPT, dict[str, ParameterShard]]:
    with torch.device("meta"):
        model = GPT(config, chunks=None if layers is None else [layers])
    return model, parallelize(model, config, TensorAxis(None, rank, size))


def materialized(
    config: ModelConfig, rank: int, size: int, layers: range | None = None
) -> tuple[GPT, dict[str, ParameterShard]]:
    model, shards = on_meta(config, rank, size, layers)
    materialize(
        model,
        lambda name: initial_shard(config, 3, name, shards[name]),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return model, shards


def part_of(full: Tensor, shard: ParameterShard) -> Tensor:
    rows = full[[row for run in shard.rows for row in run]]
    return rows if shard.columns is None else rows[:, list(shard.columns)]


@pytest.mark.parametrize("size", [1, 2, 4])
@every_config
def test_a_rank_starts_with_the_bits_of_its_part_of_the_plain_model(
    config: ModelConfig, size: int
) -> None:
    plain = dict(initialized(config).named_parameters())
    for rank in range(size):
        model, shards = materialized(config, rank, size)
        parameters = dict(model.named_parameters())
        assert parameters.keys() == shards.keys() == plain.keys()
        for name, parameter in parameters.items():
            assert tuple(parameter.shape) == shards[name].local_shape, name
            rows = shards[name].logical_rows
            assert torch.equal(parameter[:rows], part_of(plain[name], shards[name])), name
            assert not parameter[rows:].any(), name


@every_config
def test_the_stage_with_the_head_starts_with_the_same_bits(config: ModelConfig) -> None:
    """If a tied head is on another pipeline stage than the embedding, it is a copy of the
    embedding.
    """
    plain = initialized(config)
    assert plain.head is not None
    stage, shards = materialized(config, 1, 2, range(2, layer_count(config)))
    assert stage.head is not None and stage.embedding is None
    shard = shards["head.output.weight"]
    expected = part_of(plain.head.get_parameter("output.weight"), shard)
    assert torch.equal(stage.head.get_parameter("output.weight")[: shard.logical_rows], expected)


@every_config
def test_a_tied_head_stays_tied(config: ModelConfig) -> None:
    model, _ = materialized(config, 0, 2)
    assert model.head is not None and model.embedding is not None
    one = model.head.output.weight is model.embedding.tokens.weight
    assert one == config.tie_word_embeddings


@every_config
def test_layers_are_made_one_after_the_other_and_each_value_once(config: ModelConfig) -> None:
    model, shards = on_meta(config, 1, 2)
    asked: list[str] = []
    on_meta_when_ready: list[int] = []

    def value_of(name: str) -> Tensor:
        asked.append(name)
        return initial_shard(config, 3, name, shards[name])

    def count(layer: nn.Module) -> None:
        assert not any(p.is_meta for p in layer.parameters())
        on_meta_when_ready.append(sum(p.is_meta for p in model.parameters()))

    materialize(
        model, value_of, device=torch.device("cpu"), dtype=torch.bfloat16, on_layer_ready=count
    )
    assert sorted(asked) == sorted(shards)
    assert len(on_meta_when_ready) == layer_count(config)
    strictly_falling = sorted(set(on_meta_when_ready), reverse=True)
    assert on_meta_when_ready == strictly_falling and strictly_falling[-1] == 0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@every_config
def test_an_axis_of_one_rank_is_the_plain_model_bit_for_bit(config: ModelConfig) -> None:
    """No collective is called, because there is no process group."""
    model, _ = materialized(config, 0, 1)
    tokens = torch.arange(24).view(2, 12)
    logits = model(tokens)[..., : config.vocab_size]
    assert torch.equal(logits, initialized(config)(tokens))


def test_a_module_without_a_row_in_the_table_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(gpt2())
        model.get_submodule("blocks.0.attention").gate = nn.Linear(32, 4, bias=False)
    with pytest.raises(LookupError, match=r"attention.gate.weight has no row in .*add one"):
        parallelize(model, gpt2(), TensorAxis(None, 0, 2))


def test_a_module_that_is_not_made_from_its_row_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(gpt2())
        model.get_submodule("blocks.0.mlp").up = nn.Linear(32, 96)
    with pytest.raises(ValueError, match=r"mlp.up.weight has the shape \(96, 32\), but its row"):
        parallelize(model, gpt2(), TensorAxis(None, 0, 2))


def test_a_linear_module_that_all_ranks_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sequence is split, its gradient would have to be summed, but nothing would sum it."""
    block_rows = table.block_rows

    def replicated(config: ModelConfig) -> dict[str, table.Row]:
        rows = block_rows(config)
        return {**rows, "mlp.up": dataclasses.replace(rows["mlp.up"], split="replicated")}

    monkeypatch.setattr(table, "block_rows", replicated)
    config = gpt2(vocab_size=302)  # its table is not cached
    with pytest.raises(ValueError, match=r"blocks.0.mlp.up .* states the split replicated"):
        on_meta(config, 0, 2)
    table._by_name.cache_clear()


def draw_together(launch: LaunchEnvironment, dtype: torch.dtype) -> dict[str, tuple[bool, float]]:
    """Return for each parameter: (sharing the draw keeps its bits, the share of
    blocks drawn here).
    """
    config = llama(
        hidden_size=1536,
        num_attention_heads=24,
        num_key_value_heads=24,
        num_hidden_layers=1,
        intermediate_size=2048,
        vocab_size=2801,
    )
    drawn: list[str] = []
    draw_block = initialization._draw_block

    def counted(seed: int, name: str, *block: Any) -> Tensor:
        drawn.append(name)
        return draw_block(seed, name, *block)

    found = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        ParallelContext.create(
            Grid(pp=1, dp=3, tp=1), launch, timeout_seconds=limit(30)
        ) as context,
    ):
        patch.setattr(initialization, "_draw_block", counted)
        group, device = context.data_group, context.device
        for tp_rank in range(2):
            for name, shard in on_meta(config, tp_rank, 2)[1].items():
                drawn.clear()
                alone = initial_shard(config, 3, name, shard).to(dtype)
                blocks = max(1, len(drawn))
                drawn.clear()
                shared = shared_initial_shard(
                    config, 3, name, shard, group=group, device=device, dtype=dtype
                )
                assert shared.untyped_storage().nbytes() == shared.nbytes
                found[f"{name}, {tp_rank}"] = torch.equal(alone, shared), len(drawn) / blocks
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_ranks_share_the_draw_of_a_shard_without_changing_a_bit(
    dtype: torch.dtype, pool: RankPool
) -> None:
    """Three ranks do not divide the rows of heads, sections, columns and a padded vocabulary."""
    for found in pool.run(3, draw_together, dtype):
        assert all(equal for equal, _ in found.values()), found
        shares = {name: share for name, (_, share) in found.items() if share > 0}
        assert len(shares) == 2 * 6 and max(shares.values()) <= 2 / 3, shares
