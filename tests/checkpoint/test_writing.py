"""One process writes the same files as torch.distributed.checkpoint, piece by piece."""

import errno
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megaspeed.checkpoint import writing
from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import (
    CheckpointFolder,
    FileDigest,
    file_problems,
    read_manifest,
    read_tokenizer_files,
    write_files,
)
from megaspeed.checkpoint.reading import read_index, read_pieces, tensors_of
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import Piece
from megaspeed.checkpoint.writing import write_pieces
from tests.checkpoint.written import run_state, write_checkpoint

TENSORS = {"a": torch.arange(60.0).view(10, 6), "b": torch.arange(7.0)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
IMPORTED = run_state(1, data=None, layout=None, training_seed=None, imported_from="/models/gpt2")


def by_rows(rows: int) -> Iterator[Piece]:
    """Yield the tensors in pieces of ``rows`` rows. Each piece overwrites the one before."""
    for name, tensor in TENSORS.items():
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows]
            offsets = (start, *(0 for _ in tensor.shape[1:]))
            piece = Piece(name, tuple(tensor.shape), offsets, part.clone())
            yield piece
            piece.values.fill_(-1)


def read_by_torch(folder: Path) -> dict[str, Tensor]:
    """Return the tensors as torch's own loader reads them."""
    found = {name: torch.full_like(tensor, -2) for name, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is only one process, on purpose
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def write_alone(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write a checkpoint of these pieces, without a model."""
    with mock.patch.object(writing, "expected_tensors", lambda *_: SHAPES):
        writing.write_checkpoint(folder, pieces, IMPORTED, {})


@pytest.mark.parametrize("rows", [20, 3])
def test_torch_reads_every_piece(tmp_path: Path, rows: int) -> None:
    write_alone(tmp_path, by_rows(rows))
    seals = read_manifest(tmp_path)
    assert set(seals) == {".metadata", "run_state.json", "__0_0.distcp"}
    assert file_problems(tmp_path, seals) == {}
    found = read_by_torch(tmp_path)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_files_are_those_of_torchs_own_writer(tmp_path: Path) -> None:
    """They are equal byte for byte if torch omits its checksums and writes in the same order."""
    with writing._without_crc32():
        checkpoint = write_checkpoint(CheckpointFolder(tmp_path / "checkpoints"), 100)
    index = read_index(checkpoint)
    pieces = []
    for place, _ in sorted(index.storage_data.items(), key=lambda item: item[1].offset):
        shape = tuple(tensors_of(index)[place.fqn].size)
        pieces.append(Piece(place.fqn, shape, (0,) * len(shape), torch.empty(shape)))
    read_pieces(checkpoint, pieces)
    written = write_pieces(tmp_path, pieces)
    (name,) = written.files
    assert (tmp_path / name).read_bytes() == (checkpoint / name).read_bytes()


def test_pieces_that_are_not_every_element_once_are_refused(tmp_path: Path) -> None:
    pieces = list(by_rows(20))
    with pytest.raises(CheckpointError, match=r"b \(7\) is missing in the checkpoint"):
        write_alone(tmp_path, pieces[:1])
    doubled = Piece("b", (7,), (3,), torch.zeros(4))
    with pytest.raises(CheckpointError, match="both hold some of its elements"):
        write_alone(tmp_path, [*pieces, doubled])
    assert not (tmp_path / "manifest.json").exists()


def test_a_part_of_a_larger_tensor_is_written_without_the_rest(tmp_path: Path) -> None:
    large = torch.zeros(100_000, 6)
    large[:10] = TENSORS["a"]
    write_pieces(tmp_path, [Piece("a", (10, 6), (0, 0), large[:10])])
    assert (tmp_path / "__0_0.distcp").stat().st_size < 4_000


def test_a_full_disk_is_reported_with_the_error_of_the_system(tmp_path: Path) -> None:
    """/dev/full refuses every byte, as a full disk does."""
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_pieces(tmp_path, by_rows(3))
    assert caught.value.errno == errno.ENOSPC


def test_the_tokenizers_files_are_those_that_a_folder_has(tmp_path: Path) -> None:
    assert read_tokenizer_files(None) == read_tokenizer_files(tmp_path) == {}
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("of the model")
    files = read_tokenizer_files(tmp_path)
    assert files == {"tokenizer.json": b"{}"}
    (tmp_path / "copy").mkdir()
    seals = write_files(tmp_path / "copy", files)
    assert seals == {"tokenizer.json": FileDigest.of_file(tmp_path / "copy" / "tokenizer.json")}


def test_a_state_is_of_a_run_or_of_an_import() -> None:
    """A run's state needs its data, layout and seed. The state of an import has none of them."""
    gone = {"data": None, "layout": None, "training_seed": None}
    with pytest.raises(ValueError, match="of the run that saved it are missing"):
        run_state(3, layout=None)
    state = run_state(3, **gone, imported_from="/models/gpt2")
    assert state.optimizer is None and state.origin == "imported from /models/gpt2"
    assert RunState.model_validate_json(state.to_bytes()) == state
    assert run_state(3).optimizer == "AdamW"
    assert run_state(3).origin == "saved at pp 2 x dp 1 x tp 2, ZeRO-1, bf16"
