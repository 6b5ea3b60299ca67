"""Token files of other tools, written as those tools write them."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def write_nanogpt(path: Path, ids: list[int]) -> Path:
    """Write 16-bit ids as nanoGPT's data/*/prepare.py does, with numpy's ``tofile``."""
    np.array(ids, dtype=np.uint16).tofile(path)
    return path


def write_megatron(
    prefix: Path,
    documents: list[list[list[int]]],
    dtype: str = "u2",
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    pointers: list[int] | None = None,
    bounds: list[int] | None = None,
) -> Path:
    """Write .bin and .idx as Megatron-LM's ``IndexedDatasetBuilder`` does.

    Args:
        prefix: NAME of NAME.bin and NAME.idx.
        documents: each of them sequences of ids.
        dtype: numpy's short name.
        magic, version, pointers, bounds: values of a damaged or foreign index.
    """
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    itemsize = np.dtype(dtype).itemsize
    if pointers is None:
        pointers = [sum(lengths[:number]) * itemsize for number in range(len(lengths))]
    if bounds is None:
        counts = [len(document) for document in documents]
        bounds = [sum(counts[:number]) for number in range(len(counts) + 1)]
    ids: list[Any] = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(ids, dtype=f"<{dtype}").tobytes())
    Path(f"{prefix}.idx").write_bytes(
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", _CODES[dtype])
        + struct.pack("<QQ", len(lengths), len(bounds))
        + np.array(lengths, dtype="<i4").tobytes()
        + np.array(pointers, dtype="<i8").tobytes()
        + np.array(bounds, dtype="<i8").tobytes()
    )
    return prefix
