"""Converts Hugging Face's `config.json` to fields of the `model` section, and back.

    config.json  --model_section-->  fields of `model`  --hugging_face_config-->  config.json

The tables are in ``families.py``: which of their keys correspond to our fields, and which must
have a certain value because our model supports no other. If a file omits a key, it has
transformers' default, which sometimes differs from ours. A key that is in no table changes nothing
in transformers' model of the family, so it is ignored.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.families import FAMILIES, Family, FixedKey
from megaspeed.config.model import DERIVED_FIELDS, ModelConfig, RopeScaling
from megaspeed.config.strict_json import JsonSyntaxError, describe_value, read_json_object
from megaspeed.files.paths import expand_home, path_problem
from megaspeed.files.reading import file_problem

# Rotary positions in a Hugging Face `config.json`, which writes them in three ways.
#
#     transformers 5       "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, ...}
#     4.43 and later       "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", ...}
#     before               "rope_theta": 10000.0,  "rope_scaling": {"type": "linear", ...} or null
#
# All are read, with the precedence that transformers 5 gives them. The second is written, because
# both major versions read it. original_max_position_embeddings must be beside the other
# numbers of the scaling: at the top level of a file, only some versions of transformers read it.

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


Keys = Mapping[str, Any]
"""The content of a config.json."""


_EVERYWHERE = (
    FixedKey("quantization_config", (None,)),
    FixedKey("auto_map", (None,)),
    FixedKey("is_encoder_decoder", (False,)),
    FixedKey("add_cross_attention", (False,)),
)

_NOT_SAVED = frozenset(
    {"preset", "from_hf", "embedding_dropout", "attention_dropout", "residual_dropout"}
)
"""Fields that change nothing in what a trained model computes."""


def model_section(keys: Keys) -> tuple[dict[str, Any], list[str]]:
    """The fields of `model` that a config.json states, and all that our model cannot express.

    Returns:
        The fields, without those that are derived from others; and a sentence for each problem.
    """
    model_type = keys.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        given = "missing" if model_type is None else describe_value(model_type)
        return {}, [f"model_type is {given}, and must be {_listed(FAMILIES)}"]
    keys, problems = _under_one_name(keys, family.other_names)
    fields: dict[str, Any] = {"architecture": model_type}
    for key in family.keys:
        value = keys.get(key.theirs, key.default)
        if value is not None or key.default is not None:
            fields[key.ours] = value
    problems += _fixed_problems(keys, (*_EVERYWHERE, *family.fixed))
    problems += _layer_problems(keys, family)
    if family.features["positions"] == "rotary":
        problems += rotary_problems(keys)
        fields |= {} if problems else rotary_fields(keys, fields["max_position_embeddings"])
    return fields, problems


def hugging_face_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, in keys that transformers 4 and 5 read, without token ids.

    Raises:
        ConfigError: transformers' class of the family cannot compute the model.
    """
    family = FAMILIES[model.architecture]
    keys = {
        "architectures": [family.class_name],
        "model_type": model.architecture,
        **{key.theirs: getattr(model, key.ours) for key in family.keys},
        **{each.key: each.allowed[0] for each in family.fixed if each.allowed[0] is not None},
        **(rotary_keys(model) if model.positions == "rotary" else {}),
    }
    read_again = ModelConfig.model_validate(model_section(keys)[0])
    problems = [
        f"model.{name} is {getattr(model, name)}, but {family.class_name} of transformers has "
        f"{getattr(read_again, name)}; train with that value to export the model"
        for name in ModelConfig.model_fields
        if name not in _NOT_SAVED and getattr(read_again, name) != getattr(model, name)
    ]
    if problems:
        raise ConfigError(problems, where=f"model.architecture {model.architecture}")
    return keys


def _under_one_name(keys: Keys, other_names: Mapping[str, str]) -> tuple[Keys, list[str]]:
    """Renames second names of keys, because transformers accepts two names for some keys."""
    renamed, problems = dict(keys), []
    for other, name in other_names.items():
        if other in renamed and renamed.setdefault(name, renamed[other]) != renamed[other]:
            problems.append(
                f"{name} is {describe_value(renamed[name])} and {other}, another name of it, is "
                f"{describe_value(renamed[other])}"
            )
    return renamed, problems


def _fixed_problems(keys: Keys, fixed: tuple[FixedKey, ...]) -> Iterator[str]:
    for key, allowed in ((each.key, each.allowed) for each in fixed):
        value = keys.get(key, allowed[0])
        # True == 1, so types are compared, too.
        if not any(value == one and type(value) is type(one) for one in allowed):
            yield f"{key} is {describe_value(value)}, and must be {_listed(allowed)}"


def _layer_problems(keys: Keys, family: Family) -> Iterator[str]:
    """Qwen's list of which layers have a sliding window; transformers ignores it elsewhere."""
    types = keys.get("layer_types")
    is_read = any(each.key == "use_sliding_window" for each in family.fixed)
    is_full = isinstance(types, list) and all(each == "full_attention" for each in types)
    if is_read and types is not None and not is_full:
        yield f'layer_types is {describe_value(types)}, and each must be "full_attention"'


def _listed(values: Iterable[Any]) -> str:
    """The values that are possible, as a file writes them."""
    return " or ".join(json.dumps(value) for value in values)


# `"model": {"from_hf": DIR}`: a model section from a Hugging Face config.json.
#
#     {"from_hf": "gpt2-dir", "num_hidden_layers": 6}   ->   every field of the file, with 6 layers
#
# The fields replace the key, so the resolved config of a run does not need DIR.

CONFIG_FILE = "config.json"
FETCH_ANEW = "cut short or damaged; fetch it anew"
"""Part of the message about a model's file that cannot be read."""

FROM_HF: KeyPath = ("model", "from_hf")


@dataclass(frozen=True)
class Filled:
    """The values of a config after `from_hf` was replaced.

    Attributes:
        values: the values, with the fields of the file instead of `from_hf`.
        origins: the file, for each field that came from it.
        problems: problems with `model.from_hf`. If there are any, no field came from the file.
    """

    values: dict[str, Any]
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def fill_from_hugging_face(values: Mapping[str, Any]) -> Filled:
    """The values with `model.from_hf` replaced by the fields of the file."""
    section = values.get("model")
    if not isinstance(section, dict) or not isinstance(section.get("from_hf"), str):
        return Filled(dict(values))
    stated = {key: value for key, value in section.items() if key != "from_hf"}
    try:
        fields = _fields(section["from_hf"], stated)
    except ConfigError as error:
        problems = tuple(
            Problem(FROM_HF, f"model.from_hf: {error.where}: {problem}")
            for problem in error.problems
        )
        return Filled({**values, "model": stated}, problems=problems)
    said = {key: value for key, value in stated.items() if _is_said(key, value)}
    origin = str(config_file(section["from_hf"]))
    return Filled(
        {**values, "model": {**fields, **said}},
        {("model", name): origin for name in fields if name not in said},
    )


def config_file(place: str) -> Path:
    """The config.json of a model's folder; `place` itself if it is a file."""
    path = expand_home(place)
    return path / CONFIG_FILE if os.path.isdir(path) else path


def read_model_section(place: str) -> dict[str, Any]:
    """The fields of `model` from a config.json, named by its folder or its path.

    Raises:
        ConfigError: it cannot be read, or describes a model that our model cannot express.
    """
    file = config_file(place)
    problem = path_problem(place)
    if problem is None and (wrong := file_problem(file)) is not None:
        problem = f"it {wrong}"
    if problem is not None:
        is_folder = file != expand_home(place)
        if is_folder and not os.path.lexists(file):
            problem = f"there is no {CONFIG_FILE}"
        raise ConfigError(
            [
                f"{problem}; name a folder as save_pretrained writes it, or the "
                "file (nothing is downloaded)"
            ],
            where=str(file),
        )
    try:
        keys, doubled = read_json_object(file)
    except JsonSyntaxError as error:
        raise ConfigError([f"{error}: {FETCH_ANEW}"], where=str(file)) from error
    fields, problems = model_section(keys)
    problems = [*(problem.message for problem in doubled), *problems]
    if problems:
        raise ConfigError(problems, where=str(file))
    return fields


def _fields(place: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    fields = read_model_section(place)
    for name in ("preset", "architecture"):
        if stated.get(name) not in (None, fields.get(name)):
            raise ConfigError(
                [
                    f"it gives every field, and model.{name} {stated[name]!r} contradicts it; "
                    "omit one of them (null removes an inherited key)"
                ],
                where=place,
            )
    return fields


def _is_said(key: str, value: Any) -> bool:
    return value is not None or key not in DERIVED_FIELDS
