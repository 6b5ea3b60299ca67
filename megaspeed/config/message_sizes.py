"""What ZeRO sends, gathers and holds together, as rules over sizes.

    reduce       parameters --> buckets            reduce_bucket_size
    gather       blocks     --> groups of blocks   stage3_prefetch_bucket_size
    hold         layers of a pass --> the layers in memory at each of them
                                                   stage3_max_live_parameters

The engine follows these rules (``zero/build.py``, ``zero/layer_gathers.py``), and the predictions
count what follows from them (``planning``). They need no torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.resolve import Run

GATHER_ALIGNMENT = 128
"""Bytes. ZeRO-3 gathers each parameter to an address that is a multiple of this number. Vectorized
loads read 16 bytes, and a cache line of a GPU has 128."""


def aligned_elements(elements: int, element_bytes: int) -> int:
    """Return the elements from the start of a gathered parameter to the start of the next one."""
    return -(-elements * element_bytes // GATHER_ALIGNMENT) * GATHER_ALIGNMENT // element_bytes


def buckets(run: Run, sizes: Sequence[int], head: int | None = None) -> list[range]:
    """Return the parameters of an optimizer group that are reduced together, in backward order.

    Each bucket has at most ``reduce_bucket_size`` elements, or one parameter. At ZeRO-3 the part of
    a rank has at most ``sub_group_size`` elements. Otherwise DeepSpeed would split the bucket. If
    the complete gradient is not kept, the head's weight has a bucket of its own: until it is
    reduced, its gradient has another dtype than the others.

    Args:
        run: the resolved run.
        sizes: elements of each parameter.
        head: index of the head's weight; None if it is not one of them.

    Returns:
        Ranges of indices into ``sizes``.
    """
    most = _bucket_elements(run)
    if run.zero_stage == 3:
        most = min(most, run.grid.shard * run.config.zero_optimization.sub_group_size)
    return _neighbours(sizes, most, alone=None if run.keeps_complete_gradients else head)


def columns_sent_together(run: Run, rows: int, block: int) -> int:
    """Return the number of columns of a gradient matrix that are compressed to int8 at a time.

    Args:
        run: the resolved run.
        rows: number of rows of the matrix.
        block: number of elements of a row that share a scale. The result is a multiple of it.
    """
    return max(1, _bucket_elements(run) // rows // block) * block


def most_gathered_together(zero: ZeroConfig) -> int:
    """Return the elements of blocks that ZeRO-3 gathers together, at most.

    Twice as many may live, so there is room for the next ones.
    """
    most, bound = zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters
    assert most is not None, "a resolved run states it"
    return most if bound is None else min(most, bound // 2)


def gathered_together(zero: ZeroConfig, sizes: Sequence[int]) -> list[range]:
    """Return the blocks that ZeRO-3 gathers together, as ranges of indices into ``sizes``."""
    return _neighbours(sizes, most_gathered_together(zero))[::-1]


class Gathered(Protocol):
    """Parameters that are gathered, held and freed together."""

    @property
    def elements(self) -> int:
        """Their elements, without padding."""


_Layer = TypeVar("_Layer", bound=Gathered)


def held_layers(zero: ZeroConfig, coming: Sequence[_Layer]) -> list[_Layer]:
    """Return what ZeRO-3 holds while the first of the coming layers computes; empty if none comes.

    This is that layer, and the next other one if there is room for both. Those of them that are in
    memory are kept, and the others are gathered. All other layers are freed.
    """
    if not coming:
        return []
    first, bound = coming[0], zero.stage3_max_live_parameters
    later = next((layer for layer in coming if layer is not first and layer.elements), None)
    if later is None or zero.stage3_prefetch_bucket_size == 0:
        return [first]
    has_room = bound is None or first.elements + later.elements <= bound
    return [first, later] if has_room else [first]


def held_in_pass(
    zero: ZeroConfig, order: Sequence[_Layer], following: Sequence[_Layer]
) -> list[list[_Layer]]:
    """Return what ZeRO-3 holds at each layer of a pass, and after it.

    Args:
        zero: the section of a resolved run.
        order: the layers of the pass, in its order.
        following: the layers of the next pass; empty if nothing is gathered for it.
    """
    held = [held_layers(zero, [*order[index:], *following]) for index in range(len(order))]
    kept = held_layers(zero, following)
    return [*held, [layer for layer in held[-1] if layer in kept] if held else []]


def _bucket_elements(run: Run) -> int:
    elements = run.config.zero_optimization.reduce_bucket_size
    assert elements is not None, "a resolved run states it"
    return elements


def _neighbours(sizes: Sequence[int], most: int, alone: int | None = None) -> list[range]:
    """Return ranges of neighbours with at most ``most`` elements, or of one, from last to first.

    The neighbour with index ``alone`` has a range of its own.
    """
    before, end, ranges = [*accumulate(sizes, initial=0)], len(sizes), []
    while end:
        last = bisect_left(before, before[end]) - 1  # neighbour that has elements
        start = max(0, min(last, bisect_left(before, before[end] - most)))
        if alone is not None and start <= alone < end:
            start = alone if end == alone + 1 else alone + 1
        ranges.append(range(start, end))
        end = start
    return ranges
