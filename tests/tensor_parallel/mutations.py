"""Typical mistakes in tensor parallelism, each as a patch of the code in a rank."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaspeed.model.dropout import MaskShard, SampleDropout
from megaspeed.tensor_parallel import collectives, layers, loss, shards
from megaspeed.tensor_parallel.collectives import Pending, TensorAxis, start_all_reduce
from megaspeed.tensor_parallel.layers import RowParallelLinear

# Imported by name, because the package has a function with the module's name.
_PARALLELIZE = import_module("megaspeed.tensor_parallel.parallelize")


def bias_before_the_sum(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """Every rank adds the row-parallel bias, so it counts tp times."""

    def forward(layer: RowParallelLinear, x: Tensor) -> Tensor:
        partial = F.linear(x, layer.weight, layer.bias)
        if axis.sequence_parallel:
            return collectives.reduce_scatter_sequence(partial, axis)
        return collectives.reduce_from_tensor_axis(partial, axis)

    patch.setattr(RowParallelLinear, "forward", forward)


def gradient_not_summed_on_entry(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """The backward of f, or of the gather, passes on only this rank's part of the gradient."""
    done = SimpleNamespace(wait=lambda: None)

    def own_part(full: Tensor, axis: TensorAxis) -> Pending:
        return Pending(full.chunk(axis.size)[axis.rank], done, axis)

    patch.setattr(layers, "start_all_reduce", lambda x, axis: Pending(x, done, axis))
    patch.setattr(layers, "start_reduce_scatter", own_part)

    def own_part_of_loss(gradient: Tensor, axis: TensorAxis) -> Tensor:
        return collectives._own_part(gradient, axis) if axis.sequence_parallel else gradient

    patch.setattr(loss, "_summed", own_part_of_loss)


def gradient_summed_on_leaving(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """The backward of g sums gradients that are already complete on every rank."""

    def all_reduce(x: Tensor, axis: TensorAxis) -> Tensor:
        return start_all_reduce(x.clone(), axis).wait()

    def reduce(x: Tensor, axis: TensorAxis) -> Tensor:
        return collectives._Conjugate.apply(x, axis, all_reduce, all_reduce)

    patch.setattr(layers, "reduce_from_tensor_axis", reduce)


def gradient_not_gathered_at_the_split(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """The embedding gets only the gradient of this rank's part of the sequence."""

    def pad(gradient: Tensor, axis: TensorAxis) -> Tensor:
        parts = [torch.zeros_like(gradient) for _ in range(axis.size)]
        parts[axis.rank] = gradient
        batch, sequence, width = gradient.shape
        return torch.cat(parts).view(batch, axis.size * sequence, width)

    def split(x: Tensor, axis: TensorAxis) -> Tensor:
        return collectives._Conjugate.apply(x, axis, collectives._own_part, pad)

    patch.setattr(_PARALLELIZE, "split_sequence", split)


def key_value_gradients_not_summed(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """Each copy of a key/value head learns only from its own rank's query heads."""
    patch.setattr(layers, "sum_shared_rows", lambda parameter, shared, axis: parameter)


def replicated_gradients_not_summed(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """Norms and row-parallel biases learn only from this rank's part of the sequence."""
    patch.setattr(shards, "gradient_is_partial", lambda parameter, **_axis: False)


def first_mask_shard_everywhere(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """Every rank uses the first rank's part of the mask."""
    patch.setattr(
        _PARALLELIZE,
        "MaskShard",
        lambda index, count, **split: MaskShard(index=0, count=count, **split),
    )


def mask_of_the_local_shape(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """Every rank draws a mask of its local shape, as if it were the full shape."""
    patch.setattr(_PARALLELIZE, "MaskShard", lambda **_shard: MaskShard())


def another_mask_on_each_rank(patch: pytest.MonkeyPatch, axis: TensorAxis) -> None:
    """Each rank drops different elements, even of replicated activations."""
    forward = SampleDropout.forward

    def with_the_ranks_samples(layer: SampleDropout, x: Tensor, samples: Tensor) -> Tensor:
        return forward(layer, x, samples + 1000 * axis.rank)

    patch.setattr(SampleDropout, "forward", with_the_ranks_samples)
