"""Exports a checkpoint to a folder that stock transformers loads.

    checkpoint, of any layout --one shard at a time--> OUT.writing/model-00001-of-00003.safetensors
    run state                 -----------------------> config.json, generation_config.json, card
    tokenizer files           -----------------------> copied, with a token for padding
                                                           | verified
                                                           +-> OUT/

Memory holds one shard at a time. Only the comparison with transformers loads the complete model.
To compute with a checkpoint (``text_model.py``), no folder is written: transformers' model gets the
same tensors in memory.
"""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import transformers
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megaspeed.checkpoint.folders import GENERATION, write_files
from megaspeed.checkpoint.reading import read_pieces
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import ROUTER_BIAS, Piece, expected_tensors
from megaspeed.config.families import FAMILIES
from megaspeed.config.hugging_face import CONFIG_FILE, hugging_face_config
from megaspeed.config.model import ModelConfig
from megaspeed.files.durable import refuse_existing
from megaspeed.hugging_face.model_card import model_card
from megaspeed.hugging_face.tokenizer import (
    find_tokenizer,
    json_file,
    quiet_transformers,
    read_generation,
    token_ids,
)
from megaspeed.hugging_face.verifying import Agreement, compare, new_model_folder
from megaspeed.hugging_face.weights import (
    SAFETENSORS_INDEX,
    HuggingFaceError,
    Show,
    TensorPart,
    is_finite,
    parts_of,
)
from megaspeed.model.parameters import parameters_in_words
from megaspeed.units import readable_memory

Precision = Literal["float32", "bfloat16", "float16"]

MAX_SHARD_BYTES = 2 * 10**9
"""Largest size of one file of weights, and about the memory needed, unless a tensor is larger."""


def export_model(
    checkpoint: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    precision: Precision = "float32",
    verify: bool = True,
    report: Callable[[str], None] = lambda line: None,
    show: Show = lambda done, text, total: None,
) -> Agreement | None:
    """Write a checkpoint's model to the folder ``out``, in transformers' format.

    Args:
        checkpoint: a complete checkpoint.
        out: must not exist. It gets this name when it is complete, and only if nothing failed.
        tokenizer: a folder or a tokenizer.json that replaces the checkpoint's own.
        precision: dtype of the weights in the files.
        verify: whether to compare with transformers before ``out`` gets its name.
        report: receives a line for each thing that was done.
        show: receives how much is written.

    Returns:
        How well the two implementations agree; None if they were not compared.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: transformers' class of the family cannot compute the model.
        FileExistsError: ``out`` exists.
        HuggingFaceError: too little space, or a weight is not finite in this precision.
        DataError: the tokenizer cannot be read, or has more entries than the model.
        Disagreement: transformers computes other logits.
    """
    refuse_existing(out)
    model = StockModel(checkpoint, tokenizer=tokenizer, precision=precision)
    split = model.split()
    size_bytes: int = split.metadata["total_size"]
    count = f"{len(split.filename_to_tensors)} files" if split.is_sharded else "1 file"
    parameters = f"{parameters_in_words(model.ours)}, {precision}, in {count}"
    peak = readable_memory(model.peak_bytes(split))
    if split.is_sharded:
        report(f"writing {count}, one after the other, takes about {peak} of memory")

    def written(done: int) -> None:
        show(done, f"writing {count}, {peak} of memory", size_bytes)

    with new_model_folder(out, model.ours, size_bytes, verify=verify) as writing:
        written(0)
        model.write(writing, split, written)
        show(0, "comparing with transformers" * verify, 0)
        write_files(writing, {"README.md": model_card(checkpoint, out.name, parameters)})
        agreement = compare(checkpoint, writing, dtype=model.dtype, strict=True) if verify else None
    report(f"{out}: {parameters}, from {checkpoint}")
    report(str(model.tokenizer))
    report(str(agreement or "not verified"))
    return agreement


class StockModel:
    """The model of a checkpoint, as transformers has it."""

    def __init__(self, checkpoint: Path, *, tokenizer: Path | None, precision: Precision) -> None:
        """Describe the model, without reading its weights. Raises as ``export_model`` does."""
        self.checkpoint = checkpoint
        state = RunState.read(checkpoint)
        self.ours = state.model_section()
        self.dtype: torch.dtype = getattr(torch, precision)  # of the weights
        described = hugging_face_config(self.ours)
        _refuse_biases(checkpoint, self.ours)
        self.tokenizer = find_tokenizer(
            checkpoint, self.ours.vocab_size, named=tokenizer, mend="name another with --tokenizer"
        )
        ids = self.tokenizer.ids()
        # If the user named a tokenizer, its ids replace those that the model came with.
        named = {"pad_token_id": None, **token_ids(ids)} if tokenizer else {}
        # The content of generation_config.json and of config.json.
        self.generation = {**ids, **read_generation(checkpoint), **named}
        # transformers 5 calls this key dtype, and reads torch_dtype as well.
        stated = {**ids, **token_ids(self.generation), "torch_dtype": precision}
        self.config = {**described, **stated}
        # config.json does not get the ids that are added below. With an id for padding, some models
        # of transformers do not train its row of the embedding, often that of the end-of-text.
        pad, positions = self.generation.get("pad_token_id"), self.ours.max_position_embeddings
        self.tokenizer_files, padding = self.tokenizer.for_batches(positions, pad)
        self.generation["pad_token_id"] = padding if pad is None else pad
        if state.imported_from is None and self.generation["bos_token_id"] is None:
            # In training, an end-of-text was before each document.
            self.generation["bos_token_id"] = ids["eos_token_id"]
        self.parts = {part.theirs: part for part in parts_of(self.ours)}

    def load(self) -> Any:
        """Return transformers' model in evaluation mode. Its weights are read once, on the CPU."""
        model_class = getattr(transformers, FAMILIES[self.ours.architecture].class_name)
        with quiet_transformers():
            return model_class.from_pretrained(
                None,
                config=transformers.AutoConfig.for_model(**self.config),
                state_dict=self.tensors(self.parts),
                dtype=self.dtype,
            )

    def split(self) -> StateDictSplit:
        """Decide which tensors are in which file."""
        with torch.device("meta"):
            shapes = {
                name: torch.empty(part.shape, dtype=self.dtype) for name, part in self.parts.items()
            }
        return split_torch_state_dict_into_shards(shapes, max_shard_size=MAX_SHARD_BYTES)

    def peak_bytes(self, split: StateDictSplit) -> int:
        """The predicted peak of memory in ``write``: what is in use now, and the largest file."""
        sizes = {name: math.prod(part.shape) for name, part in self.parts.items()}
        largest = max(sum(sizes[n] for n in names) for names in split.filename_to_tensors.values())
        return int(psutil.Process().memory_info().rss) + largest * self.dtype.itemsize

    def write(
        self,
        folder: Path,
        split: StateDictSplit,
        progress: Callable[[int], object],
    ) -> None:
        """Write all files of the model into ``folder``. ``progress`` gets the bytes written."""
        done = 0
        for file, names in split.filename_to_tensors.items():
            _save(folder / file, self.tensors(names))
            done += (folder / file).stat().st_size
            progress(done)
        described = {CONFIG_FILE: self.config, GENERATION: self.generation}
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            described[SAFETENSORS_INDEX] = index
        files = {name: json_file(values) for name, values in described.items()}
        write_files(folder, {**files, **self.tokenizer_files})

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors from the checkpoint, transposed and rounded as needed.

        Raises HuggingFaceError if a value is not finite in this precision.
        """
        parts = [self.parts[name] for name in names]
        tensors = self._read(parts, self.dtype)
        for part in parts:
            if not is_finite(tensors[part.theirs]):
                raise HuggingFaceError(self._refusal(part))
        return tensors

    def _read(self, parts: Iterable[TensorPart], dtype: torch.dtype) -> dict[str, Tensor]:
        """Their name -> tensor; the checkpoint's files are read directly into these tensors."""
        tensors: dict[str, Tensor] = {}
        pieces: list[Piece] = []
        for part in parts:
            tensor = tensors[part.theirs] = torch.empty(part.shape, dtype=dtype)
            rows = tensor.T if part.transposed else tensor
            pieces += (
                part.piece(rows[theirs : theirs + count], start=start)
                for start, theirs, count in part.runs
            )
        read_pieces(self.checkpoint, pieces)
        return tensors

    def _refusal(self, part: TensorPart) -> str:
        """The error message for a tensor with values that are not finite in this precision."""
        exact = self._read([part], torch.float32)[part.theirs]
        lost = int((~exact.to(self.dtype).isfinite()).sum())
        limit, largest = torch.finfo(self.dtype).max, float(exact.abs().max())
        mend = "use --dtype float32"
        if not math.isfinite(largest):
            mend = "its training diverged, so use an earlier checkpoint"
        return (
            f"{lost:,} of the {exact.numel():,} values of {part.theirs} of {self.checkpoint} are "
            f"not finite in {str(self.dtype).removeprefix('torch.')}, whose largest number is "
            f"{limit:,.6g}: the largest value is {largest:,.6g}; {mend}"
        )


def _refuse_biases(checkpoint: Path, model: ModelConfig) -> None:
    """Raise HuggingFaceError if the bias of a router is not zero: transformers would ignore it."""
    tensors = expected_tensors(model, "AdamW").items()
    shapes = {name: shape for name, shape in tensors if name.startswith(f"{ROUTER_BIAS}.")}
    pieces = [Piece(name, shape, (0,), torch.zeros(shape)) for name, shape in shapes.items()]
    read_pieces(checkpoint, pieces)
    if any(piece.values.any() for piece in pieces):
        raise HuggingFaceError(
            f"{checkpoint} has a bias for the choice of experts, because model.router_bias_rate is "
            f"{model.router_bias_rate:g}, but {FAMILIES[model.architecture].class_name} of "
            "transformers has none; train with model.router_aux_loss_coef instead to export a model"
        )


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file, and flush it to the disk."""
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
