"""Loads configs and runs from files, overrides and JSON values, and finds all mistakes at once."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspeed.config.document import Document, read_document
from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.layout import LAUNCH_RULES, Launch, World
from megaspeed.config.model import PRESETS
from megaspeed.config.refusals import refuse_foreign_keys, without
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import CONFIG_RULES
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
    """The config and all problems. If keys are invalid, rules that read other keys still apply.

    The rules then check a config in which defaults and stand-ins replace the invalid values.
    """
    if not document.is_complete:
        return None, _messages(document.problems)
    values, refused = refuse_foreign_keys(document.values)
    filled = fill_from_hugging_face(values)
    found = [*refused, *filled.problems]
    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(filled.values)
    except ValidationError as error:
        # Fields of the model are missing if the file that states them cannot be read.
        found += [
            problem
            for problem in translate(error, filled.values)
            if not filled.problems or problem.path[:1] != ("model",)
        ]
    invalid = _invalid_paths([*document.problems, *found])
    if config is None:
        config = _repaired(filled.values, invalid)
    origins = {**document.origins, **filled.origins}
    messages = _messages([*document.problems, *(_with_origin(each, origins) for each in found)])
    if config is not None:
        messages += tuple(CONFIG_RULES.violations(config, invalid))
        if world is not None:
            messages += tuple(LAUNCH_RULES.violations(Launch(config, world), invalid))
    return config, tuple(dict.fromkeys(messages))


def _messages(problems: Sequence[Problem]) -> tuple[str, ...]:
    return tuple(problem.message for problem in problems)


def _invalid_paths(problems: Sequence[Problem]) -> Set[KeyPath]:
    paths = {path for problem in problems for path in (problem.path, problem.meant) if path}
    if not paths.isdisjoint({("model", key) for key in ("preset", "from_hf", "architecture")}):
        paths.add(("model",))  # other fields depend on it
    return paths


_STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "model": {**PRESETS["gpt2-nano"], "intermediate_size": 96},
    "data": {"sequence_length": 1},
    "training": {"steps": 1},
}
"""Values of required keys that are missing or invalid."""


def _repaired(values: Mapping[str, Any], invalid: Set[KeyPath]) -> RunConfig | None:
    """A config without the invalid values; None if there is none."""
    kept = without(values, map(_without_indices, invalid))
    for name, stand_ins in _STAND_INS.items():
        section = kept.get(name, {})
        kept[name] = section if "preset" in section else {**stand_ins, **section}
    try:
        return RunConfig.model_validate(kept)
    except ValidationError:
        return None


def _without_indices(path: KeyPath) -> KeyPath:
    """The path of the list if `path` leads into a list, because a list is valid or invalid."""
    for index, part in enumerate(path):
        if isinstance(part, int):
            return path[:index]
    return path


def _with_origin(problem: Problem, origins: Mapping[KeyPath, str]) -> Problem:
    """Adds the origin to the message if the key is not in the config file itself."""
    origin = origins.get(_without_indices(problem.path))
    return replace(problem, message=f"{problem.message} (from {origin})") if origin else problem
