"""Load configs and runs from files, overrides and JSON values, and find all mistakes at once.

Mistakes are of two kinds: of one key (its name, its type, its bounds), and of keys together (the
rules). Both are in one report: keys that are wrong are absent when the rules are checked, so a rule
that reads one is skipped, and all others apply.
"""

import copy
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megaspeed.config.document import Document, read_document
from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.foreign_keys import accept, remove
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.layout import World, violations
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.config.section import Section
from megaspeed.config.validation import all_key_paths, translate


@dataclass(frozen=True)
class Checked:
    """What was found in a document.

    Attributes:
        problems: a sentence for each mistake.
        correct: the config, in which keys that are wrong or missing are absent.
        config: the same; None if there are problems.
        notes: see ``Run.notes``; none if there are problems.
    """

    problems: tuple[str, ...]
    correct: RunConfig
    config: RunConfig | None = None
    notes: tuple[str, ...] = ()

    def correct_config(self, where: str) -> RunConfig:
        """Return the config. Raise ConfigError, with ``where`` in its heading, if there is none."""
        if self.config is None:
            raise ConfigError(self.problems, where)
        return self.config


def read_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, with what it extends, and apply ``key.path=value`` overrides.

    Raises:
        ConfigError: with all problems that do not depend on the number of processes.
    """
    return check_document(read_document(Path(path), overrides)).correct_config(str(path))


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the config of JSON values that are in memory.

    Raises:
        ConfigError: with all problems that do not depend on the number of processes.
    """
    return check_document(Document(dict(values))).correct_config("the configuration")


def load_run(path: str | PathLike[str], overrides: Sequence[str], world: World) -> Run:
    """Read a config file, apply overrides and resolve it for the processes of a run.

    Raises:
        ConfigError: with all problems.
    """
    checked = check_document(read_document(Path(path), overrides), world)
    run = resolve_run(checked.correct_config(str(path)), world, name=Path(path).stem)
    return replace(run, notes=checked.notes)


def check_document(document: Document, world: World | None = None) -> Checked:
    """Find all problems of a document. Without a world, those that depend on it are omitted."""
    accepted = accept(document.values, all_key_paths())
    if not document.is_complete:
        messages = [problem.message for problem in document.problems]
        return Checked(tuple(messages), _correct_part(document.values, set()))
    values, file_origins, file_problems = fill_from_hugging_face(accepted.values)
    found = [*accepted.problems, *file_problems]
    config = None
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
    of_keys = [*document.problems, *(_with_origin(each, origins) for each in found)]
    wrong = {_without_indices(path) for each in of_keys for path in (each.path, each.meant)} - {()}
    correct = config if config is not None and not wrong else _correct_part(values, wrong)
    messages = [*(problem.message for problem in of_keys), *violations(correct, world)]
    if config is None or messages:
        return Checked(tuple(dict.fromkeys(messages)), correct)
    found_values = config if world is None else resolve_run(config, world, name="run").config
    return Checked((), config, config, accepted.all_notes(found_values.to_json()))


def _correct_part(values: Mapping[str, Any], wrong: Set[KeyPath]) -> RunConfig:
    """Return a config in which keys that are wrong are absent, so that no rule can read them."""
    if ("model", "hidden_size") in wrong:
        wrong |= {("model", "intermediate_size")}  # it is computed from the other if omitted
    kept = copy.deepcopy(dict(values))
    for path in wrong:
        remove(kept, path)
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
    """Return the path of the list that ``path`` leads into, because a list is valid or invalid."""
    return tuple(takewhile(lambda part: isinstance(part, str), path))


def _with_origin(problem: Problem, origins: Mapping[KeyPath, str]) -> Problem:
    """Add the origin to the message if the key is not in the config file itself.

    A file removes a key of the file that it extends by setting it to null.
    """
    origin = origins.get(_without_indices(problem.path))
    if not origin:
        return problem
    text = problem.message
    if origin != "--set":
        text = re.sub(r"\bremove it$", "set it to null", text)
    return replace(problem, message=f"{text} (from {origin})")
