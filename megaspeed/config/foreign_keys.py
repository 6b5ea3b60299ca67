"""Refuses keys and values of DeepSpeed files that cannot work here."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from megaspeed.config.deepspeed import DeepSpeedKeys
from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.config.refusals import REFUSED_KEYS

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def refuse_foreign_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Remove the keys that cannot work, with a problem for each that is not inert.

    Returns:
        The remaining values (a copy) and the problems.
    """
    problems = [
        *_refused_keys(values),
        *_auto_values(values),
        *_nvme(values),
    ]
    taken_out = [tuple(name.split(".")) for name in REFUSED_KEYS]
    return without(values, [*taken_out, *(problem.path for problem in problems)]), problems


def without(values: Mapping[str, Any], paths: list[KeyPath]) -> dict[str, Any]:
    """A copy of a tree without the values at these paths, if they exist."""
    here = {path[0] for path in paths if len(path) == 1}
    below: dict[str | int, list[KeyPath]] = defaultdict(list)
    for path in paths:
        below[path[0]].append(path[1:])
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key in here:
            continue
        inside = below.get(key)
        kept[key] = without(value, inside) if inside and isinstance(value, dict) else value
    return kept


def _refused_keys(values: Mapping[str, Any]) -> Iterator[Problem]:
    for name, refusal in REFUSED_KEYS.items():
        path = tuple(name.split("."))
        held = _value_at(values, path)
        if held is not _ABSENT and not refusal.lets_pass(held):
            yield Problem(path, f"{name} cannot be used here: {refusal.reason}")


def _auto_values(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Only Hugging Face's Trainer replaces "auto" by a value. DeepSpeed does not."""
    for key in DeepSpeedKeys.model_fields:
        for path in _paths_of_auto(values.get(key), (key,)):
            mend = "omit the key to use its default, or write a value"
            if key in _BATCH_KEYS:
                mend = "leave it out: any two of the three batch keys give the third"
            yield Problem(
                path,
                f'{dotted(path)} is "auto", which only Hugging Face\'s Trainer fills in; {mend}',
            )


def _nvme(values: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("offload_param", "offload_optimizer"):
        path = ("zero_optimization", name, "device")
        if _value_at(values, path) == "nvme":
            yield Problem(
                path,
                f'{dotted(path)} is "nvme", but state can only move to host memory; write "cpu"',
            )


def _paths_of_auto(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if value == "auto" and ".".join(map(str, path)) not in REFUSED_KEYS:
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths_of_auto(inner, (*path, key))


class _Absent:
    """Represents a key that is absent. (A key with the value null is present.)"""


_ABSENT = _Absent()


def _value_at(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    here: Any = values
    for part in path:
        if not isinstance(here, dict) or part not in here:
            return _ABSENT
        here = here[part]
    return here
