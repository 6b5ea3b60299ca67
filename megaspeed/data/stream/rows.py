"""The rows of a mixture, read from its files as they are asked for."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.stream.mixture import Mixture
from megaspeed.data.stream.sampler import Place

_MAPPED_AT_ONCE = 256


class Rows:
    """Maps a file into memory when a row of it is read.

    There may be thousands of files, and each that is mapped takes one of the file descriptors that
    a process may have, often 1,024. So the one that was not read for longest is let go.
    """

    def __init__(self, mixture: Mixture, sequence_length: int) -> None:
        self._mixture = mixture
        self._sequence_length = sequence_length
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(self._map)

    def at(self, place: Place) -> NDArray[np.integer]:
        """S + 1 ids, in the file's own dtype."""
        ids = self._mapped(place.component, place.file)
        return ids[place.first_token : place.first_token + self._sequence_length + 1]

    def _map(self, component: int, file: int) -> NDArray[np.integer]:
        return self._mixture.components[component].files[file].map()
