"""Where strided arrays lie, and whether two of them may share a byte; for memory that NumPy does not see."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
    """Where an array lies.

    Attributes
    ----------
    address : int
        Of the element whose indices are all 0.
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
        """Of axes with more than one index, the step, without its sign, and how often it is taken."""
        both = zip(self.strides, self.shape, strict=True)
        return [(abs(step), n - 1) for step, n in both if n > 1]

    def lowest(self) -> int:
        """The lowest address."""
        both = zip(self.strides, self.shape, strict=True)
        return self.address + sum(min(0, step * (n - 1)) for step, n in both)

    def width(self, period: int | None = None) -> int:
        """Bytes from the first to the last.

        With `period`, the bytes that it covers in each of the periods that its longer steps lie on; 0 if they do not.
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

    Views of one buffer that lie side by side in a common period, such as ``kv[:, 0]`` and ``kv[:, 1]``, are told apart.
    Other views whose ends overlap are not: the answer is yes.
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
    """A view of shape ``(rows, *shape)`` on rows of bytes; see `numkv.targets.base.Target.column`."""
    nbytes = math.prod(shape) * dtype.itemsize
    return pages[:, start : start + nbytes].view(dtype).reshape((len(pages), *shape))


def column_strides(step: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Strides of such a view on rows that are `step` bytes apart."""
    inner = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
    return (step, *inner)
