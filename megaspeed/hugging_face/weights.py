"""Maps each tensor of transformers to rows of one of ours, and checks a model's files against that.

    ours (rows, columns)                        theirs
    blocks.0.attention.qkv.weight   q rows      model.layers.0.self_attn.q_proj.weight
                                    k rows      model.layers.0.self_attn.k_proj.weight
                                    v rows      model.layers.0.self_attn.v_proj.weight
    blocks.0.mlp.gate_up.weight     gate rows   model.layers.0.mlp.gate_proj.weight
                                    up rows     model.layers.0.mlp.up_proj.weight
    blocks.0.mlp.up.weight          all         transformer.h.0.mlp.c_fc.weight, transposed

The names are in the family's file (``config/families``), the rows in the model's table
(``model/parameters.py``). GPT-2's c_attn is one matrix of q, k and v, in the same order as ours.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspeed.checkpoint.tensors import MOST_LISTED, WEIGHTS, Piece, key, shape_text
from megaspeed.config.errors import shortened
from megaspeed.config.families import FAMILIES, Family
from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face.weight_files import HuggingFaceError, StoredTensor
from megaspeed.model.parameters import Parameter, Shape, parameters_of

HEAD = "lm_head.weight"
"""Their name for the output projection, if it is not the embedding."""

_TIED_ROWS = 4096
"""Number of rows of a tied head that are compared at once."""


@dataclass(frozen=True)
class Part:
    """Rows of one of our tensors that are together one of theirs."""

    ours: str  # full name of our parameter
    full_shape: Shape  # shape of our parameter
    rows: range  # the rows of our parameter
    theirs: str  # name of their tensor in transformers' state dict
    transposed: bool  # whether their tensor is (columns, rows)

    @property
    def shape(self) -> Shape:
        """Shape of their tensor."""
        shape = (len(self.rows), *self.full_shape[1:])
        return shape[::-1] if self.transposed else shape

    def piece(self, values: Tensor, *, start: int = 0) -> Piece:
        """The piece of our tensor that has ``values`` from row ``start`` of this part on."""
        offsets = (self.rows.start + start, *(0 for _ in self.full_shape[1:]))
        return Piece(key(WEIGHTS, self.ours), self.full_shape, offsets, values)


def parts_of(model: ModelConfig) -> Iterator[Part]:
    """Every part of a model, in the order of our parameters. A tied head has no part."""
    family = FAMILIES[model.architecture]
    for parameter in parameters_of(model).values():
        is_in_block = parameter.layer.startswith("blocks.")
        sections = _sections(parameter, family)
        start = 0
        for module, height in sections:
            theirs = f"{module}.{parameter.kind}"
            if is_in_block:
                theirs = f"{family.blocks}.{parameter.layer.removeprefix('blocks.')}.{theirs}"
            yield Part(
                ours=parameter.name,
                full_shape=parameter.shape,
                rows=range(start, start + height),
                theirs=theirs,
                transposed=is_in_block and family.transposes_blocks and len(parameter.shape) == 2,
            )
            start += height


def _sections(parameter: Parameter, family: Family) -> list[tuple[str, int]]:
    """(name, number of rows) of each of their modules that together are one of our modules.

    Raises:
        LookupError: the family states no name for our module.
    """
    row = parameter.row
    name = row.name if parameter.layer.startswith("blocks.") else f"{parameter.layer}.{row.name}"
    modules = family.modules.get(name)
    if modules is None:
        raise LookupError(
            f"the module {name} has no name in {family.class_name} of transformers; add it to the "
            "modules of the family in megaspeed/config/families"
        )
    heights = [row.rows] if len(modules) == 1 else list(row.sections.values())
    return list(zip(modules, heights, strict=True))


def matching_tensors(
    model: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of a model's files by name without the family's prefix, after they are checked.

    Old files may omit the prefix, contain constants that are computed today, and contain a tied
    head in addition to the embedding.

    Raises:
        HuggingFaceError: with every tensor that is missing, unexpected, or of another shape or
            dtype.
    """
    family = FAMILIES[model.architecture]
    prefix = family.prefix
    stored = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    parts = {part.theirs.removeprefix(prefix): part for part in parts_of(model)}
    twice = (name for name in stored if {name, prefix + name} <= tensors.keys())
    problems = [f"{name} is stored with and without {prefix}" for name in twice]
    problems += (f"{part.theirs} is missing" for name, part in parts.items() if name not in stored)
    problems += (
        f"{name} ({shape_text(tensor.shape)}) is in {tensor.file.name}, but not in the model"
        for name, tensor in stored.items()
        if name not in parts and not re.fullmatch(family.buffers, name) and name != HEAD
    )
    for name in (name for name in parts if name in stored):
        problems += _problems_of(parts[name], stored[name])
    embedding = next(iter(parts))
    if HEAD not in parts and {HEAD, embedding} <= stored.keys():
        problems += _tied_problems(stored[HEAD], stored[embedding])
    if problems:
        listed = "\n".join(f"  {problem}" for problem in shortened(problems, MOST_LISTED))
        raise HuggingFaceError(
            f"the weights are not those of the model in config.json:\n{listed}\n"
            "Download both again, from one revision."
        )
    return stored


def _problems_of(part: Part, tensor: StoredTensor) -> Iterator[str]:
    if tensor.shape != part.shape:
        yield (
            f"{part.theirs} is {shape_text(tensor.shape)} in {tensor.file.name}, but "
            f"{shape_text(part.shape)} in the model"
        )
    if tensor.dtype is None:
        yield (f"{part.theirs} in {tensor.file.name} is not float64, float32, bfloat16 or float16")


def _tied_problems(head: StoredTensor, embedding: StoredTensor) -> Iterator[str]:
    """A tied head may be stored, too, but it must be equal to the embedding."""
    starts = range(0, embedding.shape[0], _TIED_ROWS)
    if head.shape != embedding.shape or not all(
        torch.equal(
            *(tensor.read(slice(start, start + _TIED_ROWS)) for tensor in (head, embedding))
        )
        for start in starts
    ):
        yield f"{HEAD} differs from the embedding, but tie_word_embeddings in config.json is true"
