"""Errors of checkpoints. All ranks raise them together (``supervision/answers.py``)."""

import errno

import torch.distributed as dist

from megaspeed.supervision.answers import RankFailed, describe

_TRANSIENT = (
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENETDOWN, errno.EHOSTDOWN),
)
"""Errors of disks and of network file systems."""


class CheckpointError(RankFailed):
    """A checkpoint cannot be written, found, read or loaded."""

    @classmethod
    def of(cls, error: BaseException) -> "CheckpointError":
        """Return a StorageFailed if the disk or the network failed, otherwise a CheckpointError."""
        if isinstance(error, OSError):
            transient = error.errno in _TRANSIENT
        else:
            transient = isinstance(error, StorageFailed | dist.DistError)
        return (StorageFailed if transient else CheckpointError)(describe(error))


class StorageFailed(CheckpointError):
    """The disk or the network failed, not the input. Another attempt may succeed."""
