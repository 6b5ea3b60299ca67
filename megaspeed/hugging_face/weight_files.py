"""The tensors in the files of a Hugging Face model, each read no sooner than it is asked for.

    model.safetensors   or  model.safetensors.index.json -> model-00001-of-00003.safetensors ...
    pytorch_model.bin   or  pytorch_model.bin.index.json -> pytorch_model-00001-of-00003.bin ...

The first of the four that a folder has counts, as in transformers. Nothing of a file is executed:
safetensors holds none, and a .bin is read as tensors alone.
"""

import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megaspeed.config.hugging_face import DAMAGED
from megaspeed.config.strict_json import JsonSyntaxError, read_json_object
from megaspeed.hugging_face.errors import HuggingFaceError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

_Held = Mapping[str, Any]
"""Name -> what gives a tensor for an index of slices, of all tensors of a file."""

_Open = Callable[[Path], _Held]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: which holds it.
        name: as it is called there.
        shape: its full shape.
        dtype: as it is stored; None where it is none of fp64, fp32, bf16 and fp16.
        open: opens the file, or gives it as it was opened before.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    open: _Open

    def read(self, *index: slice) -> Tensor:
        """A part of it, as fp32; dims without a slice are whole.

        Raises:
            HuggingFaceError: a value is NaN or infinite.
        """
        part: Tensor = self.open(self.file)[self.name][index].to(torch.float32)
        # Unlike isfinite it takes no memory of the part's size; a NaN is both of what it gives.
        if part.numel() and not all(map(math.isfinite, map(float, part.aminmax()))):
            raise HuggingFaceError(
                f"{self.name} in {self.file} holds NaN or infinite values in fp32, from which no "
                "model can be trained; fetch the file anew, or take an earlier state of the model"
            )
        return part


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, of all tensors of the model in ``folder``.

    Raises:
        HuggingFaceError: there are none, or a file is missing or damaged.
    """
    for file, index, open_file in (
        (SAFETENSORS, SAFETENSORS_INDEX, _open_safetensors),
        (_BIN, _BIN_INDEX, _open_bin),
    ):
        # One file is open at a time: pages of a file that is mapped count as memory that is used.
        opened: _Open = lru_cache(maxsize=1)(open_file)
        if (folder / file).is_file():
            return _tensors_in(folder / file, opened)
        if (folder / index).is_file():
            return _tensors_of_shards(folder / index, opened)
    names = ", ".join((SAFETENSORS, SAFETENSORS_INDEX, _BIN, _BIN_INDEX))
    raise HuggingFaceError(f"{folder} has none of {names}; name a folder with a model's weights")


def _tensors_of_shards(index: Path, opened: _Open) -> dict[str, StoredTensor]:
    try:
        weight_map = read_json_object(index)[0].get("weight_map")
    except JsonSyntaxError as error:
        raise HuggingFaceError(f"{error}: {DAMAGED}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise HuggingFaceError(f"{index} has no weight_map of names and files: {DAMAGED}")
    # The name alone: an index cannot point out of its folder.
    named = {name: index.parent / Path(str(file)).name for name, file in weight_map.items()}
    missing = sorted({file.name for file in named.values() if not file.is_file()})
    if missing:
        raise HuggingFaceError(
            f"{index} names {', '.join(missing)}, which {index.parent} lacks; fetch what is missing"
        )
    held = {file: _tensors_in(file, opened) for file in sorted(set(named.values()))}
    lost = [f"{name} in {file.name}" for name, file in named.items() if name not in held[file]]
    if lost:
        raise HuggingFaceError(
            f"{index} names {len(lost)} tensors that are not where it says, the first {lost[0]}; "
            "fetch index and files anew, from one revision"
        )
    return {name: held[file][name] for name, file in named.items()}


def _tensors_in(file: Path, opened: _Open) -> dict[str, StoredTensor]:
    try:
        return {
            name: StoredTensor(file, name, *_shape_and_dtype(tensor), opened)
            for name, tensor in opened(file).items()
        }
    except HuggingFaceError:
        raise
    except pickle.UnpicklingError as error:  # torch's advice is to let the file run as a program
        raise HuggingFaceError(
            f"{file} holds more than tensors, which is not read because it may run as a program, "
            "or is damaged; fetch it again, or save the model by save_pretrained"
        ) from error
    except Exception as error:  # a damaged file may raise anything, in either format
        why = str(error) or type(error).__name__
        raise HuggingFaceError(f"{file} cannot be read ({why}): {DAMAGED}") from error


def _open_safetensors(file: Path) -> _Held:
    stored = safe_open(file, framework="pt")
    return {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  # no mapping


def _open_bin(file: Path) -> _Held:
    # Files from before torch 1.6 are no archives; they are read whole.
    mapped = zipfile.is_zipfile(file)
    held = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    problem = _problem_of(held)
    if problem is not None:
        raise HuggingFaceError(
            f"{file} must hold tensors by name and nothing else, and {problem}; save the model by "
            "save_pretrained"
        )
    return {name: tensor.detach() for name, tensor in held.items()}


def _problem_of(held: Any) -> str | None:
    """Why what a .bin holds is not the weights of a model."""
    if not isinstance(held, Mapping):
        return f"holds a {type(held).__name__}"
    for name, tensor in held.items():
        if not isinstance(name, str):
            return f"a name in it is {name!r}"
        if not isinstance(tensor, Tensor):
            return f"{name!r} in it is a {type(tensor).__name__}"
        if tensor.layout != torch.strided:
            return f"{name!r} in it is sparse"
    return None


def _shape_and_dtype(tensor: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    if isinstance(tensor, Tensor):
        return tuple(tensor.shape), tensor.dtype if tensor.dtype in _FLOATS.values() else None
    return tuple(tensor.get_shape()), _FLOATS.get(tensor.get_dtype())
