"""The rows of a mixture, read from its files as they are asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.stream.mixture import Mixture
from megaspeed.data.stream.sampler import Place


class Rows:
    """Maps a file into memory when the first row of it is read: there may be thousands."""

    def __init__(self, mixture: Mixture, sequence_length: int) -> None:
        self._mixture = mixture
        self._sequence_length = sequence_length
        self._mapped: dict[tuple[int, int], NDArray[np.integer]] = {}

    def at(self, place: Place) -> NDArray[np.integer]:
        """S + 1 ids, in the file's own dtype."""
        ids = self._file(place.component, place.file)
        return ids[place.first_token : place.first_token + self._sequence_length + 1]

    def _file(self, component: int, file: int) -> NDArray[np.integer]:
        key = component, file
        if key not in self._mapped:
            self._mapped[key] = self._mixture.components[component].files[file].map()
        return self._mapped[key]
