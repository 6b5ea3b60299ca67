"""The files of a checkpoint as torch.distributed.checkpoint writes them: hashed on their way to the
disk, and on it before they are closed.

The library's own flush to disk comes before Python's buffers are emptied (torch 2.13,
distributed/checkpoint/filesystem.py: ``finish`` calls fsync on an open, unflushed file), so that
the end of its index could be lost with the machine. Here the order is flush, fsync, close.
"""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import Buffer  # collections.abc has it from Python 3.12

from megaspeed.checkpoint.manifest import Checksum, FileSeal


class HashedFiles(FileSystem):
    """A local file system that remembers size and checksum of every file that it wrote."""

    def __init__(self) -> None:
        self.seals: dict[str, FileSeal] = {}
        """Of each file written, by its name."""
        self.failure: OSError | None = None
        """The first refusal of the operating system. torch's archive writer, through which the
        bytes come, tells of another error in its place."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Opens a file; one opened with mode "wb" is hashed, and flushed to the disk at the end."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        hashing = _HashingStream(Path(path))
        try:
            yield hashing
            self.seals[Path(path).name] = hashing.seal()
        except BaseException:
            self.failure = self.failure or hashing.failure
            raise
        finally:
            hashing.end()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Renames a file and what is remembered of it."""
        super().rename(path, new_path)
        self.seals[Path(new_path).name] = self.seals.pop(Path(path).name)


class _HashingStream(io.IOBase):
    """A file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._checksum = Checksum()
        self._size = 0
        self.failure: OSError | None = None

    def write(self, data: Buffer) -> int:
        self._checksum.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._size += written
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing yet: the library flushes after each of its many tensors."""

    def close(self) -> None:
        """Nothing yet: the library closes the file before it is known to be on the disk."""

    def seal(self) -> FileSeal:
        """Size and checksum, once the bytes are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileSeal(self._size, self._checksum.hexdigest())

    def end(self) -> None:
        """Closes the file, flushed or not."""
        self._file.close()
