"""From a file and the command line to a config or a run, with every problem found on the way."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from megaspeed.config.document import Document, read_document
from megaspeed.config.errors import ConfigError
from megaspeed.config.parallel import World
from megaspeed.config.resolve import Run, config_problems, definite_run, launch_problems
from megaspeed.config.run import RunConfig
from megaspeed.config.validation import validate


def read_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, with what it extends, and `key.path=value` overrides over it.

    Raises:
        ConfigError: with all problems that can be seen without knowing the number of processes.
    """
    return _checked(read_document(Path(path), overrides), None, where=str(path))


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """The config of JSON values that are already in memory.

    Raises:
        ConfigError: with all problems that can be seen without knowing the number of processes.
    """
    return _checked(Document(dict(values)), None, where="the configuration")


def load_run(
    path: str | PathLike[str],
    overrides: Sequence[str] = (),
    *,
    world_size: int,
    world_source: str,
    device_type: str = "cpu",
) -> Run:
    """Read a config file and resolve it for a number of processes.

    Raises:
        ConfigError: with all problems: of the text, of each key, between keys, and with the world.
    """
    world = World(world_size, world_source, device_type)
    config = _checked(read_document(Path(path), overrides), world, where=str(path))
    return definite_run(config, Path(path).stem, world)


def find_problems(document: Document, world: World | None) -> tuple[str, ...]:
    """All that is wrong with a document; laws about the world only where one is given."""
    return _inspect(document, world)[1]


def _checked(document: Document, world: World | None, where: str) -> RunConfig:
    config, problems = _inspect(document, world)
    if problems or config is None:
        raise ConfigError(problems, where)
    return config


def _inspect(document: Document, world: World | None) -> tuple[RunConfig | None, tuple[str, ...]]:
    validated = validate(document)
    problems = list(validated.problems)
    if validated.config is not None:
        problems += config_problems(validated.config, validated.broken)
        if world is not None:
            problems += launch_problems(validated.config, world, validated.broken)
    messages = tuple(dict.fromkeys(problem.message for problem in problems))
    return validated.config, messages
