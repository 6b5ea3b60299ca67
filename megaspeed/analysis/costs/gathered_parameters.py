"""ZeRO-3: the parameters that a rank has gathered at a time.

    partition of every rank --all-gather--> one buffer --put together--> the layer's parameters

Until its parameters are put together, what is being fetched is there twice. DeepSpeed fetches a
bucket ahead at every module, as long as no more than ``stage3_max_live_parameters`` are there;
parameters that stay whole are never fetched.
"""

from collections.abc import Sequence

from megaspeed.analysis.costs.local_parameters import LocalParameter, elements_of
from megaspeed.analysis.costs.model_states import stay_whole
from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run


class GatheredParameters:
    """Bytes that a rank with these parameters has gathered; nothing below ZeRO-3.

    Args:
        run: the resolved run.
        parameters: all of the rank's.
    """

    def __init__(self, run: Run, parameters: Sequence[LocalParameter]) -> None:
        zero = run.config.zero_optimization
        self._active = run.zero_stage == 3
        self._whole = {parameter.name for parameter in stay_whole(run, parameters)}
        self._element_bytes = BYTES_OF[run.precision]
        self._all = self._fetched(parameters)
        self._allowed = zero.stage3_max_live_parameters or 0
        self._fetches_ahead = bool(zero.stage3_prefetch_bucket_size)

    def live(self, layer: Sequence[LocalParameter]) -> int:
        """While a layer is at work: its own parameters, and the next ones where there is room."""
        allowed = self._allowed if self._fetches_ahead else 0
        return self._bytes(max(self._fetched(layer), allowed))

    def arriving(self) -> int:
        """The buffers of what is being fetched."""
        return self._bytes(self._allowed if self._fetches_ahead else 0)

    def one_matrix(self, layer: Sequence[LocalParameter]) -> int:
        """Where nothing is fetched ahead: a layer's largest parameter, arriving and there."""
        largest = max((p.elements for p in layer if p.name not in self._whole), default=0)
        return 2 * self._bytes(largest)

    def _fetched(self, parameters: Sequence[LocalParameter]) -> int:
        return elements_of(p for p in parameters if p.name not in self._whole)

    def _bytes(self, elements: int) -> int:
        return min(elements, self._all) * self._element_bytes if self._active else 0
