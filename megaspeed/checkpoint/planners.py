"""Pieces in the terms of torch.distributed.checkpoint: what to write, and what to read where.

The library asks its planners. To save, each rank names the rectangles that it writes; rank 0 checks
that together they are each of the named tensors once, and makes an index of them. To load, each
rank names the rectangles that it needs, and the library finds the saved ones that they overlap.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.pieces import Piece


class SavePieces(DefaultSavePlanner):
    """Writes this rank's pieces."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        self.plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of one item of the plan."""
        values = self._pieces[index].values
        if not values.is_cpu:
            return values
        # The same memory as a storage of its own: torch would clone a part of a larger storage
        # before it writes it, and keep the clone until the file is closed.
        return torch.from_numpy(values.numpy())


class LoadPieces(DefaultLoadPlanner):
    """Reads into this rank's pieces, all of every one."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the index of the checkpoint."""
        assert metadata is not None
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Raises:
            CheckpointError: a part of a piece stands nowhere in the checkpoint.
        """
        by_key: dict[str, list[Piece]] = defaultdict(list)
        for piece in self._pieces.values():
            by_key[piece.key].append(piece)
        return LoadPlan(
            [item for key, pieces in by_key.items() for item in self._reads(key, pieces)]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The values that one item of the plan reads into."""
        return self._pieces[index].values

    def _reads(self, key: str, pieces: list[Piece]) -> list[ReadItem]:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{key} is missing in the checkpoint")
        if saved.properties.dtype != torch.float32:
            raise CheckpointError(f"{key} is {saved.properties.dtype}, and every tensor is float32")
        items = create_read_items_for_chunk_list(key, saved, [_chunk(piece) for piece in pieces])
        found = sum(item.lengths.numel() for item in items)
        wanted = sum(piece.values.numel() for piece in pieces)
        if found != wanted:
            raise CheckpointError(
                f"a rank needs {wanted:,} elements of {key}, and the checkpoint has {found:,} of "
                "them"
            )
        return items


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, piece.offsets)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.shape)


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=_index(piece),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties(dtype=piece.values.dtype),
            size=torch.Size(piece.full_shape),
        ),
    )
