"""A checkpoint into a folder that stock transformers loads.

    checkpoint, of any layout --one shard at a time--> OUT.writing/model-00001-of-00003.safetensors
    run state                 -----------------------> config.json, generation_config.json
    tokenizer files           -----------------------> beside them
                                                           | verified
                                                           +-> OUT/

What is held in memory is one shard; only the comparison with transformers takes a whole model.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megaspeed.checkpoint.manifest import write_files
from megaspeed.checkpoint.pieces import Piece
from megaspeed.checkpoint.reading import GENERATION, model_config, read_pieces
from megaspeed.checkpoint.tensors import WEIGHTS, key
from megaspeed.config.hugging_face import CONFIG_FILE, hugging_face_config
from megaspeed.files.durable import new_folder, refuse_existing
from megaspeed.hugging_face.errors import HuggingFaceError
from megaspeed.hugging_face.free_space import check_disk
from megaspeed.hugging_face.generation import json_file, read_generation, token_ids
from megaspeed.hugging_face.tokenizer import find_tokenizer
from megaspeed.hugging_face.verifying import Agreement, check_room, compare
from megaspeed.hugging_face.weight_files import SAFETENSORS, SAFETENSORS_INDEX
from megaspeed.hugging_face.weights import Part, parts_of

Precision = Literal["float32", "bfloat16", "float16"]

MAX_SHARD_BYTES = 2 * 10**9
"""Bytes of one file of weights, unless one tensor has more."""


def export_model(
    checkpoint: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    precision: Precision = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Agreement | None:
    """Writes the Hugging Face model ``out`` of a checkpoint.

    Args:
        checkpoint: one that is whole.
        out: is not there yet; it appears whole or not at all.
        tokenizer: a folder or a tokenizer.json, instead of the one that the checkpoint carries.
        precision: of the weights in the files.
        max_shard_bytes: of one file, and about the memory that is taken.
        verify: compare with transformers before ``out`` appears.
        tell: is told what was done, a line each.

    Returns:
        How well the two agree; None where they were not compared.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: transformers' class of the family cannot compute the model.
        FileExistsError: ``out`` is there.
        HuggingFaceError: there is no room, or a weight is not finite in this precision.
        DataError: the tokenizer is none, or not the model's.
        Disagreement: transformers computes something else.
    """
    refuse_existing(out)
    model = model_config(checkpoint)
    shape = hugging_face_config(model)
    vocabulary = find_tokenizer(
        checkpoint, model.vocab_size, named=tokenizer, mend="name another with --tokenizer"
    )
    ids = vocabulary.ids()
    # Of a tokenizer that was named, the ids count; else those that the model came with.
    generation = {**ids, **read_generation(checkpoint), **(token_ids(ids) if tokenizer else {})}
    dtype: torch.dtype = getattr(torch, precision)
    parts = list(parts_of(model))
    check_disk(out, _bytes(parts, dtype))
    if verify:
        check_room(model)
    with new_folder(out) as writing:
        shards = _shards(parts, dtype, max_shard_bytes)
        index = _write_weights(writing, checkpoint, shards, dtype)
        # torch_dtype: transformers 5 calls it dtype and reads both.
        config = {**shape, **ids, **token_ids(generation)}
        described = {CONFIG_FILE: {**config, "torch_dtype": precision}, GENERATION: generation}
        described |= index
        files = {name: json_file(values) for name, values in described.items()}
        write_files(writing, {**files, **vocabulary.files})
        agreement = compare(checkpoint, writing, dtype=dtype, strict=True) if verify else None
    tell(
        f"{out}: {_elements(parts):,} parameters, {precision}, in {_counted(len(shards))}, "
        f"from {checkpoint}"
    )
    tell(str(vocabulary))
    tell(str(agreement or "not verified"))
    return agreement


def _shards(parts: Iterable[Part], dtype: torch.dtype, most: int) -> list[list[Part]]:
    """The parts in order, as many in each file as it may hold, and at least one."""
    shards: list[list[Part]] = []
    held = 0
    for part in parts:
        size = _bytes([part], dtype)
        if not shards or held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(part)
        held += size
    return shards


def _write_weights(
    folder: Path, checkpoint: Path, shards: Sequence[Sequence[Part]], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """One file after the other; returns the index by its name, where there are several."""
    names = _file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, checkpoint, shard, dtype)
    return {SAFETENSORS_INDEX: _index(names, shards, dtype)} if len(shards) > 1 else {}


def _write_shard(file: Path, checkpoint: Path, parts: Sequence[Part], dtype: torch.dtype) -> None:
    """The parts into a file, turned and rounded on the way."""
    tensors = _read(checkpoint, parts, dtype)
    for part in parts:
        # Unlike isfinite it takes no memory of the tensor's size; a NaN is both of what it gives.
        if not all(map(math.isfinite, map(float, tensors[part.theirs].aminmax()))):
            raise HuggingFaceError(_refusal(checkpoint, part, dtype))
    # The library keeps others from reading what it writes; who may is the user's umask's matter.
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # its only cause is the disk: the tensors are ours
        raise OSError(f"{file} cannot be written ({error}); make room on its disk") from error
    file.chmod(mode)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _read(checkpoint: Path, parts: Sequence[Part], dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> tensor of theirs, each read straight into its place."""
    tensors = {part.theirs: torch.empty(part.shape, dtype=dtype) for part in parts}
    pieces = [
        Piece(
            key(WEIGHTS, part.ours),
            part.full_shape,
            (part.rows.start, *(0 for _ in part.full_shape[1:])),
            tensors[part.theirs].T if part.transposed else tensors[part.theirs],
        )
        for part in parts
    ]
    read_pieces(checkpoint, pieces)
    return tensors


def _refusal(checkpoint: Path, part: Part, dtype: torch.dtype) -> str:
    """Why a tensor with values that are not finite in ``dtype`` is not written, and the mend."""
    exact = _read(checkpoint, [part], torch.float32)[part.theirs]
    diverged = int((~exact.isfinite()).sum())
    if diverged:
        return (
            f"a model's weights are finite numbers, and {part.theirs} of {checkpoint} holds "
            f"{diverged:,} NaN or infinite ones of {exact.numel():,}, because its training "
            "diverged; take an earlier checkpoint"
        )
    limit, largest = torch.finfo(dtype).max, float(exact.abs().max())
    lost = int((~exact.to(dtype).isfinite()).sum())
    wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
    return (
        f"{str(dtype).removeprefix('torch.')} holds no number beyond {limit:,.6g}, and "
        f"{part.theirs} of {checkpoint} has {lost:,} of {exact.numel():,}, the largest "
        f"{largest:,.6g}; take --dtype {wider}"
    )


def _file_names(shards: int) -> list[str]:
    if shards == 1:
        return [SAFETENSORS]
    return [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]


def _index(
    names: Sequence[str], shards: Sequence[Sequence[Part]], dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(_bytes(shard, dtype) for shard in shards)},
        "weight_map": {
            part.theirs: name for name, shard in zip(names, shards, strict=True) for part in shard
        },
    }


def _elements(parts: Iterable[Part]) -> int:
    return sum(math.prod(part.shape) for part in parts)


def _bytes(parts: Iterable[Part], dtype: torch.dtype) -> int:
    return _elements(parts) * dtype.itemsize


def _counted(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"
