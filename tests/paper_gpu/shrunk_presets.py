"""Models of one layer with the head sizes of the presets."""

from collections.abc import Mapping
from typing import Any

from megaspeed.config.model import PRESETS, ModelConfig

SEQUENCE = 16


def shrunk(preset: Mapping[str, Any], key_value_heads: int) -> ModelConfig:
    """Return one layer with the preset's head size and its query heads for each key/value head."""
    heads, stored = preset["num_attention_heads"], preset.get("num_key_value_heads")
    group = heads // (stored or heads)
    values = {
        "architecture": preset["architecture"],
        "vocab_size": 32,
        "hidden_size": preset["hidden_size"] // heads * group * key_value_heads,
        "num_hidden_layers": 1,
        "num_attention_heads": group * key_value_heads,
        "max_position_embeddings": SEQUENCE,
    }
    if stored is not None:
        values.update(num_key_value_heads=key_value_heads, intermediate_size=64)
    return ModelConfig(**values)


def every_model() -> dict[str, ModelConfig]:
    """Return each preset once, and those with fewer key/value heads than two."""
    models = {name: shrunk(preset, 2) for name, preset in PRESETS.items()}
    shared = {
        f"{name}, one key/value head": shrunk(preset, 1)
        for name, preset in PRESETS.items()
        if preset.get("num_key_value_heads", preset["num_attention_heads"])
        < preset["num_attention_heads"]
    }
    return models | shared
