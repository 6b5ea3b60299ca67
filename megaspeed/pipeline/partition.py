"""Assigns consecutive layers to pipeline stages, by exact optimisation. Plain arithmetic, no torch.

A pipeline is as fast as its slowest stage, so the cost of the most expensive stage is minimised.
Among the splits that reach this minimum,

1. the most even one is chosen: the smallest sum of squared stage costs;
2. among equally even ones, the one with the fewest layers in the earliest stages, because under
   1f1b the earliest stages keep the most micro-batches.

So 9 equal layers on 4 stages are split 2 2 2 3. The minimum is found by bisection, the most even
split by a dynamic program over (number of stages, number of layers).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, product

from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import (
    forward_flops_per_token,
    layer_count,
    logical_name,
    parameters_of,
)


def partition_layers(costs: Sequence[int], pipeline_stages: int) -> list[range]:
    """The range of layer indices of each pipeline stage, in order; none is empty.

    Args:
        costs: of each layer, [embedding, blocks..., head], in any unit; not negative. They are
            whole numbers, so rounding does not affect the split.
        pipeline_stages: how many there are, at most as many as layers.
    """
    assert 1 <= pipeline_stages <= len(costs), "a rule checked that each stage has a layer"
    # cumulative[i] is the cost of the first i layers.
    cumulative = list(accumulate(costs, initial=0))
    bottleneck = _smallest_bottleneck(costs, pipeline_stages)
    ends = _most_even_ends(cumulative, pipeline_stages, bottleneck)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _smallest_bottleneck(costs: Sequence[int], pipeline_stages: int) -> int:
    """The smallest possible cost of the most expensive stage, by bisection.

    A bottleneck is possible if stages that take as many layers as fit are few enough. Fewer stages
    than there are can be split further.
    """
    low, high = max(costs), sum(costs)
    while low < high:
        bottleneck = (low + high) // 2
        needed, filled = 1, 0
        for cost in costs:
            if filled + cost > bottleneck:
                needed, filled = needed + 1, 0
            filled += cost
        low, high = (low, bottleneck) if needed <= pipeline_stages else (bottleneck + 1, high)
    return low


def _most_even_ends(cumulative: Sequence[int], pipeline_stages: int, bottleneck: int) -> list[int]:
    """Split the layers so that no stage costs more than the bottleneck, and the sum of the squared
    costs is as small as possible. Return where each stage ends.
    """
    layers = len(cumulative) - 1
    # squares[k]: smallest sum of squared stage costs for layers k.. on the stages so far, counted
    # from the last stage; None if no split stays below the bottleneck.
    squares: list[int | None] = [None] * layers + [0]
    choices: list[list[int]] = []  # for each stage, last one first: start -> best end
    for following in range(pipeline_stages):
        later, squares = squares, [None] * (layers + 1)
        choice = [0] * layers
        for start in range(layers - following):
            for end in range(start + 1, layers + 1):
                cost = cumulative[end] - cumulative[start]
                if cost > bottleneck:
                    break  # costs are not negative, so no later end is cheaper
                rest, known = later[end], squares[start]
                if rest is not None and (known is None or cost**2 + rest < known):
                    squares[start], choice[start] = cost**2 + rest, end
        choices.append(choice)

    ends = [0]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return ends[1:]


def chunks_of_stages(run: Run) -> Sequence[tuple[range, ...]]:
    """For each pipeline stage of a run, the range of layer indices of each of its chunks.

    Layer 0 is the embedding, the blocks follow, and the last layer is the head. The cost of a layer
    is its forward FLOPs.
    """
    model, length = run.config.model, run.config.data.sequence_length
    return _chunks_of_stages(model, length, run.grid.pp, run.config.parallel.virtual_stages)


@lru_cache(maxsize=1024)  # a plan needs the same split thousands of times
def _chunks_of_stages(
    model: ModelConfig, length: int, stages: int, chunks: int
) -> tuple[tuple[range, ...], ...]:
    costs = [*map(int, forward_flops_per_token(model, length))]
    parts = partition_layers(costs, stages * chunks)
    if chunks > 1:
        parts = _evened(costs, parts, stages)
    return tuple(tuple(parts[stage::stages]) for stage in range(stages))


def layers_of_stages(run: Run) -> list[tuple[int, ...]]:
    """The layer indices of each pipeline stage of a run, of all its chunks."""
    return [tuple(chain.from_iterable(chunks)) for chunks in chunks_of_stages(run)]


def _evened(costs: Sequence[int], parts: list[range], stages: int) -> list[range]:
    """Move layers to a neighbouring chunk as long as this makes the most expensive stage cheaper.

    No chunk becomes more expensive than the most expensive one was before.
    """

    def cost(part: range) -> int:
        return sum(costs[part.start : part.stop])

    bottleneck = max(map(cost, parts))

    def worst(parts: list[range]) -> list[int]:
        """The costs of the stages, the largest first. If these are equal, the next ones decide."""
        return sorted((sum(map(cost, parts[s::stages])) for s in range(stages)), reverse=True)

    best = worst(parts)
    improved = True
    while improved:
        improved = False
        for index, step in product(range(len(parts) - 1), (1, -1)):
            end = parts[index].stop + step
            moved = [range(parts[index].start, end), range(end, parts[index + 1].stop)]
            tried = [*parts[:index], *moved, *parts[index + 2 :]]
            is_possible = min(map(len, moved)) > 0 and max(map(cost, moved)) <= bottleneck
            if is_possible and (evened := worst(tried)) < best:
                parts, best, improved = tried, evened, True
    return parts


def parameters_of_chunks(run: Run) -> list[list[float]]:
    """About how many elements a rank has of each chunk of each pipeline stage."""
    model, tp, ep = run.config.model, run.grid.tp, run.grid.ep or 1

    def held(chunk: range) -> float:
        own = parameters_of(model, chunk).values()
        return sum(p.elements / (ep if p.is_expert else tp) for p in own)

    return [[held(chunk) for chunk in chunks] for chunks in chunks_of_stages(run)]


def blocks_of_stages(run: Run) -> list[int]:
    head = layer_count(run.config.model) - 1
    return [len(layers) - (0 in layers) - (head in layers) for layers in layers_of_stages(run)]


def parameters_of_stages(run: Run) -> list[int]:
    """Logical parameters of each pipeline stage; a tied weight counts on the first stage."""
    model = run.config.model
    return [
        sum(
            parameter.elements
            for name, parameter in parameters_of(model, layers).items()
            if 0 in layers or logical_name(model, name) == name
        )
        for layers in layers_of_stages(run)
    ]
