"""The cache on disk, which all processes of a machine share.

    CACHE/text/KEY/...             the tokens of a corpus of text, see ``text_cache.py``
    CACHE/checksums/KEY.json       the checksum of a shard of a token folder
    CACHE/surveys/KEY.json         what a pass over a .bin of ids found
    CACHE/write.lock               held by the process that writes

A process may be killed at any moment, so every entry is written under a temporary name and renamed.
Files that a running job has mapped stay valid, because renaming replaces only the name.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspeed.data.errors import DataError
from megaspeed.files.durable import Locked, lock
from megaspeed.files.json_values import Facts, hash_of, read_sealed, write_sealed
from megaspeed.files.paths import expand_home, state_of

logger = logging.getLogger(__name__)

_SECONDS_BEFORE_REPORT = 10.0
CACHE_VARIABLE = "MEGASPEED_CACHE"
_KEY_DIGITS = 32
# Part of the key of facts about files. Increment it if the same file gives other facts.
_FORMAT = 1

ANY_KEY = "[0-9a-f]" * _KEY_DIGITS
"""A glob that matches every key. What it does not match may belong to the user."""


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return $MEGASPEED_CACHE, otherwise ~/.cache/megaspeed."""
    chosen = environ.get(CACHE_VARIABLE)
    return expand_home(chosen) if chosen else Path.home() / ".cache" / "megaspeed"


def cache_key(*parts: Any) -> str:
    """Name an entry: 32 hexadecimal digits, a hash of everything it was made from."""
    return hash_of(parts)[:_KEY_DIGITS]


Preparation = Callable[[str, int, int], None]
"""Called with the name of a phase, its bytes that are done, and all its bytes (0 if unknown)."""


@dataclass(frozen=True)
class Cache:
    """A folder that the processes of a machine share."""

    root: Path
    # Whether to report on standard error that another process holds the lock.
    reports_waits: bool = True
    progress: Preparation = lambda *_: None  # called while text is prepared

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock, because only one process may write. A thread may enter it repeatedly.

        A process that waits for more than ten seconds reports once which process it waits for.

        Raises DataError if the folder cannot be created or written to.
        """
        file = self.root / "write.lock"
        with ExitStack() as stack:
            for patience in (_SECONDS_BEFORE_REPORT, math.inf):
                try:
                    stack.enter_context(lock(file, wait_seconds=patience, reentrant=True))
                    break
                except Locked as error:
                    self._report_wait(error.holder)
                except OSError as error:
                    raise cannot_write(self.root, error) from error
            yield

    def _report_wait(self, holder: str | None) -> None:
        if not self.reports_waits:
            return
        sys.stderr.write(
            f"another process{f' ({holder})' if holder else ''} is preparing data in {self.root}; "
            f"waiting until it is done. To prepare it elsewhere, set {CACHE_VARIABLE} to another "
            "folder\n"
        )


def remembered(cache: Cache, kind: str, file: Path, read: Callable[[], Facts]) -> Facts:
    """Return ``read()``, or its earlier result if the file has not changed since.

    The facts are stored under the path, size, mtime and ctime of the file.

    Args:
        kind: the folder of the cache for these facts.
        file: the file that the facts depend on.
        read: reads the file. Called under the cache's lock, so only once on a machine.
    """
    path = cache.root / kind / f"{cache_key(_FORMAT, [state_of(file)])}.json"
    facts = read_sealed(path)
    if facts is None:
        with cache.lock():
            facts = read_sealed(path)  # another process may have written it
            if facts is None:
                state = state_of(file)
                logger.info("reading %s once", file)
                facts = read()
                if state == state_of(file):
                    _store(path, facts)
    return facts


def _store(path: Path, facts: Facts) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, facts)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> DataError:
    """Return the error that ``path`` of the cache cannot be written."""
    return DataError(
        f"prepared data must be kept on disk, but {path} cannot be written "
        f"({error.strerror or error}); set {CACHE_VARIABLE} to a folder with room"
    )
