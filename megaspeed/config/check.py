"""What `megaspeed check` asks: is this file right for this many processes?"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from megaspeed.config.document import read_document
from megaspeed.config.loading import find_problems
from megaspeed.config.parallel import World


def check_config(
    path: str | PathLike[str],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    world_source: str = "--world-size",
    device_type: str = "cpu",
) -> tuple[str, ...]:
    """Every problem of a config file; nothing where it can be run.

    Args:
        path: the config file.
        overrides: `key.path=value` texts.
        world_size: number of processes; None to leave out the laws that need it.
        world_source: where that number comes from, as it is named in a problem.
        device_type: "cpu" or "cuda".
    """
    world = None if world_size is None else World(world_size, world_source, device_type)
    return find_problems(read_document(Path(path), overrides), world)
