"""What a pass over large files found, remembered for as long as the files stay as they are.

    path, size, mtime, ctime of the files  --one pass, once per machine-->  facts in the cache

They are remembered only where any later change of a file must show in its state; so a warm start
reads no more than the files' states.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megaspeed.data.cache import Cache, cache_key
from megaspeed.files.json_values import Facts
from megaspeed.files.reading import are_settled, state_of

logger = logging.getLogger(__name__)


def remembered(
    cache: Cache,
    room: str,
    version: int,
    files: Sequence[Path],
    read: Callable[[], Facts],
    purpose: str,
) -> Facts:
    """`read()`, or what it gave when these files were as they are now.

    Args:
        cache: where it is remembered.
        room: the folder of the cache for facts of this kind.
        version: of the facts; those of another version are not found.
        files: everything that the facts depend on.
        read: reads them; only called under the cache's lock, so once on a machine.
        purpose: of the reading, for the log.
    """
    path = cache.root / room / f"{cache_key(version, [state_of(file) for file in files])}.json"
    facts = cache.read_index(path)
    if facts is None:
        with cache.lock():
            facts = cache.read_index(path)  # another process may have been at it
            if facts is None:
                seen_at = time.time()
                states = [state_of(file) for file in files]
                logger.info("reading %s once, %s", files[0], purpose)
                facts = read()
                if states == [state_of(file) for file in files] and are_settled(states, seen_at):
                    cache.write_index(path, facts)
    return facts
