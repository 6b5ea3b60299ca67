"""The cache on disk. A file is either complete and matches its checksum, or it is built again.

    payload    written under a temporary name, flushed to the disk, renamed
    index      a small JSON file beside the payload, written after it: the payload's size and
               checksum, facts about it, and a hash of the index itself

A process may be killed at any moment. If a payload has no index, or its index does not match, it
is built again. Files that a running job has mapped stay valid, because renaming replaces only the
name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megaspeed.data.errors import DataError
from megaspeed.files.durable import TEMPORARY, write_file
from megaspeed.files.json_values import Facts, read_sealed, write_sealed
from megaspeed.files.lock import lock
from megaspeed.files.paths import expand_home
from megaspeed.files.reading import are_settled, sha256_of, spaced_sample, state_of

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MEGASPEED_CACHE"
_BLOCK_BYTES = 1 << 20
_BLOCKS_CHECKED = 64
_KEY_DIGITS = 32
_ANY_KEY = "[0-9a-f]" * _KEY_DIGITS


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """$MEGASPEED_CACHE, otherwise ~/.cache/megaspeed."""
    chosen = environ.get(CACHE_VARIABLE)
    return expand_home(chosen) if chosen else Path.home() / ".cache" / "megaspeed"


def cache_key(*parts: Any) -> str:
    """The name of an entry: 32 hexadecimal digits, a hash of everything it was made from."""
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True)
class Cache:
    """A folder of files with checksums, shared by the processes of a machine.

    Attributes:
        root: the folder.
        reports_waits: whether to report on standard error that another process holds the lock.
    """

    root: Path
    reports_waits: bool = True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """A lock, because only one process may write at a time. A thread may enter it repeatedly.

        A process that waits for more than ten seconds reports once which process it waits for.

        Raises:
            DataError: the folder cannot be created or written to.
        """
        with ExitStack() as stack:
            try:
                held = lock(
                    self.root / "write.lock",
                    wait_seconds=math.inf,
                    on_wait=self._report_wait if self.reports_waits else None,
                    reentrant=True,
                )
                if stack.enter_context(held):  # otherwise an outer block already holds the lock
                    self._remove_leftovers()
            except OSError as error:
                raise _cannot_write(self.root, error) from error
            yield

    def write(self, path: Path, fill: Callable[[BinaryIO], Facts]) -> None:
        """Writes the payload `path` with `fill`, then its index. The caller must hold `lock`.

        `fill` writes to the open file and returns facts for the index.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = write_file(path, fill)
            facts |= {"bytes": path.stat().st_size, "checksum": _checksum(path)}
        except OSError as error:
            raise _cannot_write(path, error) from error
        self.write_index(index_path(path), facts)

    def write_index(self, path: Path, facts: Facts) -> None:
        """Writes facts without a payload, with their hash. The caller must hold `lock`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, facts)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def read(self, path: Path) -> Facts | None:
        """The facts about a payload; None if it is missing or damaged."""
        facts = read_sealed(index_path(path))
        try:
            if facts is None or path.stat().st_size != facts["bytes"]:
                return None
            return facts if _checksum(path) == facts["checksum"] else None
        except (OSError, KeyError):
            return None

    def _report_wait(self, holder: str | None) -> None:
        sys.stderr.write(
            f"another process{f' ({holder})' if holder else ''} is preparing data in {self.root}; "
            f"waiting until it is done. To prepare it elsewhere, set {CACHE_VARIABLE} to another "
            "folder\n"
        )

    def _remove_leftovers(self) -> None:
        """Removes files of killed processes, and no other files, which may belong to the user."""
        for place in (f"*/{_ANY_KEY}*{TEMPORARY}", f"*/{_ANY_KEY}/*{TEMPORARY}"):
            for leftover in self.root.glob(place):
                if leftover.is_file():
                    leftover.unlink(missing_ok=True)


def remembered(
    cache: Cache,
    kind: str,
    version: int,
    files: Sequence[Path],
    read: Callable[[], Facts],
    purpose: str,
) -> Facts:
    """Returns `read()`, or its earlier result if the files have not changed since.

    The facts are stored under the path, size, mtime and ctime of the files. They are stored only if
    any later change of a file is certain to change these.

    Args:
        cache: the cache that stores the facts.
        kind: the folder of the cache for these facts.
        version: the version of the facts. Facts of other versions are ignored.
        files: all files that the facts depend on.
        read: reads the files. Called under the cache's lock, so only once on a machine.
        purpose: why the files are read, for the log.
    """
    path = cache.root / kind / f"{cache_key(version, [state_of(file) for file in files])}.json"
    facts = read_sealed(path)
    if facts is None:
        with cache.lock():
            facts = read_sealed(path)  # another process may have written it
            if facts is None:
                seen_at = time.time()
                states = [state_of(file) for file in files]
                logger.info("reading %s once, %s", files[0], purpose)
                facts = read()
                if states == [state_of(file) for file in files] and are_settled(states, seen_at):
                    cache.write_index(path, facts)
    return facts


def index_path(path: Path) -> Path:
    """The index of a payload."""
    return path.with_name(path.name + ".index.json")


def _checksum(path: Path) -> str:
    """sha256 over a file of up to 64 MiB, or over 64 evenly spaced MiB of a larger one.

    The size is bounded, so that thousands of ranks can check a file of any size at their start.
    """
    if path.stat().st_size <= _BLOCKS_CHECKED * _BLOCK_BYTES:
        return sha256_of(path)
    return spaced_sample(path, _BLOCKS_CHECKED, _BLOCK_BYTES)


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"prepared data must be kept on disk, but {path} cannot be written ({error.strerror}); "
        f"set {CACHE_VARIABLE} to a folder with room"
    )
