"""Reading the index of a checkpoint from an unknown source cannot run code."""

import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorStorageMetadata,
)

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import INDEX
from megaspeed.checkpoint.reading import read_index


def test_an_index_as_torch_writes_it_is_read(tmp_path: Path) -> None:
    dcp.save({"weights.a": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    ours = read_index(tmp_path)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def by_name(member: Enum, protocol: int) -> tuple[Any, ...]:
    """Pickle a member of an enumeration as Python 3.11.0 to 3.11.3 do (Debian 12 has 3.11.2)."""
    return getattr, (type(member), member.name)


def test_an_index_that_an_early_python_3_11_wrote_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these versions of Python, each save used to fail, because its own index was refused."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    dcp.save({"weights.a": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / INDEX).read_bytes()
    tensor = read_index(tmp_path).state_dict_metadata["weights.a"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.properties.memory_format is torch.contiguous_format


class Attribute:
    """A pickle that calls getattr on a class that is not an enumeration."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Metadata, "__init__")


def test_an_attribute_that_is_no_member_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(CheckpointError, match=r"names __init__ of .*, which no index"):
        read_index(tmp_path)


class Program:
    """A pickle that calls a function on the machine that reads it."""

    def __init__(self, touched: Path) -> None:
        self._touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._touched),)


def test_an_index_that_calls_a_function_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(pickle.dumps(Program(tmp_path / "touched")))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which no index"):
        read_index(tmp_path)
    assert not (tmp_path / "touched").exists()
    # Torch's own reader runs it, and then fails without an index.
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_a_file_that_is_not_an_index_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not an index of tensors"):
        read_index(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        read_index(tmp_path)
