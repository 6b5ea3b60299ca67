"""Whether the tensors of the files are those of the model: none missing, none beside, all in shape.

Files are older than the library that reads them: they may lack the prefix of every name, hold
constants that are worked out today, and hold a tied head a second time.
"""

import re
from collections.abc import Iterator, Mapping

import torch

from megaspeed.checkpoint.tensors import MOST_LISTED, shape_text
from megaspeed.config.errors import shortened
from megaspeed.config.families import FAMILIES
from megaspeed.config.model import ModelConfig
from megaspeed.hugging_face.errors import HuggingFaceError
from megaspeed.hugging_face.weight_files import StoredTensor
from megaspeed.hugging_face.weights import HEAD, Part, parts_of

_TIED_ROWS = 4096
"""Rows of a tied head that are compared at once."""


def matching_tensors(
    model: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The model's tensors by name without prefix, once there is no other and none is missing.

    Raises:
        HuggingFaceError: with each that is missing, unexpected, misshapen or of another kind.
    """
    family = FAMILIES[model.architecture]
    prefix = family.prefix
    stored = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    parts = {part.theirs.removeprefix(prefix): part for part in parts_of(model)}
    twice = (name for name in stored if {name, prefix + name} <= tensors.keys())
    problems = [f"{name} is there with and without {prefix}" for name in twice]
    problems += (f"{part.theirs} is missing" for name, part in parts.items() if name not in stored)
    problems += (
        f"{name} ({shape_text(tensor.shape)}) is in {tensor.file.name} and not in the model"
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
            "Fetch both anew, from one revision."
        )
    return stored


def _problems_of(part: Part, tensor: StoredTensor) -> Iterator[str]:
    if tensor.shape != part.shape:
        yield (
            f"{part.theirs} is {shape_text(tensor.shape)} in {tensor.file.name} and "
            f"{shape_text(part.shape)} in the model"
        )
    if tensor.dtype is None:
        yield (
            f"{part.theirs} in {tensor.file.name} is none of float64, float32, bfloat16 and float16"
        )


def _tied_problems(head: StoredTensor, embedding: StoredTensor) -> Iterator[str]:
    """A tied head may be stored a second time; it must not be another."""
    starts = range(0, embedding.shape[0], _TIED_ROWS)
    if head.shape != embedding.shape or not all(
        torch.equal(
            *(tensor.read(slice(start, start + _TIED_ROWS)) for tensor in (head, embedding))
        )
        for start in starts
    ):
        yield f"{HEAD} is not the embedding, and tie_word_embeddings in config.json says that it is"
