"""Reads the tensors in the files of a Hugging Face model, each only when it is needed.

    model.safetensors   or  model.safetensors.index.json -> model-00001-of-00003.safetensors ...
    pytorch_model.bin   or  pytorch_model.bin.index.json -> pytorch_model-00001-of-00003.bin ...

If a folder has several of these four, the first one is read, as in transformers. No file can run
code: safetensors has only tensors, and a .bin is unpickled with ``weights_only``.
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

from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.config.hugging_face import DAMAGED
from megaspeed.files.paths import free_bytes, nearest_existing

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_Held = Mapping[str, Any]
"""Name -> an object that returns a tensor if it is indexed with slices, for all tensors."""

_Open = Callable[[Path], _Held]


class HuggingFaceError(RuntimeError):
    """A model cannot be imported, exported or loaded. The message states what to do."""


class ComputationError(HuggingFaceError):
    """A model was loaded, but what it computes is wrong or not finite."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path  # the file that contains it
    name: str  # its name in the file
    shape: tuple[int, ...]  # its full shape
    dtype: torch.dtype | None  # in the file; None if it is not fp64, fp32, bf16 or fp16
    open: _Open  # opens the file, or returns it if it is the file that was opened last

    def read(self, *index: slice) -> Tensor:
        """A part of it in fp32; a dim without a slice is read in full.

        Raises:
            HuggingFaceError: a value is NaN or infinite.
        """
        part: Tensor = self.open(self.file)[self.name][index].to(torch.float32)
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


def has_weights(folder: Path) -> bool:
    """Whether a folder has the weights of a Hugging Face model."""
    names = (SAFETENSORS, SAFETENSORS_INDEX, _BIN, _BIN_INDEX)
    return any((folder / name).is_file() for name in names)


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, for all tensors of the model in ``folder``.

    Raises:
        HuggingFaceError: the folder has no weights, or a file is missing or damaged.
    """
    for file, index, open_file in (
        (SAFETENSORS, SAFETENSORS_INDEX, _open_safetensors),
        (_BIN, _BIN_INDEX, _open_bin),
    ):
        # Only one file is open at a time, because the pages of a mapped file count as used memory.
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
        return {
            name: StoredTensor(file, name, *_shape_and_dtype(tensor), opened)
            for name, tensor in opened(file).items()
        }
    except HuggingFaceError:
        raise
    except pickle.UnpicklingError as error:  # torch's own message suggests to run the file's code
        raise HuggingFaceError(
            f"{file} is damaged, or has objects other than tensors, which are not loaded because "
            "they may run code; download it again, or save the model with save_pretrained"
        ) from error
    except Exception as error:  # a damaged file may raise anything, in either format
        why = str(error) or type(error).__name__
        raise HuggingFaceError(f"{file} cannot be read ({why}): {DAMAGED}") from error


def _open_safetensors(file: Path) -> _Held:
    stored = safe_open(file, framework="pt")
    return {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  # not a dict


def _open_bin(file: Path) -> _Held:
    # Files written before torch 1.6 are not zip archives and cannot be mapped.
    mapped = zipfile.is_zipfile(file)
    held = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    problem = _problem_of(held)
    if problem is not None:
        raise HuggingFaceError(
            f"{file} must contain only tensors by name, but {problem}; save the model with "
            "save_pretrained"
        )
    return {name: tensor.detach() for name, tensor in held.items()}


def _problem_of(held: Any) -> str | None:
    """Why the content of a .bin is not the weights of a model; None if it is."""
    if not isinstance(held, Mapping):
        return f"contains a {type(held).__name__}"
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


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise HuggingFaceError if ``folder`` cannot be created, or its disk has too little space."""
    above = nearest_existing(folder)
    if not above.is_dir():
        raise HuggingFaceError(
            f"{folder} cannot be created, because {above} is a file; name a path in a folder"
        )
    free = free_bytes(folder)
    if free < needed_bytes:
        raise HuggingFaceError(
            f"{folder} needs {needed_bytes:,} bytes, but its disk has {free:,} free; make room, or "
            "use another disk (for temporary folders, set TMPDIR)"
        )
