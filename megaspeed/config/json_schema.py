"""The JSON Schema with which editors complete and check configs, generated from the models.

Generate the committed file again with

    python -m megaspeed.config.json_schema ds_configs/megaspeed.schema.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from megaspeed.config.run import RunConfig

_FILE_KEYS = {
    "$schema": {"type": "string", "description": "This schema, for editors; ignored by a run."},
    "extends": {
        "type": "string",
        "description": "Path, relative to this file, of a config whose keys are the defaults of "
        "this one. Objects are merged key by key; null removes an inherited key.",
    },
}


# pydantic's names, which it writes if a validator precedes the bound, and JSON Schema's names.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}


def json_schema() -> dict[str, Any]:
    """The schema of a config file.

    No key is required, because any of them may come from the file that is extended.
    """
    schema = RunConfig.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
        for field in part.get("properties", {}).values():
            _simplify(field)
    schema["properties"] = {**_FILE_KEYS, **schema["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "megaspeed run",
    }


def json_schema_text() -> str:
    """The schema as it stands in the committed file."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _simplify(field: dict[str, Any]) -> None:
    """Removes titles, because editors show the key, and defaults of null, which mean "omitted"."""
    field.pop("title", None)
    if field.get("default", ...) is None:
        field.pop("default", None)
    for choice in (field, *field.get("anyOf", [])):
        for pydantics, ours in _BOUNDS.items():
            if pydantics in choice:
                choice[ours] = choice.pop(pydantics)
        # A file may change one number of a scheduler whose type is in the file that it extends.
        # Then several types fit.
        if "oneOf" in choice:
            choice["anyOf"] = choice.pop("oneOf")
            choice.pop("discriminator", None)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json_schema_text(), encoding="utf-8")
