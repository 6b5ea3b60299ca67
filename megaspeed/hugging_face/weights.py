"""The tensors in the files of a Hugging Face model, and the rows of ours that each of them is.

    model.safetensors   or  model.safetensors.index.json -> model-00001-of-00003.safetensors ...

    ours (rows, columns)                        theirs
    blocks.0.attention.qkv.weight   q rows      model.layers.0.self_attn.q_proj.weight
                                    k rows      model.layers.0.self_attn.k_proj.weight
                                    v rows      model.layers.0.self_attn.v_proj.weight
    blocks.0.mlp.gate_up.weight     gate rows   model.layers.0.mlp.gate_proj.weight
                                    up rows     model.layers.0.mlp.up_proj.weight
    blocks.0.mlp.up.weight          all         transformer.h.0.mlp.c_fc.weight, transposed
    experts: blocks.0.mlp.gate_up.weight
                                    0.gate      model.layers.0.mlp.experts.0.gate_proj.weight
                                    0.up        model.layers.0.mlp.experts.0.up_proj.weight
                                    1.gate      model.layers.0.mlp.experts.1.gate_proj.weight

The names are in the family's table (``config/families.py``), the rows in the model's table
(``model/parameters.py``). GPT-2's c_attn is one matrix of q, k and v, in the same order as ours.
A tensor is read only when it is needed.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaspeed.checkpoint.tensors import MOST_LISTED, WEIGHTS, Piece, key, shape_text
from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.config.errors import shortened
from megaspeed.config.families import FAMILIES, Family
from megaspeed.config.hugging_face import DAMAGED
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Parameter, Shape, parameters_of

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
"""A name of the output projection that transformers accepts in each family."""

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Show = Callable[[float, str, float], object]
"""Receives how much of a total is done, and a text, as ``BarOrLines.show`` does."""

_Open = Callable[[Path], Any]


class HuggingFaceError(RuntimeError):
    """A model cannot be imported, exported or loaded. The message states what to do."""


class ComputationError(HuggingFaceError):
    """A model was loaded, but what it computes is wrong or not finite."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path  # the file that contains it
    name: str  # its name in the file
    shape: Shape  # its full shape
    dtype: torch.dtype | None  # in the file; None if it is not fp64, fp32, bf16 or fp16
    open: _Open  # opens the file, or returns it if it is the file that was opened last

    def read(self, *index: slice) -> Tensor:
        """A part of it in fp32; a dim without a slice is read in full.

        Raises:
            HuggingFaceError: a value is NaN or infinite.
        """
        part: Tensor = self.open(self.file).get_slice(self.name)[index].to(torch.float32)
        if part.numel() and not is_finite(part):
            raise HuggingFaceError(
                f"{self.name} in {self.file} has NaN or infinite values in fp32, so no model can "
                "be trained from it; download the file again, or use an earlier state of the model"
            )
        return part


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinite value."""
    # Unlike isfinite, aminmax allocates no tensor of this size. If there is a NaN, it returns NaN.
    return all(map(math.isfinite, map(float, tensor.aminmax())))


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, for all tensors of the model in ``folder``.

    Raises:
        HuggingFaceError: the folder has no safetensors files, or one is missing or damaged.
    """
    # Only one file is open at a time, because the pages of a mapped file count as used memory.
    opened: _Open = lru_cache(maxsize=1)(lambda file: safe_open(file, framework="pt"))
    if (folder / SAFETENSORS).is_file():
        return _tensors_in(folder / SAFETENSORS, opened)
    if (folder / SAFETENSORS_INDEX).is_file():
        return _tensors_of_shards(folder / SAFETENSORS_INDEX, opened)
    raise HuggingFaceError(
        f"{folder} has neither {SAFETENSORS} nor {SAFETENSORS_INDEX}; name a folder with a model's "
        "weights, or load the model with transformers and save it again with save_pretrained"
    )


def _tensors_of_shards(index: Path, opened: _Open) -> dict[str, StoredTensor]:
    try:
        weight_map = read_json_object(index)[0].get("weight_map")
    except JsonSyntaxError as error:
        raise HuggingFaceError(f"{error}: {DAMAGED}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise HuggingFaceError(f"{index} has no weight_map of names and files: {DAMAGED}")
    # Only the last part of a path is used, so an index cannot name a file outside its folder.
    named = {name: index.parent / Path(str(file)).name for name, file in weight_map.items()}
    missing = sorted({file.name for file in named.values() if not file.is_file()})
    if missing:
        raise HuggingFaceError(
            f"{index} lists {', '.join(missing)}, but {index.parent} does not have them; download "
            "them"
        )
    held = {file: _tensors_in(file, opened) for file in sorted(set(named.values()))}
    lost = [f"{name} in {file.name}" for name, file in named.items() if name not in held[file]]
    if lost:
        raise HuggingFaceError(
            f"{index} lists {len(lost)} tensors that are not in the files it names, for example "
            f"{lost[0]}; download index and files again, from one revision"
        )
    return {name: held[file][name] for name, file in named.items()}


def _tensors_in(file: Path, opened: _Open) -> dict[str, StoredTensor]:
    try:
        names = opened(file).keys()
    except (SafetensorError, OSError) as error:
        raise HuggingFaceError(f"{file} cannot be read ({error}): {DAMAGED}") from error
    slices = {name: opened(file).get_slice(name) for name in names}
    return {
        name: StoredTensor(
            file, name, tuple(each.get_shape()), _FLOATS.get(each.get_dtype()), opened
        )
        for name, each in slices.items()
    }


@dataclass(frozen=True)
class TensorPart:
    """Rows of one of our tensors that are together one of theirs."""

    ours: str  # full name of our parameter
    full_shape: Shape  # shape of our parameter
    rows: range  # the rows of our parameter
    theirs: str  # name of their tensor in transformers' state dict
    transposed: bool  # whether their tensor is (columns, rows)
    heads: int | None = None  # their number, if their tensor has q, k and v head by head

    @property
    def shape(self) -> Shape:
        """Shape of their tensor."""
        shape = (len(self.rows), *self.full_shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of rows: (first row in this part, first row in their tensor, number of rows)."""
        if self.heads is None:
            return [(0, 0, len(self.rows))]
        height = len(self.rows) // (3 * self.heads)
        return [
            ((section * self.heads + head) * height, (3 * head + section) * height, height)
            for head in range(self.heads)
            for section in range(3)
        ]

    def piece(self, values: Tensor, *, start: int = 0) -> Piece:
        """The piece of our tensor that has ``values`` from row ``start`` of this part on."""
        offsets = (self.rows.start + start, *(0 for _ in self.full_shape[1:]))
        return Piece(key(WEIGHTS, self.ours), self.full_shape, offsets, values)


def parts_of(model: ModelConfig) -> Iterator[TensorPart]:
    """Every part of a model, in the order of our parameters. A tied head has no part."""
    family = FAMILIES[model.architecture]
    for parameter in parameters_of(model).values():
        is_in_block = parameter.layer.startswith("blocks.")
        is_interleaved = family.interleaves_heads and parameter.row.name == "attention.qkv"
        start = 0
        for module, height in _sections(parameter, family):
            theirs = f"{module}.{parameter.kind}"
            if is_in_block:
                theirs = f"{family.blocks}.{parameter.layer.removeprefix('blocks.')}.{theirs}"
            yield TensorPart(
                ours=parameter.name,
                full_shape=parameter.shape,
                rows=range(start, start + height),
                theirs=theirs,
                transposed=is_in_block and family.transposes_blocks and len(parameter.shape) == 2,
                heads=model.num_attention_heads if is_interleaved else None,
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
            "modules of the family in megaspeed/config/families.py"
        )
    modules = tuple(name.format(expert) for expert in range(row.experts) for name in modules)
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
    head = f"{family.modules['head.output'][0]}.weight"
    if head not in stored and HEAD in stored:
        stored[head] = stored.pop(HEAD)
    parts = {part.theirs.removeprefix(prefix): part for part in parts_of(model)}
    twice = (name for name in stored if {name, prefix + name} <= tensors.keys())
    problems = [f"{name} is stored with and without {prefix}" for name in twice]
    problems += (f"{part.theirs} is missing" for name, part in parts.items() if name not in stored)
    problems += (
        f"{name} ({shape_text(tensor.shape)}) is in {tensor.file.name}, but not in the model"
        for name, tensor in stored.items()
        if name not in parts and not re.fullmatch(family.buffers, name) and name != head
    )
    for name in (name for name in parts if name in stored):
        problems += _problems_of(parts[name], stored[name])
    embedding = next(iter(parts))
    if head not in parts and {head, embedding} <= stored.keys():
        # A tied head may be stored, too, but it must be equal to the embedding.
        other, tied = stored[head], stored[embedding]
        if other.shape != tied.shape or not torch.equal(other.read(), tied.read()):
            problems.append(
                f"{other.name} differs from the embedding, but tie_word_embeddings in config.json "
                "is true"
            )
    if problems:
        listed = "\n".join(f"  {problem}" for problem in shortened(problems, MOST_LISTED))
        raise HuggingFaceError(
            f"the weights are not those of the model in config.json:\n{listed}\n"
            "Download both again, from one revision."
        )
    return stored


def _problems_of(part: TensorPart, tensor: StoredTensor) -> Iterator[str]:
    if tensor.shape != part.shape:
        yield (
            f"{part.theirs} is {shape_text(tensor.shape)} in {tensor.file.name}, but "
            f"{shape_text(part.shape)} in the model"
        )
    if tensor.dtype is None:
        yield (f"{part.theirs} in {tensor.file.name} is not float64, float32, bfloat16 or float16")
