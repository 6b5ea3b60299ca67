"""A checkpoint from a stranger is data and not a program."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.reader import INDEX, CheckpointReader


def test_an_index_as_torch_writes_it_is_read(tmp_path: Path) -> None:
    dcp.save({"weights.a": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    ours = CheckpointReader(tmp_path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


class Program:
    """What a pickle may be: a call of any function on the machine that reads it."""

    def __init__(self, touched: Path) -> None:
        self._touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._touched),)


def test_an_index_that_is_a_program_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(Program(tmp_path / "touched")))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which no index"):
        CheckpointReader(tmp_path).read_metadata()
    assert not (tmp_path / "touched").exists()
    with pytest.raises(AttributeError):  # torch's own reader runs it, and then misses its index
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_what_is_no_index_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not an index of tensors"):
        CheckpointReader(tmp_path).read_metadata()
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        CheckpointReader(tmp_path).read_metadata()
