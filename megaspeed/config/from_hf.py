"""`"model": {"from_hf": DIR}`: a model section from a Hugging Face config.json.

    {"from_hf": "gpt2-dir", "num_hidden_layers": 6}   ->   every field of the file, with 6 layers

The fields replace the key, so the resolved config of a run does not need DIR.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspeed.config.errors import ConfigError, KeyPath, Problem
from megaspeed.config.hugging_face import model_section
from megaspeed.config.model import DERIVED_FIELDS
from megaspeed.config.strict_json import JsonSyntaxError, read_json_object
from megaspeed.files.paths import expand_home, path_problem
from megaspeed.files.reading import file_problem

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
