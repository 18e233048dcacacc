"""Small integer arrays at fixed addresses, which the host fills again: for CUDA graphs to read."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

#: Shape and dtype of each array.
Layout = list[tuple[tuple[int, ...], Any]]


class Fixed(Protocol):
    """Arrays at fixed addresses; made by `numkv.targets.base.Target.fixed`."""

    #: The arrays, on the target.
    arrays: list[Any]

    def update(self, host: list[np.ndarray[Any, Any]]) -> None:
        """Fill all arrays in the order of the current stream, without waiting; `host` may change afterwards."""

    def arrived(self) -> int:
        """Return how many updates the target has completed, with all work launched before them."""


class HostFixed:
    """`Fixed` in host memory."""

    def __init__(self, layout: Layout) -> None:
        self.arrays = [np.zeros(shape, dtype) for shape, dtype in layout]
        self._updates = 0

    def update(self, host: list[np.ndarray[Any, Any]]) -> None:
        """Fill all arrays."""
        for x, new in zip(self.arrays, host, strict=True):
            x[...] = new
        self._updates += 1

    def arrived(self) -> int:
        """Return the number of all updates."""
        return self._updates
