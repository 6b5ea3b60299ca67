"""Imports a Hugging Face model as a checkpoint, from which a run of any layout starts.

    config.json -> model section            tensors -> rows of ours, fp32 -> OUT.writing/
                                                                                | verified
    tokenizer files, generation_config.json ------------------------------------+-> OUT/

OUT has weights and no optimizer state, and its step is 0. Memory holds one piece of one tensor at a
time. Only the comparison with transformers loads the complete model.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from megaspeed.checkpoint.folders import GENERATION
from megaspeed.checkpoint.run_state import Progress, RunState
from megaspeed.checkpoint.tensors import (
    BYTES_PER_ELEMENT,
    LARGEST_PIECE_BYTES,
    Piece,
    expected_shapes,
)
from megaspeed.checkpoint.writing import write_checkpoint
from megaspeed.config.document import describe_value
from megaspeed.config.families import FAMILIES
from megaspeed.config.hugging_face import read_keys
from megaspeed.config.loading import parse_config
from megaspeed.config.model import ModelConfig
from megaspeed.files.durable import refuse_existing
from megaspeed.files.paths import special_among
from megaspeed.hugging_face.tokenizer import (
    ModelTokenizer,
    find_tokenizer,
    json_file,
    read_generation,
    token_ids,
)
from megaspeed.hugging_face.verifying import Agreement, compare, new_model_folder
from megaspeed.hugging_face.weights import (
    HuggingFaceError,
    Show,
    StoredTensor,
    TensorPart,
    matching_tensors,
    open_tensors,
    parts_of,
)
from megaspeed.model.parameters import parameters_in_words
from megaspeed.version import __version__


def import_model(
    folder: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    with_tokenizer: bool = True,
    verify: bool = True,
    report: Callable[[str], None] = lambda line: None,
    show: Show = lambda done, text, total: None,
) -> Agreement | None:
    """Write the model in ``folder`` to the checkpoint ``out``.

    Args:
        folder: a folder as save_pretrained writes it.
        out: must not exist. It gets this name when it is complete, and only if nothing failed.
        tokenizer: a folder or a tokenizer.json that replaces the one beside the model.
        with_tokenizer: whether the checkpoint carries a tokenizer.
        verify: whether to compare with transformers before ``out`` gets its name.
        report: receives a line for each thing that was done.
        show: receives how much is written.

    Returns:
        How well the two implementations agree; None if they were not compared.

    Raises:
        ConfigError: config.json describes a model that ours cannot express.
        FileExistsError: ``out`` exists.
        HuggingFaceError: the weights do not match config.json, or there is too little space.
        DataError: the tokenizer cannot be read, or has more entries than the model.
        Disagreement: transformers computes other logits.
    """
    refuse_existing(out)
    model = _model_of(folder)
    vocabulary = ModelTokenizer({})
    if with_tokenizer:
        mend = "name another with --tokenizer, or omit it with --no-tokenizer"
        vocabulary = find_tokenizer(folder, model.vocab_size, named=tokenizer, mend=mend)
    # If the user named a tokenizer, its ids replace those that the model came with.
    named = token_ids(vocabulary.ids()) if tokenizer else {}
    keys = {**token_ids(read_keys(str(folder))), **read_generation(folder), **named}
    stored = matching_tensors(model, open_tensors(folder))
    parameters = sum(map(math.prod, expected_shapes(model).values()))
    beside = {**vocabulary.files, **({GENERATION: json_file(keys)} if keys else {})}
    state = RunState(
        imported_from=str(folder.resolve()),
        progress=Progress(),
        config={"model": model.model_dump(mode="json", exclude_none=True)},
        software={
            "megaspeed": __version__,
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
        },
    )
    with new_model_folder(out, model, parameters * BYTES_PER_ELEMENT, verify=verify) as writing:
        text = f"importing {folder}"
        pieces = _pieces(model, stored, lambda done: show(done, text, parameters))
        write_checkpoint(writing, pieces, state, beside)
        show(0, "comparing with transformers" * verify, 0)
        agreement = compare(writing, folder) if verify else None
    report(f"{out}: {parameters_in_words(model)}, from {folder}")
    report(str(vocabulary))
    report(str(agreement or "not verified"))
    return agreement


def _model_of(folder: Path) -> ModelConfig:
    """The model that config.json describes, after it is checked. Its shape is checked as in a run.

    Raises:
        ConfigError: ours cannot express it.
        HuggingFaceError: its weights are quantized, or a file in the folder is not a regular file.
    """
    model = parse_config(
        {
            "model": {"from_hf": str(folder)},
            "data": {"sequence_length": 1},
            "training": {"steps": 1},
            "train_batch_size": 1,
        }
    ).model
    quantized = read_keys(str(folder)).get("quantization_config")
    if quantized:
        raise HuggingFaceError(
            f"imported weights must not be quantized, but quantization_config of {folder} is "
            f"{describe_value(quantized)}; import the model that they were made from"
        )
    special = next(special_among(sorted(folder.iterdir())), None)
    if special is not None:
        raise HuggingFaceError(f"{special}; remove it, or download the model again")
    return model


def _pieces(
    model: ModelConfig, stored: Mapping[str, StoredTensor], progress: Callable[[int], object]
) -> Iterator[Piece]:
    """The pieces of our tensors. Each is read when it is needed. ``progress`` gets the elements."""
    done = 0
    prefix = FAMILIES[model.architecture].prefix
    for part in parts_of(model):
        tensor = stored[part.theirs.removeprefix(prefix)]
        width = math.prod(part.full_shape[1:])
        at_once = max(1, LARGEST_PIECE_BYTES // (BYTES_PER_ELEMENT * width))
        for first, theirs, count in part.runs:
            for start in range(0, count, at_once):
                rows = slice(theirs + start, theirs + min(start + at_once, count))
                yield part.piece(_rows_of(tensor, rows, part).contiguous(), start=first + start)
                done += width * (rows.stop - rows.start)
                progress(done)


def _rows_of(tensor: StoredTensor, rows: slice, part: TensorPart) -> Tensor:
    """Rows in our layout. In a transposed tensor, these are columns."""
    return tensor.read(slice(None), rows).T if part.transposed else tensor.read(rows)
