"""Flat ranges of tensor shards become boxes, which are drawn by hand and joined again."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from megaspeed.checkpoint.tensors import Box, boxes_of
from megaspeed.config.loading import parse_config
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import parameters_of
from megaspeed.tensor_parallel.shards import ParameterShard, shard_of
from tests.support.tiny import GPT2, LLAMA

MANY = 10**9


def test_a_flat_range_of_a_matrix_is_three_boxes() -> None:
    """See the drawing in the module's docstring."""
    whole = ParameterShard(full_shape=(4, 4), rows=(range(4),), owned_rows=4)
    assert list(boxes_of(whole, 2, 14, largest=MANY)) == [
        (Box((0, 2), (1, 2)), 2),
        (Box((1, 0), (2, 4)), 4),
        (Box((3, 0), (1, 2)), 12),
    ]


def test_rows_and_columns_are_shifted_to_their_place() -> None:
    """Rows 2-3 and 6-7 of 8, columns 5-7 of 10: two sections, as of query and key heads."""
    shard = ParameterShard(
        full_shape=(8, 10), rows=(range(2, 4), range(6, 8)), columns=range(5, 8), owned_rows=4
    )
    assert list(boxes_of(shard, 0, 12, largest=MANY)) == [
        (Box((2, 5), (2, 3)), 0),
        (Box((6, 5), (2, 3)), 6),
    ]


def test_padding_rows_are_in_no_box() -> None:
    shard = ParameterShard(full_shape=(5, 2), rows=(range(3, 5),), padding_rows=6, owned_rows=2)
    assert list(boxes_of(shard, 0, 16, largest=MANY)) == [(Box((3, 0), (2, 2)), 0)]
    assert list(boxes_of(shard, 4, 16, largest=MANY)) == []


def test_a_vector_is_one_box_and_long_ones_are_cut() -> None:
    shard = ParameterShard(full_shape=(9,), rows=(range(2, 9),), owned_rows=7)
    assert list(boxes_of(shard, 1, 7, largest=4)) == [
        (Box((3,), (4,)), 1),
        (Box((7,), (2,)), 5),
    ]


def test_only_a_long_row_is_larger_than_the_largest_box() -> None:
    shard = ParameterShard(full_shape=(7, 6), rows=(range(7),), owned_rows=7)
    sizes = [box.sizes for box, _ in boxes_of(shard, 0, 42, largest=13)]
    assert sizes == [(2, 6), (2, 6), (2, 6), (1, 6)]
    assert {box.sizes for box, _ in boxes_of(shard, 0, 42, largest=2)} == {(1, 6)}


def model(values: dict[str, object]) -> ModelConfig:
    return parse_config(
        {
            "model": values,
            "data": {"sequence_length": 16},
            "training": {"steps": 1},
            "train_batch_size": 1,
        }
    ).model


@pytest.mark.parametrize("architecture", [GPT2, {**LLAMA, "num_key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fragments_of_all_ranks_put_together_are_the_logical_tensor(
    architecture: dict[str, object], tp: int
) -> None:
    """This tests every parameter of both architectures. Each shard is cut at random, as ZeRO may
    cut it.
    """
    config = model(architecture)
    for name, parameter in parameters_of(config).items():
        logical = torch.randn(parameter.shape)
        rebuilt = torch.full(parameter.shape, torch.nan)
        for rank in range(tp):
            shard = shard_of(config, parameter, rank=rank, size=tp)
            for start, fragment in cut(local_tensor(logical, shard).flatten(), random.Random(name)):
                place(rebuilt, shard, start, fragment)
        assert torch.equal(rebuilt, logical), name


def local_tensor(logical: Tensor, shard: ParameterShard) -> Tensor:
    held = torch.cat([logical[rows.start : rows.stop] for rows in shard.rows])
    if shard.columns is not None:
        held = held[:, shard.columns.start : shard.columns.stop]
    padding = held.new_full((shard.padding_rows, *held.shape[1:]), 1e9)
    return torch.cat((held, padding))


def cut(flat: Tensor, chance: random.Random) -> list[tuple[int, Tensor]]:
    """Cut a tensor into four fragments at random places."""
    cuts = sorted([0, *(chance.randint(0, len(flat)) for _ in range(3)), len(flat)])
    return [(a, flat[a:b]) for a, b in itertools.pairwise(cuts)]


def place(rebuilt: Tensor, shard: ParameterShard, start: int, fragment: Tensor) -> None:
    for box, first in boxes_of(shard, start, start + len(fragment), largest=50):
        there = rebuilt
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            there = there.narrow(dim, offset, size)
        there.copy_(fragment[first - start : first - start + box.elements].view(box.sizes))
