"""Read DeepSpeed's files as they are: separate megaspeed's keys from the others, and "auto".

    values of the JSON -> ``accept`` -> values of megaspeed's keys, problems, notes

A note names each key that is accepted without its effect. ``foreign_keys.py`` lists the keys.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.document import describe_value, paths_in
from megaspeed.config.errors import KeyPath, Problem, dotted
from megaspeed.config.foreign_keys import (
    DISABLED_BY_DEFAULT,
    EFFECTIVE_STAGES,
    NO_EFFECT,
    OFF,
    REFUSED,
    RENAMED,
    SERVICES,
)

_OWN = ("model", "parallel", "data", "training")
_ADAM = {"adam": "Adam", "adamw": "AdamW"}
_WARMUP_MAX_LR = 0.001  # DeepSpeed's default

_SIZES = ("zero_optimization.sub_group_size", "zero_optimization.reduce_bucket_size")
"""Keys for which 0 would mean that each parameter is sent or updated separately."""


@dataclass(frozen=True)
class Accepted:
    """The values of megaspeed's keys, and what was found about the others.

    Attributes:
        values: the JSON without keys that megaspeed does not have.
        problems: one for each key that is refused.
        notes: a sentence for each group of keys that have another name or no effect.
        auto: megaspeed's keys that are "auto", which ``values`` does not have.
    """

    values: dict[str, Any]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    auto: tuple[KeyPath, ...]

    def all_notes(
        self, stated: Mapping[str, Any], resolved: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """Return the notes, and those about values that follow from other keys.

        Args:
            stated: the config's values with defaults.
            resolved: the same, with the values that are computed for a number of processes; None
                if that number is not known.
        """
        auto = ", ".join(
            f"{dotted(path)} {_computed_value(stated, resolved, path)}" for path in self.auto
        )
        notes = [f'"auto" means omitted here: {auto}', *self.notes] if auto else list(self.notes)
        highest: KeyPath = ("scheduler", "params", "warmup_max_lr")
        rate = _at(resolved, highest)
        if rate not in (None, _WARMUP_MAX_LR) and (
            _at(stated, highest) is None and highest not in self.auto
        ):
            notes.append(
                "scheduler.params.warmup_max_lr is omitted, so it is optimizer.params.lr "
                f"{rate:g}; DeepSpeed's default is {_WARMUP_MAX_LR}"
            )
        return tuple(notes)


def accept(values: Mapping[str, Any], known: Collection[str]) -> Accepted:
    """Separate megaspeed's keys from DeepSpeed's others.

    Args:
        values: the JSON, which is not changed.
        known: megaspeed's keys as dotted paths. An unknown key stays, and is refused later.
    """
    tree = copy.deepcopy(dict(values))
    dropped: dict[str, list[KeyPath]] = defaultdict(list)
    auto: dict[KeyPath, KeyPath] = {}
    for path in (path for path in paths_in(tree) if path[0] not in _OWN):
        name = dotted(path)
        if str(path[-1]).startswith("_"):
            dropped["the name of a comment begins with _"].append(path)
        elif _at(tree, path) == "auto" and dotted(new := _new_path(path)) in known:
            auto[path] = new
        elif _at(tree, path) == "nvme" and path[1:] and not _acts(tree, path):
            dropped["state is never moved to NVMe"].append(path)
        elif name in _SIZES and _at(tree, path) == 0:
            dropped["0 stands for the default"].append(path)
    tree = _without_emptied(tree, auto)
    notes: list[str] = []
    problems: list[Problem] = []
    _rename(tree, notes, problems)
    _refuse_other_optimizers(tree, problems)
    for name, reason in {**NO_EFFECT, **REFUSED}.items():
        path = tuple(name.split("."))
        value = _at(tree, path, absent=...)
        if value is ...:
            continue
        if _is_off(name, value) and (name in REFUSED or isinstance(value, dict)):
            dropped["as it is here" if name in OFF else "off"].append(path)
        elif name in NO_EFFECT:
            dropped[reason].append(path)
        else:
            problems.append(Problem(path, f"{name} cannot be used here: {reason}"))
    refused = [problem.path for problem in problems]
    kept = _without_emptied(tree, [*refused, *chain.from_iterable(dropped.values())])
    for reason, paths in dropped.items():
        notes.append(f"no effect here: {', '.join(map(dotted, paths))}: {reason}")
    notes += _notes_of_stage(kept.get("zero_optimization"))
    omitted = tuple(path for path in auto.values() if _at(kept, path, absent=...) is ...)
    return Accepted(kept, tuple(problems), tuple(notes), omitted)


def _new_path(path: KeyPath) -> KeyPath:
    """Return the path of a key if it, or the object that it is in, has an old name."""
    for length in range(len(path), 0, -1):
        new = RENAMED.get(dotted(path[:length]))
        if new is not None:
            return (*new.split("."), *path[length:])
    return path


def _acts(tree: Mapping[str, Any], path: KeyPath) -> bool:
    """Return whether a key of zero_optimization has an effect at the stated stage."""
    stage = _at(tree, ("zero_optimization", "stage"), absent=0)
    return stage in EFFECTIVE_STAGES.get(str(path[-2]), (stage,))


def _rename(tree: dict[str, Any], notes: list[str], problems: list[Problem]) -> None:
    """Give old names in ``tree`` their new ones."""
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        tree["zero_optimization"] = {"stage": int(zero)}
        notes.append(f"zero_optimization is read as zero_optimization.stage {int(zero)}")
    for old, new in RENAMED.items():
        *section, name = old.split(".")
        owner = _at(tree, tuple(section))
        value = owner.pop(name, None) if isinstance(owner, dict) else None
        if section and owner in ({}, None):
            tree.pop(section[0], None)
        if value in (None, "auto") or value is False or (new == "parallel.tensor" and value == 0):
            continue
        value = {"device": "cpu"} if value is True and "offload" in old else value
        *section, key = new.split(".")
        owner = tree.setdefault(section[0], {}) if section else tree
        if not isinstance(owner, dict):
            continue  # its type is a mistake that is found later
        stated = owner.setdefault(key, value)
        if _agree(stated, value):
            notes.append(f"{old} is read as {new}")
        else:
            message = f"{old} means {new}, which is also stated, with another value; remove it"
            problems.append(Problem(tuple(old.split(".")), message))
    _report_to(tree, notes)


def _agree(stated: Any, value: Any) -> bool:
    """Return whether a key has the value of its old name, or all values of the old object."""
    if isinstance(stated, dict) and isinstance(value, dict):
        return all(stated.get(key) == each for key, each in value.items())
    return bool(stated == value)


def _report_to(tree: dict[str, Any], notes: list[str]) -> None:
    """Replace DeepSpeed's sections of services by ``training.report_to``."""
    for service in SERVICES:
        training = tree.get("training")
        section = tree.pop(service, None)
        is_on = isinstance(section, dict) and section.get("enabled") not in (None, False, "auto")
        if is_on and isinstance(training, dict):
            reported = training.get("report_to") or []
            if isinstance(reported, list) and service not in reported:
                training["report_to"] = [*reported, service]
            notes.append(
                f'{service} is read as training.report_to ["{service}"], which has no other keys'
            )


def _refuse_other_optimizers(tree: dict[str, Any], problems: list[Problem]) -> None:
    """Refuse another optimizer once, and remove its section, with all its parameters.

    As in DeepSpeed, capital letters do not matter.
    """
    kind = _at(tree, ("optimizer", "type"))
    if isinstance(kind, str) and kind.lower() in _ADAM:
        tree["optimizer"]["type"] = _ADAM[kind.lower()]
    elif isinstance(kind, str):
        del tree["optimizer"]
        message = (
            f'optimizer.type {describe_value(kind)} is not available; write "AdamW" (or "Adam", '
            "which means the same here) with the params lr, betas, eps and weight_decay"
        )
        problems.append(Problem(("optimizer",), message))


def _is_off(name: str, value: Any) -> bool:
    """Return whether a value switches its key off. A section is off if each of its parts is."""
    if not isinstance(value, dict):
        return value in (None, "auto", *OFF.get(name, (False,)))
    if "shared_parameters" in value:  # of a method of compression_training
        return _is_off("", value["shared_parameters"])
    if "enabled" in value or name in DISABLED_BY_DEFAULT:
        return value.get("enabled") in (None, False, "auto")
    return all(_is_off("", part) for part in value.values())


def _notes_of_stage(zero: Any) -> Iterator[str]:
    """Yield a note about keys that have no effect at the stated ZeRO stage."""
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    names = [
        f"zero_optimization.{name}"
        for name, stages in EFFECTIVE_STAGES.items()
        if isinstance(zero, dict) and stage not in stages and _changes(name, zero.get(name))
    ]
    if names:
        yield f"no effect at zero_optimization.stage {stage}: {', '.join(names)}"


def _changes(name: str, value: Any) -> bool:
    """Return whether a key of ZeRO has another value than its default."""
    if isinstance(value, dict):
        return value.get("device", "none") != "none"
    return value not in (None, ZeroConfig.model_fields[name].default)


def _computed_value(
    stated: Mapping[str, Any], resolved: Mapping[str, Any] | None, path: KeyPath
) -> str:
    """Return the value of a key that was omitted, and where it comes from."""
    default = _at(stated, path)
    if isinstance(default, dict):
        return "(default)"
    if default is not None:
        return f"{json.dumps(default)} (default)"
    if resolved is None:
        return "(depends on the number of processes)"
    value = _at(resolved, path)
    return "(not set)" if value is None else f"{json.dumps(value)} (computed)"


def _at(tree: Any, path: KeyPath, absent: Any = None) -> Any:
    """Return the value at a path of keys."""
    for part in path:
        tree = tree.get(part, absent) if isinstance(tree, dict) else absent
    return tree


def _without_emptied(tree: Mapping[str, Any], paths: Collection[KeyPath]) -> dict[str, Any]:
    """As ``without``, and without the objects that have no other keys, which state nothing."""
    kept = without(tree, paths)
    parents = {path[:length] for path in paths for length in range(1, len(path))}
    for parent in sorted(parents, key=len, reverse=True):
        if _at(kept, parent) == {}:
            kept = without(kept, [parent])
    return kept


def without(values: Mapping[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    """Return a copy of a tree without the values at these paths, if they exist."""
    kept: dict[str, Any] = copy.deepcopy(dict(values))
    for *sections, name in paths:
        owner = _at(kept, tuple(sections))
        if isinstance(owner, dict):
            owner.pop(name, None)
    return kept
