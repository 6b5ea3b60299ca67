"""From a tree of JSON values to a RunConfig, or to everything that is wrong with it."""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from math import isfinite
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megaspeed.config.document import Document
from megaspeed.config.errors import MOST_LISTED, KeyPath, Problem, dotted
from megaspeed.config.families import FAMILIES
from megaspeed.config.hugging_face import FROM_HF, fill_from_hugging_face
from megaspeed.config.model import DERIVED_FIELDS
from megaspeed.config.presets import PRESETS
from megaspeed.config.refusals import refuse_foreign_keys, without
from megaspeed.config.run import RunConfig
from megaspeed.config.scheduler import SCHEDULER_TYPES
from megaspeed.config.strict_json import describe_value

# The known keys of the JSON, and the one that an unknown key was probably meant to be.

OTHER_NAMES: Mapping[str, str] = {
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "n_positions": "model.max_position_embeddings",
    "n_ctx": "model.max_position_embeddings",
    "n_inner": "model.intermediate_size",
    "ffn_hidden_size": "model.intermediate_size",
    "embd_pdrop": "model.embedding_dropout",
    "attn_pdrop": "model.attention_dropout",
    "resid_pdrop": "model.residual_dropout",
    "model_type": "model.architecture",
    "tp": "parallel.tensor",
    "tensor_parallel": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "pp": "parallel.pipeline",
    "pipeline_parallel": "parallel.pipeline",
    "pipeline_parallel_size": "parallel.pipeline",
    "pp_size": "parallel.pipeline",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "dp": "parallel.data",
    "data_parallel": "parallel.data",
    "data_parallel_size": "parallel.data",
    "dp_size": "parallel.data",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "train_iters": "training.steps",
    "max_steps": "training.steps",
    "global_batch_size": "train_batch_size",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "learning_rate": "optimizer.params.lr",
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
}
"""Names in the configs of GPT-2, Megatron and nanoGPT, and our keys for them."""


def unknown_key(path: KeyPath, siblings: list[str]) -> Problem:
    """The problem of an unknown key, with the nearest known key or the list of known keys.

    If `siblings` is empty, the message has neither.
    """
    name = dotted(path)
    if not siblings:
        return Problem(path, f"{name} is an unknown key")
    if name in all_key_paths():
        return Problem(
            path,
            f"{name} belongs to another {path[0]}.type than the one chosen; remove it (null "
            "removes an inherited key)",
        )
    nearest = _nearest(path, siblings)
    if nearest is not None:
        message = f"{name} is an unknown key; the nearest known key is {nearest}"
        return Problem(path, message, meant=tuple(nearest.split(".")))
    where = dotted(path[:-1]) or "the top level"
    return Problem(path, f"{name} is an unknown key; {where} knows {', '.join(sorted(siblings))}")


def keys_at(path: KeyPath, values: Mapping[str, Any]) -> list[str]:
    """The known keys of the section at `path`; `values` states which scheduler it is."""
    models: tuple[type[BaseModel], ...] = (RunConfig,)
    here: Any = values
    for part in path:
        if isinstance(part, int):  # the sections in a list are those of its field
            here = here[part] if isinstance(here, list) else None
            continue
        here = here.get(part) if isinstance(here, dict) else None
        models = tuple(
            inner
            for model in models
            if part in model.model_fields
            for inner in _sections_in(model.model_fields[part].annotation)
        )
        kind = here.get("type") if isinstance(here, dict) else None
        models = tuple(model for model in models if kind in _types(model)) or models
    return sorted({key for model in models for key in model.model_fields})


@cache
def all_key_paths() -> tuple[str, ...]:
    """Every key of the JSON as a dotted path, containers included."""
    return tuple(dict.fromkeys(_walk(RunConfig, ())))


def _nearest(path: KeyPath, siblings: list[str]) -> str | None:
    section, name = path[:-1], str(path[-1])
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    elsewhere = [known for known in all_key_paths() if known.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if elsewhere and not (close and _differs_by_little(name, close[0])):
        return elsewhere[0]
    if close:
        return dotted((*section, close[0]))
    leaves = {known.rpartition(".")[2]: known for known in reversed(all_key_paths())}
    far = difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)
    return leaves[far[0]] if far else None


def _differs_by_little(name: str, known: str) -> bool:
    return difflib.SequenceMatcher(None, name, known).ratio() > 0.9


def _walk(model: type[BaseModel], path: KeyPath) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield dotted((*path, name))
        for inner in _sections_in(info.annotation):
            yield from _walk(inner, (*path, name))


def _types(model: type[BaseModel]) -> tuple[Any, ...]:
    """The values of `type` that select this section."""
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold: `X`, `X | None`, `Annotated[X | Y, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


# Converts pydantic's errors to our messages: full path, given value, wanted value.

_WANTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
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


def translate(error: ValidationError, values: Mapping[str, Any]) -> list[Problem]:
    """One problem for each key that is wrong; `values` is the JSON that was refused.

    pydantic gives one error for each branch of a union ("a whole number" or "auto"); they become
    one problem. Errors that only follow from another one are omitted.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = defaultdict(list)
    for detail in error.errors(include_url=False):
        by_path[_path_in_json(detail, values)].append(detail)
    has_bad_preset = ("model", "preset") in by_path
    containers = {path[:length] for path in by_path for length in range(len(path))}
    unknown = 0
    problems = []
    for path, details in by_path.items():
        if has_bad_preset and details[0]["type"] == "missing" and path[0] == "model":
            continue
        if _follows_from_another(path, values) or _follows_from_a_part(details, path, containers):
            continue
        if details[0]["type"] == "extra_forbidden":
            unknown += 1
            # Finding the nearest known key takes a millisecond; only the first are printed.
            known = keys_at(path[:-1], values) if unknown <= MOST_LISTED else []
            problems.append(unknown_key(path, known))
        else:
            problems.append(Problem(path, _message(path, details, values)))
    return problems


def _message(path: KeyPath, details: list[ErrorDetails], values: Mapping[str, Any]) -> str:
    kind = details[0]["type"]
    if kind == "missing" and not isinstance(details[0]["loc"][-1], int):
        return _missing(path)
    if _is_left_out(path, values):
        return f"{dotted(path)} is missing: state it, or name a model.preset"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(path, details[0])
    wanted = " or ".join(dict.fromkeys(_wanted(detail) for detail in _last_of_tuple(details)))
    given = details[0]["input"]
    return f"{dotted(path)}: given {describe_value(given)}, wanted {wanted}{_mend(given, details)}"


def _path_in_json(detail: ErrorDetails, values: Mapping[str, Any]) -> KeyPath:
    """pydantic's location without the names of union branches, which are not in the JSON."""
    path: list[str | int] = []
    here: Any = values
    for part in detail["loc"]:
        if _has(here, part):
            here = here[part]
            path.append(part)
    last = detail["loc"][-1] if detail["loc"] else None
    is_absent = detail["type"] == "missing" or _is_derived(detail["loc"])
    if is_absent and isinstance(last, str) and (not path or path[-1] != last):
        path.append(last)
    return tuple(path)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _last_of_tuple(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """A list that is too short has one error for each missing entry; the last has its length."""
    return details[-1:] if details[0]["type"] == "missing" else details


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        return _choice(str(context["expected"]))
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"a list of {int(detail['loc'][-1]) + 1}"
    template = _WANTED.get(kind)
    return template.format(**context) if template else detail["msg"]


def _choice(expected: str) -> str:
    """pydantic writes Python: 'gpipe' or '1f1b', True."""
    return expected.replace("'", '"').replace("True", "true").replace("False", "false")


def _wrong_tag(path: KeyPath, detail: ErrorDetails) -> str:
    given = detail["input"].get("type") if isinstance(detail["input"], dict) else None
    known = " or ".join(f'"{name}"' for name in SCHEDULER_TYPES)
    if given is None:
        return f"{dotted(path)}.type is missing, wanted {known}"
    return f"{dotted((*path, 'type'))}: given {describe_value(given)}, wanted {known}"


def _missing(path: KeyPath) -> str:
    if path == ("model",):
        return f"model is missing; it needs at least a preset ({', '.join(PRESETS)})"
    if path[0] == "model" and len(path) == 2:
        return f"{dotted(path)} is missing: state it, or name a model.preset such as gpt2"
    return f"{dotted(path)} is missing and has no default"


def _mend(given: Any, details: list[ErrorDetails]) -> str:
    kinds = {detail["type"] for detail in details}
    if isinstance(given, str) and kinds & {"int_type", "float_type"} and _reads_as_number(given):
        return f"; write {given} without quotes"
    if isinstance(given, str) and kinds == {"tuple_type"}:
        return f"; write [{describe_value(given).rpartition(' (')[0]}]"
    if isinstance(given, str) and "bool_type" in kinds and given.lower() in ("true", "false"):
        return f"; write {given.lower()} without quotes"
    if "string_type" in kinds and isinstance(given, int | float):
        return f'; write "{given}" in quotes'
    if isinstance(given, str) and kinds == {"literal_error"}:
        choices = re.findall(r"'([^']*)'", str(details[0]["ctx"]["expected"]))
        nearest = get_close_matches(given, choices, n=1)
        return f'; the nearest is "{nearest[0]}"' if nearest else ""
    return ""


def _reads_as_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _is_derived(location: tuple[str | int, ...]) -> bool:
    return len(location) == 2 and location[0] == "model" and location[1] in DERIVED_FIELDS


def _is_left_out(path: KeyPath, values: Mapping[str, Any]) -> bool:
    """Whether the JSON omits this field, and it is derived from others."""
    return _is_derived(path) and values["model"].get(path[1]) is None


def _follows_from_a_part(
    details: list[ErrorDetails], path: KeyPath, containers: Set[KeyPath]
) -> bool:
    """Whether an error of an object or a list only follows from an error of one of its parts.

    An object with a wrong key is meant to be an object, even if a string is also allowed. A list
    may be too short only because its wrong entries do not count.
    """
    is_consequence = isinstance(details[0]["input"], dict) or details[0]["type"] == "too_short"
    return is_consequence and path in containers


def _follows_from_another(path: KeyPath, values: Mapping[str, Any]) -> bool:
    """Whether a derived field is wrong only because the field that it derives from is wrong."""
    if not _is_left_out(path, values):
        return False
    family = FAMILIES.get(str(values["model"].get("architecture")))
    stated = values["model"].get("mlp") or (family and family.features["mlp"])
    return not (path[1] == "intermediate_size" and stated == "swiglu")


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
