"""ZeRO-3: which parameters are gathered in each pass, and the memory and traffic of that.

    forward     embedding, blocks, head     every layer once
    backward    norm of the head, blocks    the forward of the loss computes the head's gradient

Small parameters stay gathered. ``zero/layer_gathers.py`` gathers in the same order. A pipeline
stage with several chunks of layers gathers a complete chunk at a time (``pipeline/visits.py``).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.message_sizes import aligned_elements, gathered_together, held_in_pass
from megaspeed.config.resolve import Run
from megaspeed.pipeline.schedules import Pass, Pipeline, passes_of, pipeline_of
from megaspeed.pipeline.visits import holds_of
from megaspeed.planning.costs.rank_parameters import (
    BYTES_OF,
    LocalParameter,
    elements_of,
    head_weight,
    sharded_elements,
)


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Parameters that are gathered together: those of a layer, or of several blocks."""

    parameters: Sequence[LocalParameter]

    @cached_property
    def elements(self) -> int:
        """Without padding."""
        return elements_of(self.parameters)


def stay_gathered(run: Run, parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
    """Return small parameters, up to the threshold, that every rank also keeps gathered.

    DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:328.
    """
    zero = run.config.zero_optimization
    threshold = zero.stage3_param_persistence_threshold
    assert threshold is not None, "a resolved run states it"
    allowed = zero.stage3_model_persistence_threshold
    kept: list[LocalParameter] = []
    total = 0
    for parameter in parameters:
        fits = allowed is None or total + parameter.elements <= allowed
        if parameter.elements <= threshold and fits:
            kept.append(parameter)
            total += parameter.elements
    return kept


def gathered_in_pass(
    run: Run,
    parameters: Sequence[LocalParameter],
    direction: Pass,
    following: Pass | None = None,
    *,
    on_host: bool = False,
) -> list[int]:
    """Return the bytes of gathered parameters on a rank while a pass computes each layer.

    The layers are in the order of the forward pass, for both directions. ``following`` is the next
    pass, for which the last layers of this one gather ahead; None if this is the last pass of a
    step.

    Each parameter is received in its final place, which is aligned. With one shard, partitions
    are complete parameters, so nothing is gathered. Only offloaded partitions are copied to the
    device, unless the rank computes on the CPU (``on_host``). Below ZeRO-3, all are 0.
    """
    zero, layers = run.config.zero_optimization, len({parameter.layer for parameter in parameters})
    if not _gathers_anything(run, on_host=on_host):
        return [0] * layers
    orders = _gathered_by_pass(run, parameters)

    @lru_cache
    def size(gathered: _Gathered) -> int:
        return _aligned_bytes(run, gathered.parameters)

    # The backward of the embedding gathers nothing, and holds what is held after the pass.
    held = held_in_pass(zero, orders[direction], orders[following] if following else [])[:layers]
    sizes = [sum(map(size, layer)) for layer in held]
    return sizes if direction == "forward" else sizes[::-1]


def gathered_chunk_bytes(
    run: Run,
    parameters: Sequence[LocalParameter],
    chunk: int,
    *,
    forward: bool,
    on_host: bool = False,
) -> int:
    """Return the bytes of a gathered chunk of layers; more if it is gathered for a ``forward``.

    ``parameters`` are those of all chunks of the rank; see ``gathered_in_pass``.
    """
    if not _gathers_anything(run, on_host=on_host):
        return 0
    return _aligned_bytes(run, _gathered_of_chunk(run, parameters, chunk, forward=forward))


def _gathers_anything(run: Run, *, on_host: bool) -> bool:
    is_local = on_host or not run.config.zero_optimization.offloads_parameters
    return run.zero_stage == 3 and not (run.grid.shard == 1 and is_local)


def _aligned_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    element = BYTES_OF[run.precision]
    regions = (sharded_elements(run, [parameter]) for parameter in parameters)
    return element * sum(aligned_elements(region, element) for region in regions)


def gathered_elements_of_a_step(
    run: Run, parameters: Sequence[LocalParameter], pipeline_stage: int
) -> int:
    """Return the padded elements that a rank with these parameters gathers in an optimizer step.

    M micro-batches gather M (2 P - E - H) + K elements (Rajbhandari et al. 2020, section 7.2.2, has
    2 P), minus the layers that are still gathered when the next pass begins. K is the size
    of the parameters that stay gathered, P the size of all others, E the part of P in the
    embedding, and H the part of P that is the weight of the head. A tied weight counts twice in P:
    in the embedding and in the head.

    With several chunks, each chunk is gathered once for each time that it is held: all of it, or
    without E and H if no forward is among its computations.
    """
    pipeline, persistent = pipeline_of(run), sharded_elements(run, stay_gathered(run, parameters))
    if pipeline.gathers != "layers":
        held = Counter((hold.chunk, hold.forward) for hold in holds_of(pipeline, pipeline_stage))
        return persistent + sum(
            times
            * sharded_elements(run, _gathered_of_chunk(run, parameters, chunk, forward=forward))
            for (chunk, forward), times in held.items()
        )
    orders, zero = _gathered_by_pass(run, parameters), run.config.zero_optimization
    first, turns = _turns(pipeline, pipeline_stage)

    def gathered(*passes: Pass) -> int:
        layers = _gathers(zero, [orders[name] for name in passes])
        return sum(sharded_elements(run, layer.parameters) for layer in layers)

    # What is held after a pass depends only on this pass and the next one.
    alone = {name: gathered(name) for name in orders}
    total = alone[first] + sum(
        count * (gathered(*turn) - alone[turn[0]]) for turn, count in turns.items()
    )
    return total + persistent


def _gathered_of_chunk(
    run: Run, parameters: Sequence[LocalParameter], chunk: int, *, forward: bool
) -> list[LocalParameter]:
    """Return what a chunk gathers: for a backward, neither the embedding nor the head's weight."""
    kept = {parameter.name for parameter in stay_gathered(run, parameters)}
    weight = head_weight(parameters)
    return [
        p
        for p in parameters
        if p.chunk == chunk
        and p.name not in kept
        and (forward or not (p.layer == "embedding" or p == weight))
    ]


def _gathers(zero: ZeroConfig, passes: Sequence[Sequence[_Gathered]]) -> Iterator[_Gathered]:
    """Yield what is gathered in these passes, in order."""
    held: list[_Gathered] = []
    for order, following in zip(passes, [*passes[1:], []], strict=True):
        for hold in held_in_pass(zero, order, following):
            yield from (layer for layer in hold if layer not in held)
            held = hold


@lru_cache(maxsize=1024)
def _turns(pipeline: Pipeline, pipeline_stage: int) -> tuple[Pass, Mapping[tuple[Pass, Pass], int]]:
    """Return the first pass of a step, and the number of each pair of consecutive passes."""
    passes = [name for name, _ in passes_of(pipeline, pipeline_stage)]
    return passes[0], Counter(pairwise(passes))


def _gathered_by_pass(
    run: Run, parameters: Sequence[LocalParameter]
) -> dict[Pass, list[_Gathered]]:
    """Return what each layer of a pass gathers, in its order; a tied head has the embedding."""
    kept = {parameter.name for parameter in stay_gathered(run, parameters)}
    layers: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    weight = head_weight(parameters)
    if weight is not None and weight not in layers["head"]:
        layers["head"].append(weight)
    layers = {name: [p for p in own if p.name not in kept] for name, own in layers.items()}
    ends = {name: layers.pop(name) for name in ("embedding", "head") if name in layers}
    own = list(layers.values())
    blocks: list[_Gathered] = []
    for together in gathered_together(run.config.zero_optimization, list(map(elements_of, own))):
        blocks += [_Gathered([*chain(*own[together.start : together.stop])])] * len(together)
    embedding = [_Gathered(ends["embedding"])] if "embedding" in ends else []
    head = [_Gathered(ends["head"])] if "head" in ends else []
    norm = [_Gathered([p for p in end.parameters if p != weight]) for end in head]
    return {"forward": [*embedding, *blocks, *head], "backward": [*blocks, *norm][::-1]}
