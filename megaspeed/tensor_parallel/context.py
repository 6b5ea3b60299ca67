"""Context parallelism: what the ranks of a context axis exchange in each block's attention.

Between blocks, a rank has its own tokens of each sequence (``model/sequence_part.py``).

    ulysses      qkv (B, t, all heads) --all-to-all--> (B, S, some heads) --attention-->
                 (B, S, some heads) --all-to-all--> (B, t, all heads)
    all_gather   keys and values (B, t, ...) --all-gather--> those of all ranks (B, S, ...)

Ulysses is from Jacobs et al. 2023, "DeepSpeed Ulysses", section 3. Here, heads are normalised and
rotated after the all-to-all, so all of the attention is as on one rank, with fewer heads. With
fewer key/value heads than ranks, each rank gets a copy of those that its query heads need.

With ``all_gather``, keys are rotated before they are gathered, and the backward gathers them again,
so that a rank does not keep the keys and values of all tokens.
"""

from functools import partial

import torch
from torch import Tensor

from megaspeed.model.dropout import MaskShard
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import GPT, Block
from megaspeed.model.recomputation import recomputing
from megaspeed.tensor_parallel.collectives import (
    ContextAxis,
    TensorAxis,
    exchange_rows,
    gather_rows,
    sum_in_place,
)


def share_sequences(model: GPT, axis: ContextAxis, tensor: TensorAxis) -> None:
    """Make the blocks of ``model`` share sequences over the context axis, in place."""
    model.part = axis.tokens
    tokens = MaskShard(
        index=tensor.rank if tensor.sequence_parallel else 0,
        count=tensor.size if tensor.sequence_parallel else 1,
        across_samples=tensor.sequence_parallel,
        part=axis.tokens,
    )
    if model.embedding is not None:
        model.embedding.dropout.shard = MaskShard(part=axis.tokens)
    for name, block in model.blocks.items():
        assert isinstance(block, Block)
        block.attention_dropout.shard = block.mlp_dropout.shard = tokens
        if isinstance(block.mlp, Experts):
            block.mlp.sums_over_sequence.append(partial(sum_in_place, axis=axis))
        attention = block.attention
        if axis.method == "all_gather":
            attention.gather_rows = partial(gather_rows, axis=axis)
            heads = MaskShard(index=tensor.rank, count=tensor.size, part=axis.tokens)
            if name not in model.fully_recomputed:  # whose backward gathers the keys again anyway
                attention.compose = recomputing
        else:
            queries, shared = attention.query_heads, attention.key_value_heads
            attention.to_heads = partial(
                tokens_to_heads, heads=(queries, shared), head_dim=attention.head_dim, axis=axis
            )
            attention.to_tokens = partial(heads_to_tokens, axis=axis)
            attention.query_heads = queries // axis.size
            attention.key_value_heads = max(1, shared // axis.size)
            index = tensor.rank * axis.size + axis.rank
            heads = MaskShard(index=index, count=tensor.size * axis.size)
        attention.dropout.shard = heads


def tokens_to_heads(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, axis: ContextAxis
) -> Tensor:
    """All tokens (B, S, features of this rank's heads) of ``qkv`` (B, t, features of all heads).

    Args:
        qkv: the features of query, key and value heads, one after the other.
        heads: the numbers of query heads, and of key heads.
        head_dim: features of a head.
        axis: each of its ranks gets 1 / cp of the query, key and value heads.
    """
    queries, shared = heads
    parts = []
    for section in qkv.unflatten(2, (-1, head_dim)).split([queries, shared, shared], dim=2):
        if section.shape[2] < axis.size:  # an all-to-all sends each rank equally many heads
            section = section.repeat_interleave(axis.size // shared, dim=2)
        # (cp, B, t, heads of this kind for a rank, K)
        parts.append(section.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4))
    received = exchange_rows(torch.cat(parts, dim=3), axis)  # (cp, B, t, heads, K)
    return received.transpose(0, 1).flatten(3).flatten(1, 2)


def heads_to_tokens(mixed: Tensor, axis: ContextAxis) -> Tensor:
    """Own tokens (B, t, H K) of ``mixed`` (B, S, H K / cp), of which each rank has some heads."""
    sent = mixed.unflatten(1, (axis.size, -1)).transpose(0, 1)  # (cp, B, t, H K / cp)
    return exchange_rows(sent, axis).permute(1, 2, 0, 3).flatten(2)
