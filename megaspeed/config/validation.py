"""From a tree of JSON values to a RunConfig, or to everything that is wrong with it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from megaspeed.config.document import Document
from megaspeed.config.errors import KeyPath, Problem
from megaspeed.config.foreign_keys import refuse_foreign_keys, without
from megaspeed.config.from_hf import FROM_HF, fill_from_hugging_face
from megaspeed.config.presets import PRESETS
from megaspeed.config.run import RunConfig
from megaspeed.config.translation import translate

STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "model": {**PRESETS["gpt2-nano"], "intermediate_size": 96},
    "data": {"sequence_length": 1},
    "training": {"steps": 1},
}
"""Values put where required ones are missing or wrong, so that the rest can still be checked."""


@dataclass(frozen=True)
class Validated:
    """What became of a document.

    `config` is repaired where keys were broken: a key at or below a broken path holds a default or
    a stand-in, and no rule that reads it may speak. It is None where even that was impossible.
    """

    config: RunConfig | None
    problems: tuple[Problem, ...]
    broken: frozenset[KeyPath]


def validate(document: Document) -> Validated:
    """Check every key by itself: known, allowed here, of the right type and in range."""
    problems = list(document.problems)
    if not document.is_complete:
        return Validated(None, tuple(problems), frozenset())
    values, refused = refuse_foreign_keys(document.values)
    filled = fill_from_hugging_face(values)
    found = [*refused, *filled.problems]
    try:
        config: RunConfig | None = RunConfig.model_validate(filled.values)
    except ValidationError as error:
        found = _own_problems([*found, *translate(error, filled.values)])
        config = _repaired(filled.values, _broken_paths(found))
    origins = {**document.origins, **filled.origins}
    problems += [_with_origin(problem, origins) for problem in found]
    return Validated(config, tuple(problems), _broken_paths(problems))


def _broken_paths(problems: Iterable[Problem]) -> frozenset[KeyPath]:
    paths = {path for problem in problems for path in (problem.path, problem.meant) if path}
    if {("model", "preset"), FROM_HF} & paths:
        paths.add(("model",))
    return frozenset(paths)


def _own_problems(problems: list[Problem]) -> list[Problem]:
    """Without the fields that are missing because the file that gives them could not be read."""
    if FROM_HF not in {problem.path for problem in problems}:
        return problems
    return [each for each in problems if each.path[:1] != ("model",) or each.path == FROM_HF]


def _repaired(values: dict[str, Any], broken: frozenset[KeyPath]) -> RunConfig | None:
    """A config that can be built: broken keys are left out, and required ones stood in for."""
    kept = without(values, [_without_indices(path) for path in broken if path != ("model",)])
    for section, stand_ins in STAND_INS.items():
        given = kept.get(section)
        needed = {
            key: value
            for key, value in stand_ins.items()
            if (section,) in broken or (section, key) in broken
        }
        kept[section] = {**needed, **given} if isinstance(given, dict) else needed
    try:
        return RunConfig.model_validate(kept)
    except ValidationError:
        return None


def _without_indices(path: KeyPath) -> KeyPath:
    """A wrong element of a list makes the whole list unusable."""
    for index, part in enumerate(path):
        if isinstance(part, int):
            return path[:index]
    return path


def _with_origin(problem: Problem, origins: Mapping[KeyPath, str]) -> Problem:
    """Name the file, or the command line, where the key does not stand in the file asked for."""
    origin = origins.get(_without_indices(problem.path))
    if origin is None:
        return problem
    return replace(problem, message=f"{problem.message} (from {origin})")
