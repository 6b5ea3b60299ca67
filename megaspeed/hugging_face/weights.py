"""Which tensor of transformers holds which rows of which of ours. Pure arithmetic on names.

    ours (rows, columns)                        theirs
    blocks.0.attention.qkv.weight   q rows      model.layers.0.self_attn.q_proj.weight
                                    k rows      model.layers.0.self_attn.k_proj.weight
                                    v rows      model.layers.0.self_attn.v_proj.weight
    blocks.0.mlp.gate_up.weight     gate rows   model.layers.0.mlp.gate_proj.weight
                                    up rows     model.layers.0.mlp.up_proj.weight
    blocks.0.mlp.up.weight          all         transformer.h.0.mlp.c_fc.weight, transposed

The names are in the family's file (``config/families``), the rows in the model's table
(``model/parameters.py``). GPT-2's c_attn is one matrix of q, k and v, in the same order
as ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megaspeed.config.families import FAMILIES, Family
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Parameter, Shape, parameters_of


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


HEAD = "lm_head.weight"
"""The output projection, if it is not the embedding."""


def parts_of(model: ModelConfig) -> Iterator[Part]:
    """Every part of a model, in the order of our parameters; a tied head is the embedding."""
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
    """Name and rows of each of transformers' modules that together are one of our modules.

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
