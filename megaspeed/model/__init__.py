"""The GPT as plain ``torch.nn``: nothing here is distributed."""

from megaspeed.model.attention import Attention
from megaspeed.model.dropout import MaskShard, SampleDropout
from megaspeed.model.flops import forward_flops_per_token, training_flops_per_token
from megaspeed.model.gpt import GPT
from megaspeed.model.initialization import initial_slice, initialize
from megaspeed.model.layers import Block, Embedding, Head
from megaspeed.model.parameters import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    layer_count,
    logical_name,
    parameter_named,
    parameters_of,
)

__all__ = [
    "EMBEDDING_WEIGHT",
    "GPT",
    "HEAD_WEIGHT",
    "Attention",
    "Block",
    "Embedding",
    "Head",
    "MaskShard",
    "SampleDropout",
    "forward_flops_per_token",
    "initial_slice",
    "initialize",
    "layer_count",
    "logical_name",
    "parameter_named",
    "parameters_of",
    "training_flops_per_token",
]
