"""Which tensor of transformers holds which rows of which of ours. Pure arithmetic on names.

    ours (rows, columns)                        theirs
    blocks.0.attention.qkv.weight   q rows      model.layers.0.self_attn.q_proj.weight
                                    k rows      model.layers.0.self_attn.k_proj.weight
                                    v rows      model.layers.0.self_attn.v_proj.weight
    blocks.0.mlp.gate_up.weight     gate rows   model.layers.0.mlp.gate_proj.weight
                                    up rows     model.layers.0.mlp.up_proj.weight
    blocks.0.mlp.up.weight          all         transformer.h.0.mlp.c_fc.weight, transposed

GPT-2's linear layers are called Conv1D there and keep (in, out) where ours keep (out, in). Its
c_attn has q, k and v beside each other in our order. Llama's rotary pairing, dim i with dim i +
K/2, is ours as well, so that no row of a head changes its place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaspeed.checkpoint.tensors import expected_shapes
from megaspeed.config import ModelConfig
from megaspeed.model.parameters import Shape


@dataclass(frozen=True)
class Part:
    """Rows of one of our tensors, which are the whole of one of theirs.

    Attributes:
        ours: full name of our parameter.
        full_shape: of all of it.
        rows: those that are meant.
        theirs: the name in transformers' state dict.
        transposed: whether theirs is (columns, rows).
    """

    ours: str
    full_shape: Shape
    rows: range
    theirs: str
    transposed: bool

    @property
    def shape(self) -> Shape:
        """Of theirs."""
        shape = (len(self.rows), *self.full_shape[1:])
        return shape[::-1] if self.transposed else shape


PREFIX: Mapping[str, str] = {"gpt2": "transformer.", "llama": "model."}
"""Before the name of every tensor but the head's; files of the bare model leave it out."""

HEAD = "lm_head.weight"
"""The output projection, where it is not the embedding."""

_BLOCKS: Mapping[str, str] = {"gpt2": "transformer.h", "llama": "model.layers"}

_OUTSIDE: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    "llama": {
        "embedding.tokens": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.output": "lm_head",
    },
}

_INSIDE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": {
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.output": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    "llama": {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
}


def parts_of(model: ModelConfig) -> Iterator[Part]:
    """Every part of a model, in the order of our parameters; a tied head is the embedding."""
    for name, shape in expected_shapes(model).items():
        module, _, leaf = name.rpartition(".")
        if not module.startswith("blocks."):
            theirs = f"{_OUTSIDE[model.architecture][module]}.{leaf}"
            yield Part(name, shape, range(shape[0]), theirs, transposed=False)
            continue
        _, block, inner = module.split(".", 2)
        is_conv1d = model.architecture == "gpt2" and len(shape) == 2
        start = 0
        their_names = _INSIDE[model.architecture][inner]
        for their_name, height in zip(their_names, _heights(model, inner, shape), strict=True):
            theirs = f"{_BLOCKS[model.architecture]}.{block}.{their_name}.{leaf}"
            yield Part(name, shape, range(start, start + height), theirs, is_conv1d)
            start += height


def _heights(model: ModelConfig, inner: str, shape: Shape) -> tuple[int, ...]:
    """Rows of each of the tensors that one of ours is in a block of theirs."""
    if model.architecture == "llama" and inner == "attention.qkv":
        shared = model.num_key_value_heads * model.head_dim
        return model.num_attention_heads * model.head_dim, shared, shared
    if inner == "mlp.gate_up":
        return model.intermediate_size, model.intermediate_size
    return (shape[0],)
