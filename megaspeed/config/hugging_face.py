"""Converts Hugging Face's `config.json` to fields of the `model` section, and back.

    config.json  --model_section-->  fields of `model`  --hugging_face_config-->  config.json

The tables are in ``families/``: which of their keys correspond to our fields, and which must
have a certain value because our model supports no other. If a file omits a key, it has
transformers' default, which sometimes differs from ours. A key that is in no table changes nothing
in transformers' model of the family, so it is ignored.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.families import FAMILIES
from megaspeed.config.families.family import Family, FixedKey
from megaspeed.config.model import ModelConfig
from megaspeed.config.rotary_keys import rotary_fields, rotary_keys, rotary_problems
from megaspeed.config.strict_json import describe_value

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
