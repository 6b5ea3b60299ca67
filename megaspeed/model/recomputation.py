"""Selective recomputation: backward computes cheap operations again, so their results are not kept.

    x -> [cheap] -> h -> [costly] -> y

    Backward needs x, h, and other tensors that costly saves. All are kept, except h.

    cheap                                           costly
    norm                                            the attention or the MLP, a product first
    norms of heads, rotation                        the fused attention kernel
    attention with dropout, which is not fused      the product with ``output``
    gelu(up), silu(gate) * up                       the product with ``down``

A block keeps the outputs of its matrix products, of their collectives and of the fused attention
kernel. None of these is computed twice (Korthikanti et al. 2022, "Reducing Activation Recomputation
in Large Transformer Models", section 5).

h is an input of the costly operation, which saves it. So hooks for saved tensors store a number in
place of h, and of all that the cheap operations save. When backward needs the first of them, it
runs the cheap operations again. There is no random state to restore, because dropout masks are
functions of the sample (``dropout.py``).

``torch.utils.checkpoint`` has selective policies, too. They intercept each operation in Python,
which takes longer than the operation itself in a small block, and a collective that writes in place
would need a policy of its own. In a compiled block neither is needed: the compiler recomputes what
``checkpoint`` marks, h included, because it sees forward and backward as one graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Compose = Callable[[Callable[[Tensor], Any], Callable[..., Tensor], Tensor], Tensor]
"""``keeping`` or ``recomputing``."""


def keeping(cheap: Callable[[Tensor], Any], costly: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``costly(cheap(x))``. All that backward needs is kept."""
    results = cheap(x)
    return costly(*results) if isinstance(results, tuple) else costly(results)


def recomputing(cheap: Callable[[Tensor], Any], costly: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``costly(cheap(x))``, which keeps ``x`` instead of the results of ``cheap``.

    Args:
        cheap: returns a tensor or a tuple of tensors, the arguments of ``costly``. It must return
            the same bits if it is called again in backward. Its parameters must have their values.
        costly: may save tensors that it computes; they are kept.
        x: kept until backward.
    """
    if not torch.is_grad_enabled():
        return keeping(cheap, costly, x)
    if torch.compiler.is_compiling():
        # Not in eager mode: there, the costly operation would save the result of a checkpoint.
        again = partial(checkpoint, cheap, use_reentrant=False, preserve_rng_state=False)
        return keeping(again, costly, x)
    return _Recomputation(cheap, x).then(costly)


class _Recomputation:
    """What backward needs to compute the results of ``cheap`` again."""

    def __init__(self, cheap: Callable[[Tensor], Any], x: Tensor) -> None:
        self._cheap, self._x = cheap, x
        # For each result of ``cheap`` that is saved: its index, and the view that is saved.
        self._views: list[tuple[int, Any]] = []
        self._saved_within = 0
        self._tensors: dict[int, Tensor] = {}

    def then(self, costly: Callable[..., Tensor]) -> Tensor:
        with saved_tensors_hooks(self._place_within, self._tensor_at):
            results = self._results()
        # An address identifies a result while ``results`` holds it, thus until ``costly`` ends.
        index_of = {_storage(result): index for index, result in enumerate(results)}
        index_of.pop(_storage(self._x), None)  # a view of x takes no memory

        def pack(tensor: Tensor) -> Any:
            index = index_of.get(_storage(tensor))
            if index is None:
                return tensor.detach()  # not the tensor, which may refer to the node that saves it
            self._views.append((index, (tensor.shape, tensor.stride(), tensor.storage_offset())))
            return -len(self._views)

        with saved_tensors_hooks(pack, self._tensor_at):
            return costly(*results)

    def _results(self) -> tuple[Tensor, ...]:
        results = self._cheap(self._x)
        return results if isinstance(results, tuple) else (results,)

    def _place_within(self, tensor: Tensor) -> int:
        self._saved_within += 1
        return self._saved_within - 1

    def _tensor_at(self, place: Any) -> Tensor:
        if isinstance(place, Tensor):
            return place
        if place not in self._tensors:
            self._compute_again()
        return self._tensors.pop(place)  # each is used once, so memory is freed during backward

    def _compute_again(self) -> None:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            saved.append(tensor.detach())

        # No backward runs through this graph; the second hook is never called.
        with torch.enable_grad(), saved_tensors_hooks(pack, self._tensor_at):
            results = self._results()
        self._tensors = dict(enumerate(saved))
        for number, (index, view) in enumerate(self._views, start=1):
            self._tensors[-number] = results[index].detach().as_strided(*view)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
