"""Loads configs and runs from files, overrides and JSON values, and finds all mistakes at once."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megaspeed.config.document import Document, read_document
from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.layout import World, violations
from megaspeed.config.refusals import refuse_foreign_keys
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.config.validation import translate


def read_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a config file, with what it extends, and applies `key.path=value` overrides.

    Raises:
        ConfigError: with all problems that do not depend on the number of processes.
    """
    return _checked(read_document(Path(path), overrides), None, where=str(path))


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """The config of JSON values that are in memory.

    Raises:
        ConfigError: with all problems that do not depend on the number of processes.
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
    """Reads a config file and resolves it for a number of processes. See `resolve_run`.

    Raises:
        ConfigError: with all problems.
    """
    world = World(world_size, world_source, device_type)
    config = _checked(read_document(Path(path), overrides), world, where=str(path))
    return resolve_run(
        config,
        name=Path(path).stem,
        world_size=world_size,
        world_source=world_source,
        device_type=device_type,
    )


def find_problems(document: Document, world: World | None) -> tuple[str, ...]:
    """All problems of a document. Without a world, those that depend on it are left out."""
    return _check(document, world)[1]


def _checked(document: Document, world: World | None, where: str) -> RunConfig:
    config, problems = _check(document, world)
    if problems or config is None:
        raise ConfigError(problems, where)
    return config


def _check(document: Document, world: World | None) -> tuple[RunConfig | None, tuple[str, ...]]:
    """The config and all problems. If keys are invalid, rules about other sections still apply."""
    if not document.is_complete:
        return None, tuple(problem.message for problem in document.problems)
    values, refused = refuse_foreign_keys(document.values)
    values, file_origins, file_problems = fill_from_hugging_face(values)
    found = [*refused, *file_problems]
    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        # Fields of the model are missing if the file that states them cannot be read.
        found += [
            problem
            for problem in translate(error, values)
            if not file_problems or problem.path[:1] != ("model",)
        ]
    origins = {**document.origins, **file_origins}
    problems = [*document.problems, *(_with_origin(each, origins) for each in found)]
    wrong = {path[0] for problem in problems for path in (problem.path, problem.meant) if path}
    fields = dict(config) if config is not None else _fields_without(wrong, values)
    valid = {name: value for name, value in fields.items() if name not in wrong}
    messages = [*(problem.message for problem in problems), *violations(valid, world)]
    return config, tuple(dict.fromkeys(messages))


def _fields_without(wrong: Set[str | int], values: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields of a `RunConfig`."""
    return {
        name: TypeAdapter(field.annotation).validate_python(values[name])
        if name in values
        else field.get_default(call_default_factory=True)
        for name, field in RunConfig.model_fields.items()
        if name not in wrong
    }


def _with_origin(problem: Problem, origins: Mapping[KeyPath, str]) -> Problem:
    """Adds the origin to the message if the key is not in the config file itself."""
    names = tuple(takewhile(lambda part: isinstance(part, str), problem.path))
    origin = origins.get(names)
    return replace(problem, message=f"{problem.message} (from {origin})") if origin else problem
