"""Load configs and runs from files, overrides and JSON values, and find all mistakes at once.

Mistakes are of two kinds: of one key (its name, its type, its bounds), and of keys together (the
rules). Both are in one report: keys that are wrong are absent when the rules are checked, so a rule
that reads one is skipped, and all others apply.

``translate`` converts pydantic's errors about single keys to messages.
"""

import copy
import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megaspeed.config.document import Document, describe_value, read_document
from megaspeed.config.errors import MOST_LISTED, ConfigError, KeyPath, Problem, dotted
from megaspeed.config.foreign_keys import accept, remove
from megaspeed.config.hugging_face import fill_from_hugging_face
from megaspeed.config.layout import World, violations
from megaspeed.config.model import PRESETS
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.run import RunConfig
from megaspeed.config.section import Section

_OF_HUGGING_FACE: Mapping[str, str] = {"warmup_ratio": "warmup_num_steps"}
"""A key of Hugging Face's trainer -> what has its effect here."""

_WANTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "greater_than": "more than {gt:,.12g}",
    "greater_than_equal": "at least {ge:,.12g}",
    "less_than": "less than {lt:,.12g}",
    "less_than_equal": "at most {le:,.12g}",
    "string_too_short": "a string that is not empty",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


@dataclass(frozen=True)
class Checked:
    """What was found in a document."""

    problems: tuple[str, ...]  # a sentence for each mistake
    correct: RunConfig  # the config, in which keys that are wrong or missing are absent
    config: RunConfig | None = None  # the same; None if there are problems
    notes: tuple[str, ...] = ()  # see ``Run.notes``; none if there are problems

    def correct_config(self, where: str) -> RunConfig:
        """Return the config. Raise ConfigError, with ``where`` in its heading, if there is none."""
        if self.config is None:
            raise ConfigError(self.problems, where)
        return self.config


def read_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, with what it extends, and apply ``key.path=value`` overrides.

    Raises ConfigError with all problems that do not depend on the number of processes.
    """
    return check_document(read_document(Path(path), overrides)).correct_config(str(path))


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the config of JSON values that are in memory.

    Raises ConfigError with all problems that do not depend on the number of processes.
    """
    return check_document(Document(dict(values))).correct_config("the configuration")


def load_run(path: str | PathLike[str], overrides: Sequence[str], world: World) -> Run:
    """Read a config file, apply overrides and resolve it for the processes of a run.

    Raises ConfigError with all problems.
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
    key_problems = [*document.problems, *(_with_origin(each, origins) for each in found)]
    wrong = {
        _without_indices(path) for each in key_problems for path in (each.path, each.meant)
    } - {()}
    correct = config if config is not None and not wrong else _correct_part(values, wrong)
    messages = [*(problem.message for problem in key_problems), *violations(correct, world)]
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


def translate(error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
    """Return one problem for each wrong key.

    pydantic has an error for each branch of a union ("a whole number" or "auto"). They become one
    problem. Errors that follow from another error are omitted.

    Args:
        error: the error of ``RunConfig.model_validate``.
        values: the JSON that it checked.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = defaultdict(list)
    for detail in error.errors(include_url=False):
        by_path[_path_in_json(detail, values)].append(detail)
    parents = {path[:length] for path in by_path for length in range(len(path))}
    has_no_shape = ("model", "preset") in by_path or ("model", "from_hf") in by_path
    unknown = 0
    problems = []
    for path, details in by_path.items():
        kind = details[0]["type"]
        if kind == "missing" and path[0] == "model" and has_no_shape:
            continue
        # A list may be too short because its wrong entries do not count. An object with a wrong
        # key is meant to be an object, even if a string is also allowed.
        if path in parents and (kind == "too_short" or isinstance(details[0]["input"], dict)):
            continue
        if kind == "extra_forbidden":
            unknown += 1
            # Finding the nearest known key takes a millisecond, and only the first are printed.
            known = keys_at(path[:-1], values) if unknown <= MOST_LISTED else []
            problems.append(_unknown_key(path, known))
        elif kind == "missing" and (required := _required_in(path, values)):
            problems += [Problem(inner, _missing_key(inner)) for inner in required]
        else:
            problems.append(Problem(path, _message(path, details)))
    missing = {path for path, details in by_path.items() if details[0]["type"] == "missing"}
    misspelt = missing & {problem.meant for problem in problems}
    return [problem for problem in problems if problem.path not in misspelt]


def _path_in_json(detail: ErrorDetails, values: Mapping[str, Any]) -> KeyPath:
    """pydantic's location without the names of union branches, which are not in the JSON."""
    path: list[str | int] = []
    here: Any = values
    for part in detail["loc"]:
        is_index = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if is_index or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
    last = detail["loc"][-1] if detail["loc"] else None
    # A missing field is not in the JSON. Nor is a field of the model that is computed from others.
    is_omitted = detail["type"] == "missing" or detail["loc"][:-1] == ("model",)
    if is_omitted and isinstance(last, str) and path[-1:] != [last]:
        path.append(last)
    return tuple(path)


def _message(path: KeyPath, details: list[ErrorDetails]) -> str:
    by_kind = {detail["type"]: detail for detail in details}
    kind, last, given = details[0]["type"], details[0]["loc"][-1], details[0]["input"]
    if kind == "missing" and not isinstance(last, int):
        return _missing_key(path)
    for problem in by_kind.keys() & {"union_tag_not_found", "union_tag_invalid"}:
        details = [by_kind[problem]]
        name = details[0]["ctx"]["discriminator"].strip("'")
        path = (*path, name)
        if problem == "union_tag_not_found":
            return _missing_key(path)
        given = given[name]
    # A list that is too short has an error for each missing entry; the last one gives the length.
    relevant = details[-1:] if kind == "missing" else details
    wanted = " or ".join(dict.fromkeys(map(_wanted, relevant)))
    return f"{dotted(path)}: given {describe_value(given)}, wanted {wanted}"


def _missing_key(path: KeyPath) -> str:
    if path == ("model",):
        return f"model is missing; it needs at least a preset ({', '.join(PRESETS)})"
    if path[0] == "model" and len(path) == 2:
        return f"{dotted(path)} is missing: state it, or name a model.preset such as gpt2"
    return f"{dotted(path)} is missing and has no default"


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    choices = context.get("expected", context.get("expected_tags"))
    if choices is not None:  # pydantic writes Python: 'gpipe' or '1f1b', True
        return str(choices).replace("'", '"').replace("True", "true").replace("False", "false")
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"a list of {int(detail['loc'][-1]) + 1}"
    if kind == "tuple_type" and isinstance(given := detail["input"], str):
        form = describe_value([given]).removesuffix(" (a list)")
        has_numbers = re.fullmatch(r"[\d.]+(, *[\d.]+)+", given)
        return "a list: " + (form.replace('"', "") if has_numbers else form)
    template = _WANTED.get(kind)
    return template.format(**context) if template else detail["msg"]


def _unknown_key(path: KeyPath, siblings: list[str]) -> Problem:
    """Return the problem of an unknown key, with the nearest known key or the list of known keys.

    If ``siblings`` is empty, the message has neither.
    """
    name = dotted(path)
    if not siblings:
        return Problem(path, f"{name} is an unknown key")
    if name in all_key_paths():
        message = f"{name} belongs to another type of {dotted(path[:-1])} than this one; remove it"
        return Problem(path, message)
    section, last = dotted(path[:-1]), str(path[-1])
    if (meant := _OF_HUGGING_FACE.get(last)) in siblings:
        message = f"{name} is an unknown key; write {section}.{meant}, a number of steps"
        return Problem(path, message, meant=(*path[:-1], meant))
    nearest = _nearest(path, siblings)
    if nearest is not None:
        message = f"{name} is an unknown key; the nearest known key is {nearest}"
        return Problem(path, message, meant=tuple(nearest.split(".")))
    if len(path) == 1:
        return Problem(path, f"{name} is an unknown key; docs/configuration.md lists every key")
    known = ", ".join(sorted(siblings))
    return Problem(path, f"{name} is an unknown key; the keys of {section} are {known}")


def keys_at(path: KeyPath, values: Any = None) -> list[str]:
    """Return the known keys of the section at ``path``. If ``values``, the complete JSON, states
    its type, return only the keys of that type.
    """
    return sorted({name for section in _sections_at(path, values) for name in section.model_fields})


def _sections_at(path: KeyPath, values: Any) -> list[type[BaseModel]]:
    sections: list[type[BaseModel]] = [RunConfig]
    for part in path:
        if isinstance(part, int):
            values = None  # no entry of a list has a type
            continue
        fields = (section.model_fields.get(part) for section in sections)
        sections = [inner for field in fields if field for inner in _sections_in(field.annotation)]
        values = values.get(part) if isinstance(values, Mapping) else None
        stated = values.get("type") if isinstance(values, Mapping) else None
        sections = [each for each in sections if _is_of_type(each, stated)] or sections
    return sections


def _is_of_type(section: type[BaseModel], stated: Any) -> bool:
    field = section.model_fields.get("type")
    return field is not None and stated in get_args(field.annotation)


def _required_in(path: KeyPath, values: Any) -> list[KeyPath]:
    """Return the required keys of a missing section; none if it has several types."""
    sections = _sections_at(path, values)
    fields = sections[0].model_fields if len(sections) == 1 and path != ("model",) else {}
    return [(*path, name) for name, field in fields.items() if field.is_required()]


@cache
def all_key_paths() -> tuple[str, ...]:
    """Return every key of the JSON as a dotted path, sections included."""
    return tuple(dict.fromkeys(_key_paths(RunConfig, ())))


def _nearest(path: KeyPath, siblings: list[str]) -> str | None:
    """Return the key of this name elsewhere; otherwise the nearest of the section, or of all."""
    name, section = str(path[-1]), dotted(path[:-1])
    # A key of this section that is not a sibling belongs to another type, so it is not proposed.
    others = (known for known in reversed(all_key_paths()) if known.rpartition(".")[0] != section)
    leaves = {known.rpartition(".")[2]: known for known in others}
    if name not in leaves and (close := difflib.get_close_matches(name, siblings, n=1)):
        return dotted((*path[:-1], close[0]))
    far = difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)
    return leaves[far[0]] if far else None


def _key_paths(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield dotted((*path, name))
        for inner in _sections_in(info.annotation):
            yield from _key_paths(inner, (*path, name))


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field may hold: ``X``, ``X | None``, ``Annotated[X | Y, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)
