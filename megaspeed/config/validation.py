"""Convert pydantic's errors about single keys to messages, with the nearest known keys."""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from math import isfinite
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megaspeed.config.deepspeed_keys import SCHEDULER_TYPES
from megaspeed.config.document import describe_value
from megaspeed.config.errors import MOST_LISTED, KeyPath, Problem, dotted
from megaspeed.config.model import PRESETS
from megaspeed.config.run import RunConfig

_OTHER_NAMES = {
    "model.architecture": "model_type",
    "model.hidden_size": "n_embd d_model",
    "model.num_hidden_layers": "n_layer num_layers",
    "model.num_attention_heads": "n_head num_heads",
    "model.max_position_embeddings": "n_positions n_ctx",
    "model.intermediate_size": "n_inner ffn_hidden_size",
    "model.embedding_dropout": "embd_pdrop",
    "model.attention_dropout": "attn_pdrop",
    "model.residual_dropout": "resid_pdrop",
    "parallel.tensor": "tp tensor_parallel tensor_parallel_size tp_size tensor_model_parallel_size",
    "parallel.pipeline": "pp pipeline_parallel pipeline_parallel_size pp_size "
    "pipeline_model_parallel_size",
    "parallel.data": "dp data_parallel data_parallel_size dp_size",
    "data.sequence_length": "seq_length seq_len block_size",
    "training.steps": "train_iters max_steps",
    "train_batch_size": "global_batch_size batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size train_micro_batch_size",
    "optimizer.params.lr": "learning_rate",
    "gradient_clipping": "max_grad_norm grad_clip",
    "zero_optimization.stage": "zero_stage",
    "bf16.enabled": "precision dtype torch_dtype mixed_precision",
}
OTHER_NAMES: Mapping[str, str] = {
    other: key for key, others in _OTHER_NAMES.items() for other in others.split()
}
"""Names in the configs of GPT-2, Megatron and nanoGPT -> the keys here."""

_NOT_BUILT: Mapping[str, str] = {
    "fp8": "training in fp8 is not built; set bf16.enabled",
    "expert": "a mixture of experts is not built; remove it",
    "context": "context parallelism is not built; see parallel.sequence_parallel",
    "virtual_stages": "an interleaved schedule is not built; see parallel.schedule",
}
"""Beginning of an unknown key -> what is not built, and what to write instead."""

_TYPES: Mapping[str, tuple[str, ...]] = {
    "scheduler": SCHEDULER_TYPES,
    "parallel.gradient_compression": ("int8", "powersgd"),
}
"""Key of a section that has several types -> their names."""

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
            known = keys_at(path[:-1]) if unknown <= MOST_LISTED else []
            problems.append(_unknown_key(path, known))
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
    kind, last, given = details[0]["type"], details[0]["loc"][-1], details[0]["input"]
    if kind == "missing" and not isinstance(last, int):
        return _missing_key(path)
    if {each["type"] for each in details} & {"union_tag_invalid", "union_tag_not_found"}:
        known = _known_types(path)
        if not isinstance(given, dict) or given.get("type") is None:
            return f"{dotted(path)}.type is missing, wanted {known}"
        return f"{dotted((*path, 'type'))}: given {describe_value(given['type'])}, wanted {known}"
    # A list that is too short has an error for each missing entry; the last one gives the length.
    relevant = details[-1:] if kind == "missing" else details
    wanted = " or ".join(dict.fromkeys(map(_wanted, relevant)))
    if wanted.endswith("an object") and dotted(path) in _TYPES:
        wanted += f" with the type {_known_types(path)}"
    fix = _fix(path, given, details)
    return f"{dotted(path)}: given {describe_value(given)}, wanted {wanted}{fix}"


def _known_types(path: KeyPath) -> str:
    """Return the types of the section at ``path``, which has several."""
    return " or ".join(f'"{name}"' for name in _TYPES[dotted(path)])


def _missing_key(path: KeyPath) -> str:
    if path == ("model",):
        return f"model is missing; it needs at least a preset ({', '.join(PRESETS)})"
    if path[0] == "model" and len(path) == 2:
        return f"{dotted(path)} is missing: state it, or name a model.preset such as gpt2"
    return f"{dotted(path)} is missing and has no default"


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":  # pydantic writes Python: 'gpipe' or '1f1b', True
        expected = str(context["expected"]).replace("'", '"')
        return expected.replace("True", "true").replace("False", "false")
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"a list of {int(detail['loc'][-1]) + 1}"
    template = _WANTED.get(kind)
    return template.format(**context) if template else detail["msg"]


def _fix(path: KeyPath, given: Any, details: list[ErrorDetails]) -> str:
    kinds = {detail["type"] for detail in details}
    if "string_type" in kinds and isinstance(given, int | float):
        return f'; write "{given}" in quotes'
    if isinstance(given, bool) and "enabled" in keys_at(path):
        return f'; write {{"enabled": {str(given).lower()}}}'
    if not isinstance(given, str):
        return ""
    if given == "auto":
        return "; omit the key or write a value"
    if given.lower() in ("adam", "adamw") or given in SCHEDULER_TYPES:
        return f'; write {{"type": "{given}"}}'
    if given == "nvme":
        return '; state can only move to host memory, so write "cpu"'
    if kinds & {"int_type", "float_type"} and _is_number(given):
        return f"; write {given} without quotes"
    if "bool_type" in kinds and given.lower() in ("true", "false"):
        return f"; write {given.lower()} without quotes"
    if kinds == {"tuple_type"}:
        return f"; write [{describe_value(given).rpartition(' (')[0]}]"
    if kinds == {"literal_error"}:
        choices = re.findall(r"'([^']*)'", str(details[0]["ctx"]["expected"]))
        nearest = difflib.get_close_matches(given, choices, n=1)
        return f'; the nearest is "{nearest[0]}"' if nearest else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _unknown_key(path: KeyPath, siblings: list[str]) -> Problem:
    """Return the problem of an unknown key, with the nearest known key or the list of known keys.

    If ``siblings`` is empty, the message has neither.
    """
    name = dotted(path)
    if not siblings:
        return Problem(path, f"{name} is an unknown key")
    if name in all_key_paths():
        owner = next((each for each in _TYPES if name.startswith(f"{each}.")), path[0])
        return Problem(
            path,
            f"{name} belongs to another {owner}.type than this one; remove it (null removes an "
            "inherited key)",
        )
    for part, message in _NOT_BUILT.items():
        if str(path[-1]).startswith(part):
            return Problem(path, f"{name} is an unknown key: {message}")
    nearest = _nearest(path, siblings)
    if nearest is not None:
        message = f"{name} is an unknown key; the nearest known key is {nearest}"
        return Problem(path, message, meant=tuple(nearest.split(".")))
    if len(path) == 1:
        return Problem(path, f"{name} is an unknown key; docs/configuration.md lists every key")
    known = ", ".join(sorted(siblings))
    return Problem(path, f"{name} is an unknown key; the keys of {dotted(path[:-1])} are {known}")


def keys_at(path: KeyPath) -> list[str]:
    """Return the known keys of the section at ``path``; those of all types, if it has several."""
    section = dotted(tuple(part for part in path if isinstance(part, str)))
    found = (key.rpartition(".") for key in all_key_paths())
    return sorted(name for parent, _, name in found if parent == section)


@cache
def all_key_paths() -> tuple[str, ...]:
    """Return every key of the JSON as a dotted path, sections included."""
    return tuple(dict.fromkeys(_key_paths(RunConfig, ())))


def _nearest(path: KeyPath, siblings: list[str]) -> str | None:
    section, name = path[:-1], str(path[-1])
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    elsewhere = [known for known in all_key_paths() if known.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6 if section else 0.5)
    is_typo = close and difflib.SequenceMatcher(None, name, close[0]).ratio() > 0.9
    if elsewhere and not is_typo:
        return elsewhere[0]
    if close:
        return dotted((*section, close[0]))
    leaves = {known.rpartition(".")[2]: known for known in reversed(all_key_paths())}
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
