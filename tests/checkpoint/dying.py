"""Processes that die before each change that they make to the file system."""

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from megaspeed.checkpoint.folders import CheckpointFolder, FileDigest, write_manifest

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save(folder: CheckpointFolder, step: int, content: bytes) -> Path:
    """Save a checkpoint of one file and the manifest."""
    writing = folder.begin(step)
    (writing / "tensors").write_bytes(content)
    write_manifest(writing, {"tensors": FileDigest.of(content)})
    return folder.commit(writing)


def die_at(change: int) -> None:
    """End this process, as kill -9 does, before its change of this number."""
    changes = count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (event in CHANGES or writes) and next(changes) == change:
            os._exit(9)

    sys.addaudithook(watch)


def die_everywhere(root: Path, first: list[int], step: int, keep_last: int) -> None:
    """Save in processes that die before their first change, their second one, and so on.

    For death 0, 1, 2, ... the checkpoints ``first`` are written into root/<death>. Then a forked
    process begins, writes, commits and prunes ``step``, and dies before the change of this number.
    The last process runs to its end.
    """
    for death in count():
        folder = CheckpointFolder(root / str(death))
        for earlier in first:
            save(folder, earlier, b"first")
        process = os.fork()
        if process == 0:
            die_at(death)
            folder.prune(save(folder, step, b"second"), keep_last)
            os._exit(0)
        if os.waitpid(process, 0)[1] == 0:
            return
