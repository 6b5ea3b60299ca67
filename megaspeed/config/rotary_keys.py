"""Rotary positions in a Hugging Face `config.json`, which writes them in three ways.

    transformers 5       "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, ...}
    4.43 and later       "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", ...}
    before               "rope_theta": 10000.0,  "rope_scaling": {"type": "linear", ...} or null

All are read, with the precedence that transformers 5 gives them. The second is written, because
both major versions read it. original_max_position_embeddings must be beside the other
numbers of the scaling: at the top level of a file, only some versions of transformers read it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaspeed.config.model import ModelConfig, RopeScaling
from megaspeed.config.strict_json import describe_value

_THETA = 10_000.0
"""transformers' base if a file states none."""

_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


def rotary_problems(keys: Mapping[str, Any]) -> Iterator[str]:
    """The settings of rotary positions that our model does not support, a sentence for each."""
    name, stated = _parameters(keys)
    if not isinstance(stated, dict):
        yield f"{name} is {describe_value(stated)}, and must be an object or null"
        return
    nested = [key for key, value in stated.items() if isinstance(value, dict)]
    if nested:
        yield f"{name} differs by the type of layer ({', '.join(nested)}), and must be one for all"
        return
    kind = _kind(stated)
    if kind not in ("default", "llama3"):
        yield f'{name} has rope_type {describe_value(kind)}, and must be "default" or "llama3"'
    elif kind == "llama3":
        missing = [key for key in _LLAMA3 if stated.get(key) is None]
        if missing:
            yield f"{name} of rope_type llama3 lacks {', '.join(missing)}"
        yield from _original_problems(keys, name, stated)
    for place, partial in (
        ("partial_rotary_factor", keys.get("partial_rotary_factor")),
        (f"{name}.partial_rotary_factor", stated.get("partial_rotary_factor")),
    ):
        if partial not in (None, 1.0):
            yield f"{place} is {describe_value(partial)}, and must be 1.0"


def rotary_fields(keys: Mapping[str, Any], positions: Any) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; `rotary_problems` must have found no problem before."""
    _, stated = _parameters(keys)
    fields = {"rope_theta": stated.get("rope_theta", keys.get("rope_theta", _THETA))}
    if _kind(stated) == "default":
        return fields
    original = stated.get(_ORIGINAL, positions)
    numbers = {key: stated[key] for key in _LLAMA3}
    scaling = {"rope_type": "llama3", **numbers, _ORIGINAL: original}
    return {**fields, "rope_scaling": scaling}


def rotary_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json for rotary positions."""
    scaling: RopeScaling | None = model.rope_scaling
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling is None else scaling.model_dump(),
    }


def _parameters(keys: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that is used, and its value; an empty object if none is stated."""
    for name in ("rope_scaling", "rope_parameters"):
        if keys.get(name):
            return name, keys[name]
    return "rope_parameters", {}


def _original_problems(
    keys: Mapping[str, Any], name: str, stated: Mapping[str, Any]
) -> Iterator[str]:
    """Problems if the original length at the top level differs from the one in the scaling."""
    above, inside = keys.get(_ORIGINAL), stated.get(_ORIGINAL)
    if above is not None and above != inside:
        yield (
            f"{_ORIGINAL} is {describe_value(above)} and not in {name}"
            if inside is None
            else f"{_ORIGINAL} is {describe_value(above)} and {name}.{_ORIGINAL} is "
            f"{describe_value(inside)}"
        ) + f"; versions of transformers differ in which counts, and it must be in {name} alone"


def _kind(stated: Mapping[str, Any]) -> Any:
    return stated.get("rope_type", stated.get("type", "default"))
