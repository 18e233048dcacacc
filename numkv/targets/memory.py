"""The memory of strided arrays, and whether two of them may share a byte; for memory that NumPy cannot read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
    """The memory of an array.

    Attributes
    ----------
    address : int
        Address of the element with all indices 0.
    shape, strides : tuple of int
        Sizes of the axes, and bytes from one index to the next.
    itemsize : int
        Bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def steps(self) -> list[tuple[int, int]]:
        """Return the absolute stride and the number of steps of each axis with more than one index."""
        both = zip(self.strides, self.shape, strict=True)
        return [(abs(step), n - 1) for step, n in both if n > 1]

    def lowest(self) -> int:
        """Return the lowest address."""
        both = zip(self.strides, self.shape, strict=True)
        return self.address + sum(min(0, step * (n - 1)) for step, n in both)

    def width(self, period: int | None = None) -> int:
        """Return the bytes from the first to the last.

        With `period`, return the bytes covered in each period, if all longer steps are multiples of it; else 0.
        """
        found = self.itemsize
        for step, times in self.steps():
            if period is None or step < period:
                found += step * times
            elif step % period:
                return 0
        return found


def may_overlap(a: Memory, b: Memory) -> bool:
    """Return whether two arrays may share a byte.

    Adjacent views in a common period of one buffer, such as ``kv[:, 0]`` and ``kv[:, 1]``, do not share a byte. For
    other views whose ends overlap the answer is yes.
    """
    if 0 in a.shape or 0 in b.shape:
        return False
    distance = b.lowest() - a.lowest()
    if distance >= a.width() or -distance >= b.width():
        return False
    for period, _ in a.steps():
        if period:
            of_a, of_b = a.width(period), b.width(period)
            first = distance % period
            if of_a and of_b and of_a <= first <= period - of_b:
                return False
    return True


def column_of(
    pages: np.ndarray[Any, Any], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return a view of shape ``(rows, *shape)`` on rows of bytes; see `numkv.targets.base.Target.column`."""
    nbytes = math.prod(shape) * dtype.itemsize
    return pages[:, start : start + nbytes].view(dtype).reshape((len(pages), *shape))


def column_strides(step: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the strides of such a view on rows that are `step` bytes apart."""
    inner = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
    return (step, *inner)
