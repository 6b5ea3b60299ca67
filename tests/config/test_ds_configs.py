"""The files of ds_configs/ load as they stand, and editors can check them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from megaspeed.config import ModelConfig, read_config
from megaspeed.config.json_schema import json_schema, json_schema_text
from tests.config.small import load, small

FOLDER = Path(__file__).parents[2] / "ds_configs"
FILES = sorted(file for file in FOLDER.glob("*.json") if not file.name.endswith(".schema.json"))


def test_the_files_are_there() -> None:
    assert {"base", "zero0", "zero1", "zero2", "zero3", "zero3_offload", "3d", "gpt2_1.5b"} <= {
        file.stem for file in FILES
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_every_file_loads_for_1_2_4_and_8_data_ranks(file: Path, processes: int) -> None:
    data_only = ("parallel.pipeline=1", "parallel.tensor=1")
    run = load(file, *data_only, world_size=processes)
    assert run.degrees.dp == processes
    assert run.batch.train_batch_size == load(file, *data_only).batch.train_batch_size


def test_3d_is_two_by_two_by_two() -> None:
    run = load(FOLDER / "3d.json", world_size=8)
    assert (run.degrees.pp, run.degrees.dp, run.degrees.tp, run.zero_stage) == (2, 2, 2, 3)
    assert run.batch.gradient_accumulation_steps == 4
    assert run.config.zero_optimization.stage3_param_persistence_threshold == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zero_files_differ_in_nothing_but_zero(stage: int) -> None:
    base = read_config(FOLDER / "base.json")
    config = read_config(FOLDER / f"zero{stage}.json")
    assert config.zero_optimization.stage == stage
    assert config.model_copy(update={"zero_optimization": base.zero_optimization}) == base


def test_a_layout_can_be_changed_with_set_alone() -> None:
    run = load(FOLDER / "zero1.json", "parallel.tensor=2", "parallel.pipeline=4", world_size=8)
    assert (run.degrees.pp, run.degrees.dp, run.degrees.tp) == (4, 1, 2)


def test_a_model_can_be_changed_with_set_alone() -> None:
    model = read_config(FOLDER / "zero1.json", ["model.preset=llama-tiny"]).model
    assert model == ModelConfig.model_validate({"preset": "llama-tiny"})


def test_the_committed_schema_is_current() -> None:
    committed = (FOLDER / "megaspeed.schema.json").read_text()
    assert committed == json_schema_text(), (
        "run: python -m megaspeed.config.json_schema ds_configs/megaspeed.schema.json"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_valid_under_its_schema(file: Path) -> None:
    values = json.loads(file.read_text())
    assert values["$schema"] == "megaspeed.schema.json"
    jsonschema.validate(values, json_schema())


def test_the_schema_refuses_what_a_run_refuses() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for wrong in ({"zzz": 1}, {"model": {"hiden_size": 1}}, {"zero_optimization": {"stage": 4}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**small(), **wrong}, json_schema())


def test_the_schema_knows_a_bound_that_stands_behind_a_validator() -> None:
    negative = {"zero_optimization": {"stage3_model_persistence_threshold": -1}}
    with pytest.raises(jsonschema.ValidationError, match="-1"):
        jsonschema.validate(negative, json_schema())


def test_the_schema_uses_no_word_that_json_schema_does_not_know() -> None:
    """A validator passes over a word it does not know, and with it over the bound it stands for."""
    annotations = {"$schema", "$defs", "title", "description", "default"}
    known = annotations | set(jsonschema.Draft202012Validator.VALIDATORS)
    assert keywords_in(json_schema()) <= known
    assert not keywords_in({"properties": {"a": {"anyOf": [{"ge": 0}]}}}) <= known


def keywords_in(schema: Any) -> set[str]:
    """Every word of a schema and of those within it; names of properties are not words."""
    if isinstance(schema, list):
        return set().union(*map(keywords_in, schema))
    if not isinstance(schema, dict):
        return set()
    words = set(schema)
    for word, inner in schema.items():
        if word in ("properties", "$defs"):
            words |= keywords_in(list(inner.values()))
        elif word not in ("default", "enum", "const"):
            words |= keywords_in(inner)
    return words


def test_every_key_says_what_it_means() -> None:
    """A key whose sentence is that of its section shows it there, through the reference."""
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            section = field.get("$ref", "").rpartition("/")[2]
            shown = field.get("description") or schema["$defs"][section]["description"]
            assert len(shown) > 10, name


def test_the_configuration_loads_no_torch() -> None:
    code = "import sys, megaspeed.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
