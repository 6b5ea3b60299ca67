"""The tensors of a checkpoint: every parameter whole under its own name, and its two moments.

    weights.blocks.0.mlp.up.weight       (F, D)   float32
    exp_avg.blocks.0.mlp.up.weight       (F, D)   float32
    exp_avg_sq.blocks.0.mlp.up.weight    (F, D)   float32

They follow from the model alone. A model that was imported and not yet trained has no moments.
Pure arithmetic on names and shapes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megaspeed.config.errors import shortened
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Shape, parameters_of

WEIGHTS = "weights"
KINDS = (WEIGHTS, "exp_avg", "exp_avg_sq")
"""Master weights, and Adam's first and second moment (Kingma and Ba 2015, algorithm 1)."""

MOST_TOLD = 10
"""Sentences about the tensors of one checkpoint; the rest is counted."""


def key(kind: str, name: str) -> str:
    """The name in a checkpoint of one of the three tensors of a parameter."""
    return f"{kind}.{name}"


def expected_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Full name -> full, unpadded shape of every parameter; a tied head is the embedding."""
    return {name: parameter.shape for name, parameter in parameters_of(model).items()}


def expected_tensors(model: ModelConfig, kinds: Sequence[str] = KINDS) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of every tensor that a checkpoint of the model holds."""
    shapes = expected_shapes(model)
    return {key(kind, name): shape for name, shape in shapes.items() for kind in kinds}


def mismatches(expected: Mapping[str, Shape], saved: Mapping[str, Shape]) -> list[str]:
    """What keeps the tensors of a checkpoint from being those of a model, a sentence each.

    Both are by name in the checkpoint, or both by parameter. What holds for a weight and its two
    moments alike is said once. After ten sentences the rest is counted.
    """
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for full_name, complaint in _complaints(expected, saved):
        kind, name = _split(full_name)
        kinds[name, complaint].append(kind)
    sentences = (
        f"{full_name} {complaint}"
        for (name, complaint), of in kinds.items()
        for full_name in _full_names(name, of)
    )
    return shortened(sentences, MOST_TOLD)


def shape_text(shape: Shape) -> str:
    """A shape as it reads in a sentence.

    >>> shape_text((301, 32)), shape_text((32,))
    ('301 x 32', '32')
    """
    return " x ".join(map(str, shape)) or "a single number"


def _complaints(
    expected: Mapping[str, Shape], saved: Mapping[str, Shape]
) -> Iterator[tuple[str, str]]:
    """Name and what is wrong with it."""
    for name, shape in expected.items():
        if name not in saved:
            yield name, f"({shape_text(shape)}) is missing in the checkpoint"
        elif tuple(saved[name]) != tuple(shape):
            yield (
                name,
                f"is {shape_text(saved[name])} in the checkpoint and {shape_text(shape)} in the "
                "model",
            )
    for name, shape in saved.items():
        if name not in expected:
            yield name, f"({shape_text(shape)}) is in the checkpoint and not in the model"


def _split(full_name: str) -> tuple[str, str]:
    """Kind and parameter; no kind where the name is a parameter's."""
    kind, _, name = full_name.partition(".")
    return (kind, name) if kind in KINDS else ("", full_name)


def _full_names(name: str, kinds: list[str]) -> list[str]:
    """The parameter alone where all its tensors are meant."""
    if kinds == [""] or len(kinds) == len(KINDS):
        return [name]
    return [key(kind, name) for kind in kinds]
