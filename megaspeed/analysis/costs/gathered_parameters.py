"""ZeRO-3: what a rank gathers, layer by layer.

    forward     gathers every layer once
    backward    gathers every layer once, but not the embedding
    step        gathers once what stays whole from step to step

So a step of M micro-batches gathers M (2 P - E) + K elements: P of all layers and E of the
embedding without what stays whole, which is K. A tied head counts in the embedding and in the head.
(Rajbhandari et al. 2020, section 7.2.2, has 2 P.) A parameter travels padded to a multiple of dp.

    partition of every rank --all-gather--> arriving --copy--> the layer's parameters

While they are copied, the parameters of a layer are in memory twice. If a layer has one parameter,
it arrives in its final place. With one data rank nothing is gathered, because its partitions are
the parameters; but offloaded partitions are copied to the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.analysis.costs.local_parameters import (
    LocalParameter,
    elements_of,
    partition_elements,
)
from megaspeed.analysis.costs.model_states import stay_whole
from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of gathered parameters on a rank while a pass computes one layer.

    Attributes:
        at_work: the layer's parameters.
        arriving: the buffer in which they arrived, until they are copied out of it.
        ahead: the next layer's parameters, which are gathered while this layer computes.
    """

    at_work: int = 0
    arriving: int = 0
    ahead: int = 0


def gathered_in_pass(
    run: Run, parameters: Sequence[LocalParameter], direction: Pass, *, on_host: bool = False
) -> list[GatheredBytes]:
    """Gathered bytes at each layer, in the order of the forward pass (in both directions).

    Args:
        run: the resolved run.
        parameters: those of the rank.
        direction: of the pass.
        on_host: whether the rank computes on the CPU, where offloaded partitions are already.
    """
    layers = [
        [] if direction == "backward" and name == "embedding" else layer
        for name, layer in _travelling_by_layer(run, parameters).items()
    ]
    is_there = run.grid.dp == 1 and (
        on_host or not run.config.zero_optimization.offloads_parameters
    )
    if run.zero_stage < 3 or is_there:
        return [GatheredBytes() for _ in layers]
    following = [*layers[1:], []] if direction == "forward" else [[], *layers[:-1]]
    apart = run.grid.dp > 1
    return [
        GatheredBytes(
            at_work=_bytes(run, layer),
            arriving=_bytes(run, layer) if apart and len(layer) > 1 else 0,
            ahead=_bytes(run, later) if _fetches_ahead(run, layer, later) else 0,
        )
        for layer, later in zip(layers, following, strict=True)
    ]


def _parameters_by_layer(
    parameters: Sequence[LocalParameter],
) -> dict[str, list[LocalParameter]]:
    """Name of each layer -> all parameters that it computes with, a tied head's weight included."""
    layers: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    named = {parameter.name: parameter for parameter in parameters}
    if "head" in layers and HEAD_WEIGHT not in named:
        layers["head"].append(named[EMBEDDING_WEIGHT])
    return layers


def gathered_elements_of_a_step(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements that a rank with these parameters gathers in an optimizer step, padded."""
    layers = _travelling_by_layer(run, parameters)
    padded = {name: _padded(run, layer) for name, layer in layers.items()}
    each_micro_batch = 2 * sum(padded.values()) - padded.get("embedding", 0)
    kept = _padded(run, stay_whole(run, parameters))
    return run.batch.gradient_accumulation_steps * each_micro_batch + kept


def _travelling_by_layer(
    run: Run, parameters: Sequence[LocalParameter]
) -> dict[str, list[LocalParameter]]:
    whole = {parameter.name for parameter in stay_whole(run, parameters)}
    return {
        name: [parameter for parameter in layer if parameter.name not in whole]
        for name, layer in _parameters_by_layer(parameters).items()
    }


def _fetches_ahead(
    run: Run, layer: Sequence[LocalParameter], later: Sequence[LocalParameter]
) -> bool:
    zero = run.config.zero_optimization
    return zero.fetches_ahead(elements_of(layer), elements_of(later))


def _padded(run: Run, parameters: Sequence[LocalParameter]) -> int:
    dp = run.grid.dp
    return sum(dp * partition_elements(parameter, dp) for parameter in parameters)


def _bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    return _padded(run, parameters) * BYTES_OF[run.precision]
