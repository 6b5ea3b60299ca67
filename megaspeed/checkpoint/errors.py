"""The errors of checkpoints: what does not fit or is not whole, and how to mend it."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read or taken."""


class StorageFailed(CheckpointError):
    """The disk or the network failed, not the input: another attempt may succeed."""
