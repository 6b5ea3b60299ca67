"""From a checkpoint's folder into every rank's pieces, whatever layout wrote it.

Each rank reads the rectangles that its pieces overlap, and nothing else. So does a process that is
no rank of a run.
"""

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.pieces import Piece
from megaspeed.checkpoint.planners import LoadPieces
from megaspeed.checkpoint.reader import CheckpointReader
from megaspeed.checkpoint.together import first_failure, told


def read_pieces(folder: Path, pieces: Iterable[Piece], group: dist.ProcessGroup) -> None:
    """Fills every rank's pieces; all ranks of ``group`` call it together.

    Raises:
        CheckpointError: on every rank, where a rank could not read or found a part of a tensor
            missing.
    """
    reader = CheckpointReader(folder)
    try:
        dcp.load({}, storage_reader=reader, planner=LoadPieces(pieces), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: {first_failure(error)}") from error


def read_pieces_alone(folder: Path, pieces: Iterable[Piece]) -> None:
    """Fills the pieces of a process that has no others beside it, and no process group.

    These are the steps of ``dcp.load`` for one process; it would warn that there is only one.

    Raises:
        CheckpointError: a file could not be read, or a part of a tensor is missing.
    """
    reader, planner = CheckpointReader(folder), LoadPieces(pieces)
    index = reader.read_metadata()
    planner.set_up_planner({}, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{folder}: {told(error)}") from error
