"""Names and shapes of the tensors of a checkpoint: each parameter and its two moments.

    weights.blocks.0.mlp.up.weight       (F, D)   float32
    exp_avg.blocks.0.mlp.up.weight       (F, D)   float32
    exp_avg_sq.blocks.0.mlp.up.weight    (F, D)   float32

They follow from the model alone. An imported model that was not trained yet has no moments.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megaspeed.config.errors import shortened
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Shape, parameters_of

WEIGHTS = "weights"
KINDS = (WEIGHTS, "exp_avg", "exp_avg_sq")
"""Master weights, and Adam's first and second moment (Kingma and Ba 2015, algorithm 1)."""

BYTES_PER_ELEMENT = 4
"""Every tensor is fp32."""

MOST_LISTED = 10
"""How many problems of the tensors of one checkpoint are listed. The rest is counted."""


def key(kind: str, name: str) -> str:
    """The name in a checkpoint of one of the three tensors of a parameter."""
    return f"{kind}.{name}"


def expected_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Full name -> full, unpadded shape of every parameter; a tied head is the embedding."""
    return {name: parameter.shape for name, parameter in parameters_of(model).items()}


def expected_tensors(model: ModelConfig, kinds: Sequence[str] = KINDS) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of every tensor in a checkpoint of the model."""
    shapes = expected_shapes(model)
    return {key(kind, name): shape for name, shape in shapes.items() for kind in kinds}


def mismatches(expected: Mapping[str, Shape], saved: Mapping[str, Shape]) -> list[str]:
    """The differences between the tensors of a checkpoint and those of a model, as sentences.

    Both arguments have names in the checkpoint, or both have names of parameters. If a weight and
    its moments have the same problem, it is listed once. At most ten problems are listed.
    """
    weights_and_moments: dict[tuple[str, str], list[str]] = defaultdict(list)
    for full_name, problem in _problems(expected, saved):
        kind, _, name = full_name.partition(".")
        weights_and_moments[name if kind in KINDS else full_name, problem].append(full_name)
    sentences = (
        f"{full_name} {problem}"
        for (name, problem), full_names in weights_and_moments.items()
        for full_name in ([name] if len(full_names) == len(KINDS) else full_names)
    )
    return shortened(sentences, MOST_LISTED)


def shape_text(shape: Shape) -> str:
    """A shape for a message.

    >>> shape_text((301, 32)), shape_text((32,))
    ('301 x 32', '32')
    """
    return " x ".join(map(str, shape)) or "a single number"


def _problems(
    expected: Mapping[str, Shape], saved: Mapping[str, Shape]
) -> Iterator[tuple[str, str]]:
    """(name, problem) of each tensor that differs."""
    for name, shape in expected.items():
        if name not in saved:
            yield name, f"({shape_text(shape)}) is missing in the checkpoint"
        elif tuple(saved[name]) != tuple(shape):
            there, here = shape_text(saved[name]), shape_text(shape)
            yield name, f"is {there} in the checkpoint and {here} in the model"
    for name, shape in saved.items():
        if name not in expected:
            yield name, f"({shape_text(shape)}) is in the checkpoint and not in the model"
