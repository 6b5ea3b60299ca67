"""How one set of keys is laid over another: RFC 7396, JSON Merge Patch.

Objects merge key by key, anything else replaces what was there, and null takes an inherited key
away, so that a file can get rid of what the file it extends has set:

    base   {"scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": true}}
    patch  {"scheduler": null,                 "bf16": {"check_grad_overflow": false}}
    gives  {"bf16": {"enabled": true, "check_grad_overflow": false}}

One difference: a null where nothing was inherited is kept, because our optional fields take null.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megaspeed.config.errors import KeyPath


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `patch` laid over it; neither is changed."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def paths_in(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value in a tree of objects, containers included."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths_in(inner, (*path, key))
