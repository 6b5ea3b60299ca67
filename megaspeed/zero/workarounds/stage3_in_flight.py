"""DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:437-442 and 499-524: each module counts the
inputs whose gradient is still to come, and releases its parameters when the count reaches zero in
the backward pass. A forward pass resets the counter, so with several micro-batches in flight the
counters belong to the last forward; the backwards of all the others leave every parameter of the
pipeline stage gathered until the epilogue.

The counters are saved after each micro-batch's forward and restored before its backward.
"""

from torch import nn

_COUNTER = "ds_grads_remaining"


class InFlightCounters:
    """The release counters of each micro-batch between its forward and its backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._saved: dict[int, list[tuple[nn.Module, int]]] = {}

    def save(self, micro_batch: int) -> None:
        """Remembers the counters as ``micro_batch``'s forward left them."""
        self._saved[micro_batch] = [
            (module, module.__dict__[_COUNTER])
            for module in self._module.modules()
            if _COUNTER in module.__dict__
        ]

    def restore(self, micro_batch: int) -> None:
        """Puts them back before ``micro_batch``'s backward."""
        for module, count in self._saved.pop(micro_batch, []):
            module.__dict__[_COUNTER] = count
