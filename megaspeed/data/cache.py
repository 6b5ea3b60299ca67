"""The cache on disk: files that are either whole and sealed, or rebuilt.

    payload    written under a temporary name, flushed to the disk, renamed
    index      a small JSON beside it, written the same way and only afterwards, with the payload's
               size and checksum, facts about it, and a hash of itself

A process may die at any point: a payload without its index, or one that its index does not
describe, is built again. What a running job has mapped stays valid, because renaming replaces the
name and not the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from megaspeed.data.errors import DataError
from megaspeed.files.durable import TEMPORARY, write_file
from megaspeed.files.json_values import Facts, read_sealed, write_sealed
from megaspeed.files.paths import expand_home
from megaspeed.files.reading import sha256_of, spaced_sample

__all__ = ["CACHE_VARIABLE", "Cache", "Facts", "cache_key", "default_cache_dir", "index_path"]

CACHE_VARIABLE = "MEGASPEED_CACHE"
_BLOCK_BYTES = 1 << 20
_BLOCKS_CHECKED = 64
_KEY_DIGITS = 32
_SILENT_SECONDS = 10.0
_ANY_KEY = "[0-9a-f]" * _KEY_DIGITS


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """$MEGASPEED_CACHE, else ~/.cache/megaspeed."""
    chosen = environ.get(CACHE_VARIABLE)
    return expand_home(chosen) if chosen else Path.home() / ".cache" / "megaspeed"


def cache_key(*parts: Any) -> str:
    """32 hexadecimal digits that name an entry by everything it was made from (JSON values)."""
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True)
class Cache:
    """A folder of sealed files, shared by the processes of a machine.

    Attributes:
        root: the folder.
        speaks: whether to report on standard error that another process holds the lock.
    """

    root: Path
    speaks: bool = True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time writes; the kernel frees the lock of a process that died.

        A thread that holds it may enter it again. A process that waits for more than ten seconds
        reports once who holds it.

        Raises:
            DataError: the folder cannot be made or written to.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.root / "write.lock", is_singleton=True)
            try:
                lock.acquire(timeout=_SILENT_SECONDS)
            except Timeout:
                if self.speaks:
                    sys.stderr.write(f"{self._who_is_writing()}\n")
                lock.acquire()
        except OSError as error:
            raise _cannot_write(self.root, error) from error
        try:
            if lock.lock_counter == 1:  # else what is being written further out is no leftover
                self._remove_leftovers()
                with suppress(OSError):  # it only names this process to those that wait
                    self._holder.write_text(f"{socket.gethostname()} {os.getpid()}\n")
            yield
        finally:
            if lock.lock_counter == 1:
                with suppress(OSError):
                    self._holder.unlink(missing_ok=True)  # the next process writes its own
            lock.release()

    def write(self, path: Path, fill: Callable[[BinaryIO], Facts]) -> Facts:
        """Writes the payload `path` with `fill`, then its index; returns what the index says.

        Only under `lock`. `fill` writes to the open file and returns the facts of the index.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = write_file(path, fill)
            facts |= {"bytes": path.stat().st_size, "checksum": _checksum(path)}
        except OSError as error:
            raise _cannot_write(path, error) from error
        self.write_index(index_path(path), facts)
        return facts

    def write_index(self, path: Path, facts: Facts) -> None:
        """Writes facts alone, with a hash of themselves. Only under `lock`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, facts)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def read(self, path: Path) -> Facts | None:
        """The facts of a payload that is whole, else None."""
        facts = self.read_index(index_path(path))
        try:
            if facts is None or path.stat().st_size != facts["bytes"]:
                return None
            return facts if _checksum(path) == facts["checksum"] else None
        except (OSError, KeyError):
            return None

    def read_index(self, path: Path) -> Facts | None:
        """The facts at `path` if they are whole, else None."""
        return read_sealed(path)

    @property
    def _holder(self) -> Path:
        """The file that names the process that holds the lock."""
        return self.root / "write.lock.holder"

    def _who_is_writing(self) -> str:
        try:
            host, process = self._holder.read_text().split()
        except (OSError, ValueError):
            holder = ""
        else:
            holder = f" (process {process} on {host})"
        return (
            f"another process{holder} is preparing data in {self.root}; waiting until it is done. "
            f"To prepare it elsewhere, set {CACHE_VARIABLE} to another folder"
        )

    def _remove_leftovers(self) -> None:
        """Of entries that somebody died of; others may keep files of their own in the folder."""
        for place in (f"*/{_ANY_KEY}*{TEMPORARY}", f"*/{_ANY_KEY}/*{TEMPORARY}"):
            for leftover in self.root.glob(place):
                if leftover.is_file():
                    leftover.unlink(missing_ok=True)


def index_path(path: Path) -> Path:
    """Where the index of a payload is."""
    return path.with_name(path.name + ".index.json")


def _checksum(path: Path) -> str:
    """sha256 over a file of up to 64 MiB, or over 64 evenly spaced MiB (first and last) of more.

    Bounded, so that thousands of ranks can check a file of any size as they start; the size itself
    is checked apart.
    """
    if path.stat().st_size <= _BLOCKS_CHECKED * _BLOCK_BYTES:
        return sha256_of(path)
    return spaced_sample(path, _BLOCKS_CHECKED, _BLOCK_BYTES)


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"prepared data must be kept on disk, and {path} cannot be written ({error.strerror}); "
        f"set {CACHE_VARIABLE} to a folder with room"
    )
