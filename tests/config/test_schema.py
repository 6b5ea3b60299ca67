"""The schema for editors and the documentation contain every key."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from megaspeed.config.document import Document, read_document
from megaspeed.config.json_schema import TABLES, json_schema, json_schema_text, key_tables
from megaspeed.config.layout import World
from megaspeed.config.loading import all_key_paths, check_document, parse_config
from tests.config.small import small, write

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ds_configs"
FILES = sorted(file for file in FOLDER.glob("*.json") if not file.name.endswith(".schema.json"))
DOCUMENT = ROOT / "docs" / "configuration.md"
WRITE_AGAIN = (
    "run: python -m megaspeed.config.json_schema ds_configs/megaspeed.schema.json "
    "docs/configuration.md"
)


def test_the_committed_schema_is_current() -> None:
    assert (FOLDER / "megaspeed.schema.json").read_text() == json_schema_text(), WRITE_AGAIN


def test_the_documented_keys_are_current() -> None:
    assert DOCUMENT.read_text().partition(TABLES)[2] == f"\n{key_tables()}", WRITE_AGAIN


def test_every_key_is_documented() -> None:
    """If two keys of a table have the same section (offload_param, offload_optimizer), it counts
    once.
    """
    leaves = {path.rpartition(".")[2] for path in all_key_paths()}
    tables = key_tables().partition("### Other keys of DeepSpeed")[0]
    documented = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
    titles = re.findall(r"^### `(\w+)`", tables, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in documented} | set(titles) == leaves | {"extends"}


def test_the_documented_numbers_of_a_scheduler_are_those_of_its_type() -> None:
    rows = re.findall(
        r"^\| (`.*Warmup\w+`|`cosine.*`|`constant`|`wsd`) \| (.*) \|$", prose(), re.MULTILINE
    )
    numbers: dict[str, set[str]] = {}
    for types, listed in rows:
        keys = set(re.findall(r"`([a-z_]+)`", listed))
        for inherited in re.findall(r"those of `(\w+)`", listed):
            keys |= numbers[inherited]
        numbers |= dict.fromkeys(re.findall(r"`(\w+)`", types), keys)
    wrong = check_document(Document(small(scheduler={"type": "x"}))).problems[0]
    assert set(numbers) == set(re.findall(r'"(\w+)"', wrong.partition("wanted")[2]))
    for kind, keys in numbers.items():
        params = {"warmup_num_steps": 5, "decay_num_steps": 5}
        values = {"type": kind, "params": {key: params[key] for key in params if key in keys}}
        scheduler = parse_config(small(scheduler=values)).scheduler
        assert scheduler is not None and keys == set(type(scheduler.params).model_fields)


def prose() -> str:
    """Return the documentation before the tables of keys."""
    return DOCUMENT.read_text().partition(TABLES)[0]


def examples() -> list[dict[str, Any]]:
    """Return the JSON files in the documentation that have several lines."""
    blocks = re.findall(r"^    \{\n.*?^    \}\n", prose(), re.MULTILINE | re.DOTALL)
    return [json.loads(block) for block in blocks]


def test_the_documented_file_is_complete() -> None:
    first, *_ = examples()
    assert parse_config(first).train_batch_size == 16
    for section, key in (("data", "sequence_length"), ("training", "steps")):
        without = {**first, section: {k: v for k, v in first[section].items() if k != key}}
        (problem,) = check_document(Document(without)).problems
        assert problem.startswith(f"{section}.{key} is missing")


def test_the_documented_errors_are_those_of_the_documented_file(tmp_path: Path) -> None:
    _, wrong, *_ = examples()
    document = read_document(write(tmp_path / "run.json", wrong), ["parallel.tensor=2"])
    found = check_document(document, World(8, "--world-size")).problems
    block = prose().partition("    5 problems in run.json:\n")[2].partition("\n\n")[0]
    shown = [" ".join(text.split()) for text in re.split(r"^      \d\. ", block, flags=re.M)[1:]]
    assert shown == list(found)


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


def test_the_schema_has_a_bound_that_a_validator_checks() -> None:
    negative = {"zero_optimization": {"stage3_model_persistence_threshold": -1}}
    with pytest.raises(jsonschema.ValidationError, match="-1"):
        jsonschema.validate(negative, json_schema())


def test_the_schema_uses_only_keywords_of_json_schema() -> None:
    """A validator ignores an unknown keyword, and so the bound that it states."""
    annotations = {"$schema", "$defs", "title", "description", "default"}
    known = annotations | set(jsonschema.Draft202012Validator.VALIDATORS)
    assert keywords_in(json_schema()) <= known
    assert not keywords_in({"properties": {"a": {"anyOf": [{"ge": 0}]}}}) <= known


def keywords_in(schema: Any) -> set[str]:
    """Return every keyword of a schema and of its subschemas. Names of properties
    are no keywords.
    """
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


def test_every_key_has_a_description() -> None:
    """A section's description may be in the section itself. The key then has a reference to it."""
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            section = field.get("$ref", "").rpartition("/")[2]
            shown = field.get("description") or schema["$defs"][section]["description"]
            assert len(shown) > 10, name
