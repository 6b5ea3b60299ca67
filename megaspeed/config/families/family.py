"""A family of models: the features that its members share, and how transformers writes one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key of a config.json that is one of our fields.

    Attributes:
        theirs: the key.
        ours: the field of the `model` section.
        default: transformers' value if the file omits the key. None: the field is derived, or null.
    """

    theirs: str
    ours: str
    default: Any = None


@dataclass(frozen=True)
class FixedKey:
    """A key that must have one of some values; the first is transformers' default."""

    key: str
    allowed: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `model.architecture` names.

    Attributes:
        features: fields of the `model` section that the family sets unless the JSON states them.
        class_name: transformers' class with the language-modelling head.
        keys: the keys of its config.json that are fields of ours.
        fixed: the keys for which our model supports only some values.
        other_names: second names of keys that transformers accepts.
        prefix: start of the name of every tensor but the head's. Files of the model without its
            head omit it.
        blocks: their name for the list of blocks.
        modules: our module -> their modules. Names within a block omit "blocks.3.". There is one of
            their modules for each section of our rows (``model/parameters.py``), or one for all.
        transposes_blocks: whether the matrices of a block are stored as (in, out).
        buffers: regular expression for names of constants that older files also contain.
    """

    features: Mapping[str, Any]
    class_name: str
    keys: tuple[Key, ...]
    fixed: tuple[FixedKey, ...]
    other_names: Mapping[str, str] = field(default_factory=dict)
    prefix: str
    blocks: str
    modules: Mapping[str, tuple[str, ...]]
    transposes_blocks: bool = False
    buffers: str
