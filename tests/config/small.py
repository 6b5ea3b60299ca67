"""A small config as JSON values, and functions that find its problems."""

import copy
import json
from pathlib import Path
from typing import Any

from megaspeed.config.document import Document, merge, parse_override
from megaspeed.config.layout import World
from megaspeed.config.loading import check_document, load_run
from megaspeed.config.resolve import Run

_SMALL: dict[str, Any] = {
    "model": {
        "architecture": "gpt2",
        "vocab_size": 301,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
    },
    "data": {"sequence_length": 32},
    "training": {"steps": 100},
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
}


def small(**keys: Any) -> dict[str, Any]:
    """Return a valid config of 12 heads and 4 blocks, with these keys merged over it."""
    return merge(copy.deepcopy(_SMALL), keys)


def patch(*overrides: str) -> dict[str, Any]:
    """Return the values of ``--set`` options, for example of ``patch("parallel.tensor=2")``."""
    trees = [parse_override(text)[0] for text in overrides]
    merged: dict[str, Any] = {}
    for tree in trees:
        merged = merge(merged, tree)
    return merged


def problems(
    *overrides: str, world_size: int | None = None, device_type: str = "cpu", **keys: Any
) -> list[str]:
    """Return all problems of the small config with overrides, or with keys given as values.

    The overrides ``world=8`` and ``device=cuda`` set the processes.
    """
    for text in overrides:
        name, _, value = text.partition("=")
        world_size = int(value) if name == "world" else world_size
        device_type = value if name == "device" else device_type
    changes = [text for text in overrides if not text.startswith(("world=", "device="))]
    world = None if world_size is None else World(world_size, "WORLD_SIZE", device_type)
    values = small(**{**patch(*changes), **keys})
    return list(check_document(Document(values), world).problems)


def only_problem(*overrides: str, **keys: Any) -> str:
    """Return the only problem."""
    found = problems(*overrides, **keys)
    assert len(found) == 1, found
    return found[0]


def write(file: Path, values: dict[str, Any]) -> Path:
    """Write JSON values to a file."""
    file.write_text(json.dumps(values))
    return file


def load(file: Path, *overrides: str, world_size: int = 1) -> Run:
    """Load the run of a file."""
    return load_run(file, overrides, World(world_size, "WORLD_SIZE"))
