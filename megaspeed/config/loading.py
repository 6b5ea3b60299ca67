"""Loads configs and runs from files, overrides and JSON values, and finds all mistakes at once."""

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megaspeed.config.acceptance import Accepted, accept, without
from megaspeed.config.document import Document, read_document
from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.layout import World, violations
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.config.section import Section
from megaspeed.config.validation import all_key_paths, translate


def read_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a config file, with what it extends, and applies `key.path=value` overrides.

    Raises:
        ConfigError: with all problems that do not depend on the number of processes.
    """
    return _checked(read_document(Path(path), overrides), None, str(path))[0]


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """The config of JSON values that are in memory.

    Raises:
        ConfigError: with all problems that do not depend on the number of processes.
    """
    return _checked(Document(dict(values)), None, "the configuration")[0]


def load_run(path: str | PathLike[str], overrides: Sequence[str], world: World) -> Run:
    """Reads a config file, applies overrides and resolves it for the processes of a run.

    Raises:
        ConfigError: with all problems.
    """
    config, accepted = _checked(read_document(Path(path), overrides), world, str(path))
    run = resolve_run(config, world, name=Path(path).stem)
    return replace(run, notes=accepted.all_notes(config.to_json(), run.as_json()))


def find_problems(document: Document, world: World | None) -> tuple[str, ...]:
    """All problems of a document. Without a world, those that depend on it are omitted."""
    return _check(document, world)[1]


def find_notes(document: Document, world: World | None) -> tuple[str, ...]:
    """The notes about a document: see `Run.notes`. Empty if the document has problems."""
    config, problems, accepted = _check(document, world)
    if problems or config is None:
        return ()
    resolved = None if world is None else resolve_run(config, world, name="run").as_json()
    return accepted.all_notes(config.to_json(), resolved)


def _checked(document: Document, world: World | None, where: str) -> tuple[RunConfig, Accepted]:
    """As `_check`. Raises ConfigError if there is a problem."""
    config, problems, accepted = _check(document, world)
    if problems or config is None:
        raise ConfigError(problems, where)
    return config, accepted


def _check(
    document: Document, world: World | None
) -> tuple[RunConfig | None, tuple[str, ...], Accepted]:
    """Return the config and all problems: those of each key, then those of keys together."""
    accepted = accept(document.values, all_key_paths())
    if not document.is_complete:
        return None, tuple(problem.message for problem in document.problems), accepted
    values, file_origins, file_problems = fill_from_hugging_face(accepted.values)
    found = [*accepted.problems, *file_problems]
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
    wrong = {_without_indices(path) for each in problems for path in (each.path, each.meant)} - {()}
    correct = config if config is not None and not wrong else _correct_part(values, wrong)
    messages = [*(problem.message for problem in problems), *violations(correct, world)]
    return config, tuple(dict.fromkeys(messages)), accepted


def _correct_part(values: Mapping[str, Any], wrong: Set[KeyPath]) -> RunConfig:
    """Return a config in which keys that are wrong are absent, so that no rule can read them."""
    if ("model", "hidden_size") in wrong:
        wrong |= {("model", "intermediate_size")}  # it is computed from the other if omitted
    kept = without(values, wrong)
    config = RunConfig.model_construct()
    for name, field in RunConfig.model_fields.items():
        vars(config).pop(name, None)
        given = kept.get(name, field.get_default(call_default_factory=True))
        # A section is absent if a key without a default is missing or wrong in it.
        with suppress(ValidationError):
            vars(config)[name] = TypeAdapter(field.rebuild_annotation()).validate_python(given)
    for path in wrong:
        section: Any = config
        for part in path[:-1]:
            section = getattr(section, str(part), None)
        if isinstance(section, Section):
            vars(section).pop(str(path[-1]), None)
    return config


def _without_indices(path: KeyPath) -> KeyPath:
    """The path of the list if `path` leads into a list, because a list is valid or invalid."""
    return tuple(takewhile(lambda part: isinstance(part, str), path))


def _with_origin(problem: Problem, origins: Mapping[KeyPath, str]) -> Problem:
    """Adds the origin to the message if the key is not in the config file itself.

    A file removes a key of the file that it extends by setting it to null.
    """
    origin = origins.get(_without_indices(problem.path))
    if not origin:
        return problem
    text = problem.message
    if origin != "--set":
        text = re.sub(r"\bremove it$", "set it to null", text)
    return replace(problem, message=f"{text} (from {origin})")
