"""Shards become logical tensors, and copies of one element are compared."""

import math

import torch

from megaspeed.measurement.verification.verify import merge_shards
from megaspeed.tensor_parallel.shards import ParameterShard


def copy_of(value: float) -> tuple[str, ParameterShard, torch.Tensor]:
    shard = ParameterShard(full_shape=(2, 1), rows=(range(2),), owned_rows=2)
    return "weight", shard, torch.full((2, 1), value)


def test_a_wrong_copy_is_seen_at_any_position() -> None:
    assert merge_shards([copy_of(1.0), copy_of(1.0)]).copies_differ_by == 0.0
    for values in ((7.0, 1.0, 1.0), (1.0, 7.0, 1.0), (1.0, 1.0, 7.0)):
        assert merge_shards(map(copy_of, values)).copies_differ_by == 6.0


def test_a_copy_that_is_not_a_number_is_infinitely_different() -> None:
    for values in ((math.nan, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1.0, math.nan)):
        assert merge_shards(map(copy_of, values)).copies_differ_by == math.inf


def test_rows_columns_and_padding_are_placed() -> None:
    full = torch.arange(12.0).view(3, 4)
    top = ParameterShard(full_shape=(3, 4), rows=(range(0, 2),), columns=range(0, 2), owned_rows=2)
    rest = ParameterShard(
        full_shape=(3, 4), rows=(range(2, 3), range(0, 2)), columns=range(2, 4), owned_rows=3
    )
    corner = ParameterShard(
        full_shape=(3, 4), rows=(range(2, 3),), columns=range(0, 2), padding_rows=1, owned_rows=1
    )
    merged = merge_shards(
        [
            ("weight", top, full[:2, :2]),
            ("weight", rest, torch.cat((full[2:, 2:], full[:2, 2:]))),
            ("weight", corner, torch.cat((full[2:, :2], torch.full((1, 2), 99.0)))),
        ]
    )
    assert torch.equal(merged.tensors["weight"], full)
    assert merged.copies_differ_by == 0.0
