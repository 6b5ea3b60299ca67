"""Exports a checkpoint to a folder that stock transformers loads.

    checkpoint, of any layout --one shard at a time--> OUT.writing/model-00001-of-00003.safetensors
    run state                 -----------------------> config.json, generation_config.json
    tokenizer files           -----------------------> copied
                                                           | verified
                                                           +-> OUT/

Memory holds one shard at a time. Only the comparison with transformers loads the complete model.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megaspeed.checkpoint.manifest import GENERATION, write_files
from megaspeed.checkpoint.reading import model_config, read_pieces
from megaspeed.checkpoint.tensors import WEIGHTS, Piece, key
from megaspeed.config.hugging_face import CONFIG_FILE, hugging_face_config
from megaspeed.files.durable import new_folder, refuse_existing
from megaspeed.hugging_face.tokenizer import (
    ModelTokenizer,
    find_tokenizer,
    generation_problem,
    json_file,
    read_generation,
    token_ids,
)
from megaspeed.hugging_face.verifying import Agreement, check_memory, compare
from megaspeed.hugging_face.weight_files import (
    SAFETENSORS_INDEX,
    HuggingFaceError,
    check_disk,
    is_finite,
)
from megaspeed.hugging_face.weights import Part, parts_of

Precision = Literal["float32", "bfloat16", "float16"]

MAX_SHARD_BYTES = 2 * 10**9
"""Largest size of one file of weights, unless a single tensor is larger."""


def export_model(
    checkpoint: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    precision: Precision = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> Agreement | None:
    """Writes a checkpoint's model to the folder ``out``, in transformers' format.

    Args:
        checkpoint: a complete checkpoint.
        out: must not exist. It gets this name when it is complete, and only if nothing failed.
        tokenizer: a folder or a tokenizer.json that replaces the checkpoint's own.
        precision: dtype of the weights in the files.
        max_shard_bytes: largest size of one file, and about the memory needed.
        verify: whether to compare with transformers before ``out`` gets its name.
        report: receives a line for each thing that was done.

    Returns:
        How well the two implementations agree; None if they were not compared.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: transformers' class of the family cannot compute the model.
        FileExistsError: ``out`` exists.
        HuggingFaceError: too little space, or a weight is not finite in this precision.
        DataError: the tokenizer cannot be read, or has more entries than the model.
        Disagreement: transformers computes other logits or tokens.
    """
    refuse_existing(out)
    model = model_config(checkpoint)
    config = hugging_face_config(model)
    vocabulary = find_tokenizer(
        checkpoint, model.vocab_size, named=tokenizer, mend="name another with --tokenizer"
    )
    generation = read_generation(checkpoint)
    if problem := generation_problem(generation, model):
        report(f"note: {GENERATION} of {checkpoint} is left out: {problem}")
        generation = {}
    described = _described(generation, vocabulary, tokenizer, config, precision)
    dtype: torch.dtype = getattr(torch, precision)
    parts = {part.theirs: part for part in parts_of(model)}
    split = _split(parts, dtype, max_shard_bytes)
    size_bytes: int = split.metadata["total_size"]
    check_disk(out, size_bytes)
    if verify:
        check_memory(model)
    with new_folder(out) as writing:
        for file, names in split.filename_to_tensors.items():
            _write_shard(writing / file, checkpoint, [parts[name] for name in names], dtype)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        described |= {SAFETENSORS_INDEX: index} if split.is_sharded else {}
        files = {name: json_file(values) for name, values in described.items()}
        write_files(writing, {**files, **vocabulary.files})
        agreement = compare(checkpoint, writing, dtype=dtype, strict=True) if verify else None
    count = f"{len(split.filename_to_tensors)} files" if split.is_sharded else "1 file"
    parameters = f"{size_bytes // dtype.itemsize:,} parameters, {precision}, in {count}"
    report(f"{out}: {parameters}, from {checkpoint}")
    report(str(vocabulary))
    report(str(agreement or "not verified"))
    return agreement


def _split(parts: Mapping[str, Part], dtype: torch.dtype, max_shard_bytes: int) -> StateDictSplit:
    """Which tensors are in which file."""
    with torch.device("meta"):
        shapes = {name: torch.empty(part.shape, dtype=dtype) for name, part in parts.items()}
    return split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_bytes)


def _described(
    generation: Mapping[str, Any],
    vocabulary: ModelTokenizer,
    tokenizer: Path | None,
    config: dict[str, Any],
    precision: Precision,
) -> dict[str, dict[str, Any]]:
    """Name -> content of config.json and generation_config.json, with the ids of special tokens."""
    ids = vocabulary.ids()
    # If the user named a tokenizer, its ids replace those that the model came with.
    named = token_ids(ids) if tokenizer else {}
    generation = {**ids, **generation, **named}
    # transformers 5 calls this key dtype, and reads torch_dtype as well.
    config = {**config, **ids, **token_ids(generation), "torch_dtype": precision}
    return {CONFIG_FILE: config, GENERATION: generation}


def _write_shard(file: Path, checkpoint: Path, parts: Sequence[Part], dtype: torch.dtype) -> None:
    """Writes the parts to a file, transposed and rounded as needed."""
    tensors = _read(checkpoint, parts, dtype)
    for part in parts:
        if not is_finite(tensors[part.theirs]):
            raise HuggingFaceError(_refusal(checkpoint, part, dtype))
    # save_file makes its file readable by its owner only. The user's umask should decide.
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the tensors are ours, so only the disk can be the cause
        raise OSError(f"{file} cannot be written ({error}); make room on its disk") from error
    file.chmod(mode)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _read(checkpoint: Path, parts: Sequence[Part], dtype: torch.dtype) -> dict[str, Tensor]:
    """Their name -> tensor; the checkpoint's files are read directly into these tensors."""
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
    """The error message for a tensor with values that are not finite in ``dtype``."""
    exact = _read(checkpoint, [part], torch.float32)[part.theirs]
    diverged = int((~exact.isfinite()).sum())
    if diverged:
        return (
            f"a model's weights must be finite, but {part.theirs} of {checkpoint} has "
            f"{diverged:,} NaN or infinite values of {exact.numel():,}, because its training "
            "diverged; use an earlier checkpoint"
        )
    limit, largest = torch.finfo(dtype).max, float(exact.abs().max())
    lost = int((~exact.to(dtype).isfinite()).sum())
    wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
    return (
        f"the largest number in {str(dtype).removeprefix('torch.')} is {limit:,.6g}, but "
        f"{lost:,} of the {exact.numel():,} values of {part.theirs} of {checkpoint} exceed it, "
        f"the largest {largest:,.6g}; use --dtype {wider}"
    )
