"""Small arrays of integers at fixed places, which are filled anew from the host: what a CUDA graph reads."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

#: Shape and dtype of each array.
Layout = list[tuple[tuple[int, ...], Any]]


class Fixed(Protocol):
    """Arrays that stay where they are; made by `numkv.targets.base.Target.fixed`."""

    #: The arrays, on the target.
    arrays: list[Any]

    def update(self, host: list[np.ndarray[Any, Any]]) -> None:
        """Fill all arrays, in the order of the current stream; the host does not wait, and may change its own."""

    def arrived(self) -> int:
        """Return how many updates the target has been through, with all that was launched before the last of these."""


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
        """All updates."""
        return self._updates
