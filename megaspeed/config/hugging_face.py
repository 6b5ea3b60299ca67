"""Convert Hugging Face's ``config.json`` to fields of the ``model`` section, and back.

    {"from_hf": "gpt2-dir", "num_hidden_layers": 6}   ->   every field of the file, with 6 layers

``families.py`` has the tables: which of their keys are our fields, and which must have a certain
value because our model supports only that one. If a file omits a key, transformers' default is
used, which sometimes differs from ours. A key in no table is ignored, because it changes nothing in
transformers' model of the family. Files of other models, such as the draft heads of speculative
decoding, may state one of our families, too. They are refused because of their class.

Files write rotary positions in three ways:

    transformers 5       "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, ...}
    4.43 and later       "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", ...}
    before               "rope_theta": 10000.0,  "rope_scaling": {"type": "linear", ...} or null

All are read, with the precedence that transformers 5 gives them. The second is written, because
transformers 4 and 5 both read it.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megaspeed.config.document import JsonSyntaxError, describe_value, read_json_object
from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.families import FAMILIES, UNSUPPORTED, Family, Key
from megaspeed.config.model import (
    DERIVED_FIELDS,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    YarnScaling,
)
from megaspeed.config.section import Section
from megaspeed.files.paths import expand_home, file_problem, path_problem

CONFIG_FILE = "config.json"
DAMAGED = "incomplete or damaged; fetch it again"
"""Part of the message about a model's file that cannot be read."""

_NOT_EXPORTED = frozenset(
    {"preset", "from_hf", "embedding_dropout", "attention_dropout", "residual_dropout"}
    | {"router_aux_loss_coef", "router_bias_rate"}
)
"""Fields that change nothing in what a trained model computes."""

_INTERVAL = "no_rope_layer_interval"
_ORIGINAL = "original_max_position_embeddings"
_RANDOM_ONLY = "; to plan, or to train from random weights, copy the file and"
_ROTARY = ("rope_scaling", "rope_parameters")
_SCALINGS: Mapping[Any, type[Section]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


class Filled(NamedTuple):
    """A config without ``from_hf``. If there are problems, no field came from the file."""

    values: dict[str, Any]
    origins: dict[KeyPath, str]  # the file, for each field that came from it
    problems: list[Problem]  # with `model.from_hf`


def fill_from_hugging_face(values: Mapping[str, Any]) -> Filled:
    """Replace ``model.from_hf`` by the fields of the file that ``model`` does not state."""
    section = values.get("model")
    if not isinstance(section, dict) or not isinstance(section.get("from_hf"), str):
        return Filled(dict(values), {}, [])
    place = section["from_hf"]
    stated = {key: value for key, value in section.items() if key != "from_hf"}
    own = {k: v for k, v in stated.items() if v is not None or k not in DERIVED_FIELDS}
    try:
        fields = read_model_section(place)
        for name in ("preset", "architecture"):
            if stated.get(name) not in (None, fields.get(name)):
                law = f"it gives every field, but model.{name} {stated[name]!r} contradicts it"
                raise ConfigError([f"{law}; omit one (null removes an inherited key)"], place)
    except ConfigError as error:
        messages = [f"model.from_hf: {error.where}: {problem}" for problem in error.problems]
        problems = [Problem(("model", "from_hf"), message) for message in messages]
        return Filled({**values, "model": stated}, {}, problems)
    origins: dict[KeyPath, str] = {
        ("model", name): str(_config_file(place)) for name in fields if name not in own
    }
    return Filled({**values, "model": {**fields, **own}}, origins, [])


def read_model_section(place: str) -> dict[str, Any]:
    """Return the fields of ``model`` from a config.json, named by its folder or its path.

    Raises ConfigError if it cannot be read, or describes a model that our model does not support.
    """
    fields, problems = model_section(read_keys(place))
    if problems:
        raise ConfigError(problems, where=str(_config_file(place)))
    return fields


def read_keys(place: str) -> dict[str, Any]:
    """Return the keys of a config.json, named by its folder or its path.

    Raises ConfigError if it cannot be read.
    """
    file = _config_file(place)
    problem = path_problem(place)
    if problem is None and (reason := file_problem(file)) is not None:
        is_missing = file != expand_home(place) and not os.path.lexists(file)
        problem = f"there is no {CONFIG_FILE}" if is_missing else f"it {reason}"
    if problem is not None:
        mend = "name a folder as save_pretrained writes it, or the file (nothing is downloaded)"
        raise ConfigError([f"{problem}; {mend}"], where=str(file))
    try:
        keys, duplicates = read_json_object(file, allow_nan=True)
    except JsonSyntaxError as error:
        raise ConfigError([f"{error}: {DAMAGED}"], where=str(file)) from error
    if duplicates:
        raise ConfigError([duplicate.message for duplicate in duplicates], where=str(file))
    return keys


def model_section(keys: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``model`` that a config.json states.

    Returns:
        The fields, without those that are derived from others; and a sentence for each setting that
        our model does not support.
    """
    name = keys.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        given = "missing; state it" if name is None else describe_value(name)
        if lacking := UNSUPPORTED.get(str(name)):
            given += f", and megaspeed has no {lacking}"
        return {}, [f"model_type must be {_alternatives(FAMILIES)}, but it is {given}"]
    family = FAMILIES[name]
    contradictions = [*_contradictions(keys, family)]
    keys = {family.other_names.get(key, key): value for key, value in keys.items()}
    fields: dict[str, Any] = {"architecture": name}
    for field, key in family.keys.items():
        value = keys.get(key.name, key.default)
        if key.values is not None:
            value = key.values.get(str(value))
        if value is not None or key.default is not None:
            fields[field] = value
    problems = [*contradictions, *_unsupported_values(keys, family)]
    if _INTERVAL in fields:
        fields[_INTERVAL] = fields[_INTERVAL] or None
        problems += _other_rotations(keys, fields)
    if family.features["positions"] == "rotary":
        # As in transformers, the first one of these two that is stated counts.
        name = next((n for n in _ROTARY if keys.get(n)), _ROTARY[-1])
        stated = keys.get(name) or {}
        problems += _rotary_problems(keys, name, stated, family)
        if not problems:
            for field in ("rope_theta", "partial_rotary_factor"):
                default = {field: ModelConfig.model_fields[field].default}
                places = (stated, fields if field in family.keys else keys, default)
                values = (place.get(field) for place in places)
                fields[field] = next(value for value in values if value is not None)
            rope_type = _rotary_type(stated)
            if rope_type in _SCALINGS:
                defaults = {_ORIGINAL: fields["max_position_embeddings"]}
                found = {**defaults, **stated, "rope_type": rope_type}
                known = _SCALINGS[rope_type].model_fields
                fields["rope_scaling"] = {key: found[key] for key in known if key in found}
    return fields, problems


def hugging_face_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, in keys that transformers 4 and 5 read, without token ids.

    Raises ConfigError if transformers' class of the family cannot compute the model.
    """
    family = FAMILIES[model.architecture]
    if "attention_multiplier" in family.keys and model.attention_multiplier is None:
        model = model.model_copy(update={"attention_multiplier": model.head_dim**-0.5})
    keys = {
        "architectures": [family.class_name],
        "model_type": model.architecture,
        "pad_token_id": None,  # Phi-3's default may exceed the vocabulary
        **{key.name: _written(model, name, key) for name, key in family.keys.items()},
        **{key: values[0] for key, values in family.fixed.items() if values[0] is not None},
    }
    if _INTERVAL in family.keys:
        # transformers requires a number for the interval, but only uses the list.
        keys[_INTERVAL] = interval = model.no_rope_layer_interval or 0
        blocks = range(1, model.num_hidden_layers + 1)
        keys["no_rope_layers"] = [_rotates(block, interval) for block in blocks]
    if model.positions == "rotary":
        scaling = model.rope_scaling
        keys.setdefault("rope_theta", model.rope_theta)
        keys["rope_scaling"] = None if scaling is None else scaling.model_dump(exclude_none=True)
    exported = ModelConfig.model_validate(model_section(keys)[0])
    problems = [
        f"model.{name} is {getattr(model, name)}, but {family.class_name} of transformers has "
        f"{getattr(exported, name)}; train with that value to export the model"
        for name in ModelConfig.model_fields
        if name not in _NOT_EXPORTED and getattr(exported, name) != getattr(model, name)
    ]
    if problems:
        raise ConfigError(problems, where=f"model.architecture {model.architecture}")
    return keys


def _written(model: ModelConfig, field: str, key: Key) -> Any:
    """Return the value of a field as transformers' ``key`` states it."""
    value = getattr(model, field)
    if key.values is None:
        return value
    return next((theirs for theirs, ours in key.values.items() if ours == value), key.default)


def _rotates(block: int, interval: int | None) -> int:
    """Return 1 if the queries and keys of a block, counted from 1, are rotated; 0 if not."""
    return int(not interval or block % interval != 0)


def _other_rotations(keys: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem if the list of blocks without rotation does not match the interval.

    Only the blocks of the list are looked at, because the number of layers is not checked yet.
    """
    interval, layers = fields[_INTERVAL], fields["num_hidden_layers"]
    listed = keys.get("no_rope_layers")
    if listed is None or not isinstance(interval, int | None) or not isinstance(layers, int):
        return
    numbers = listed[: max(layers, 0)] if isinstance(listed, list) else []
    blocks = enumerate(numbers, start=1)
    wrong = next((block for block, number in blocks if number != _rotates(block, interval)), None)
    if wrong is not None:
        found = f"that of block {wrong} is {describe_value(numbers[wrong - 1])}"
    elif isinstance(listed, list) and len(listed) >= layers:
        return
    else:
        found = f"it is {describe_value(listed)}"
    yield (
        f"no_rope_layers must have a number for each of {layers} blocks, 0 at the multiples of "
        f"{_INTERVAL} {interval or 0} and 1 elsewhere, but {found}"
    )


def _config_file(place: str) -> Path:
    """Return the config.json of a folder; ``place`` itself if it is a file."""
    path = expand_home(place)
    return path / CONFIG_FILE if os.path.isdir(path) else path


def _other_classes(keys: Mapping[str, Any], family: Family) -> list[str]:
    """Return the classes that a file names for its model and that lack the family's blocks.

    A class in ``auto_map`` counts by its name: transformers uses its own class of that name.
    """
    architectures, code = keys.get("architectures") or [], keys.get("auto_map") or {}
    if not isinstance(architectures, list) or not isinstance(code, dict):
        return [describe_value(code if isinstance(architectures, list) else architectures)]
    named = (*architectures, *(code[key] for key in code if key.startswith("AutoModel")))
    classes = dict.fromkeys(str(name).rpartition(".")[2] for name in named)
    heads = (
        r"(Model|LMHeadModel|DoubleHeadsModel|For(CausalLM|\w+Classification|QuestionAnswering))"
    )
    pattern = "(?i)(TF|Flax|FSDP)?" + re.sub(f"{heads}$", "", family.class_name) + heads
    return [name for name in classes if not re.fullmatch(pattern, name)]


def _contradictions(keys: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield a problem for each key that has different values under its two names."""
    for other, name in family.other_names.items():
        values = [keys[key] for key in (name, other) if key in keys]
        if values[1:] and values[0] != values[1]:
            given = " and ".join(map(describe_value, values))
            yield f"{name} and {other} are two names of one key, but they are {given}; remove one"


def _unsupported_values(keys: Mapping[str, Any], family: Family) -> Iterator[str]:
    if others := _other_classes(keys, family):
        yield (
            f"architectures and auto_map must name {family.class_name} or a class that differs in "
            f"its head, but they name {', '.join(others)}; write {family.class_name} if it is one"
        )
    supported = {key.name: tuple(key.values) for key in family.keys.values() if key.values}
    defaults = {key.name: key.default for key in family.keys.values()}
    for key, allowed in {**supported, **family.fixed}.items():
        value = keys.get(key, defaults.get(key, allowed[0]))
        # Types are compared because True == 1.
        if not any(value == one and type(value) is type(one) for one in allowed):
            yield f"{key} must be {_alternatives(allowed)}, but it is {describe_value(value)}"
    # Only Qwen's models have layers with a sliding window; transformers ignores the key elsewhere.
    types = keys.get("layer_types", ["full_attention"])
    is_full = isinstance(types, list) and all(each == "full_attention" for each in types)
    if "use_sliding_window" in family.fixed and types is not None and not is_full:
        yield f'each of layer_types must be "full_attention", but they are {describe_value(types)}'


def _alternatives(values: Iterable[Any]) -> str:
    return " or ".join(json.dumps(value) for value in values)


def _rotary_type(stated: Mapping[str, Any]) -> Any:
    return stated.get("rope_type", stated.get("type", "default"))


def _rotary_problems(
    keys: Mapping[str, Any], name: str, stated: Any, family: Family
) -> Iterator[str]:
    """Yield what our model does not support of the value of a key for rotary positions."""
    if not isinstance(stated, dict):
        yield f"{name} must be an object or null, but it is {describe_value(stated)}"
        return
    nested = [key for key, value in stated.items() if isinstance(value, dict)]
    if nested:
        types = ", ".join(nested)
        yield f"{name} must be the same for all layers, but it differs by type ({types})"
        return
    rope_type = _rotary_type(stated)
    if rope_type not in family.rope_types:
        yield (
            f"rope_type in {name} must be {_alternatives(family.rope_types)}, but it is "
            f"{describe_value(rope_type)}{_RANDOM_ONLY} set {name} to null"
        )
    elif rope_type in _SCALINGS:
        known = _SCALINGS[rope_type].model_fields
        required = {key for key, field in known.items() if field.is_required()}
        required -= {"rope_type", _ORIGINAL}
        if missing := [key for key in known if key in required and stated.get(key) is None]:
            yield f"{name} of rope_type {rope_type} lacks {', '.join(missing)}"
        top = keys.get(_ORIGINAL)
        if _ORIGINAL in known and top not in (None, stated.get(_ORIGINAL)):
            yield (
                f"{_ORIGINAL} must be omitted at the top level or equal to that in {name}, because "
                f"versions of transformers read different ones, but it is {describe_value(top)}"
            )
    partial = stated.get("partial_rotary_factor", keys.get("partial_rotary_factor"))
    if "partial_rotary_factor" not in family.keys and partial not in (None, 1.0):
        given = describe_value(partial)
        yield f"partial_rotary_factor must be 1.0, but it is {given}{_RANDOM_ONLY} set it to 1.0"
