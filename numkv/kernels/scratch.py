"""Scratch memory that calls borrow: kept from call to call, and never shared by two calls.

A call borrows a workspace and returns it when it is done. Meanwhile other calls use another one, or make one: calls of
other Python threads, or of a finaliser or signal handler in the same thread. There are as many workspaces as there have
been simultaneous calls.

`aligned` memory begins where a cache line does: a vector that spans two lines is read at half the speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


class Workspace:
    """Arrays of one call, by dtype, which grow and stay.

    Parameters
    ----------
    make : function
        ``make(size, dtype)`` gives a flat array of undefined elements.

    Attributes
    ----------
    nbytes : int
        Bytes of its arrays.
    """

    def __init__(self, make: Callable[[int, str], Any]) -> None:
        self._make = make
        self._arrays: dict[str, Any] = {}
        self.nbytes = 0

    def take(self, dtype: str, size: int) -> Any:
        """A flat array of at least `size` elements, with whatever they hold: the same memory until it has to grow."""
        have = self._arrays.get(dtype)
        if have is None or have.size < size:
            have = self._arrays[dtype] = self._make(size, dtype)
            self.nbytes = sum(x.size * np.dtype(name).itemsize for name, x in self._arrays.items())
        return have


class Workspaces:
    """Workspaces that no call uses at the moment.

    Parameters
    ----------
    make : function
        ``make(size, dtype)`` gives a flat array of undefined elements.
    most_kept : int
        Bytes above which a workspace is not kept: a call that needs so much takes far longer than its allocation.
    """

    def __init__(self, make: Callable[[int, str], Any], most_kept: int = 1 << 25) -> None:
        self._make = make
        self._most_kept = most_kept
        self._free: list[Workspace] = []

    def borrow(self) -> Workspace:
        """A workspace for one call, which ends with `give_back`."""
        try:
            return self._free.pop()  # one step, which threads and signals do not divide
        except IndexError:
            return Workspace(self._make)

    def give_back(self, workspace: Workspace) -> None:
        """Let later calls have a workspace, unless it has grown too large."""
        if workspace.nbytes <= self._most_kept:
            self._free.append(workspace)


# Linux on x86-64 maps memory in pages of 4 KB, or of 2 MB if it is asked to and all 2 MB are of one allocation. NumPy
# asks in allocations of 4 MB and more. An array of 2 to 4 MB, as a pool has for a layer of a small model, would often
# have no such page if it did not begin with one.
_LINE, _HUGE_PAGE = 64, 2 << 20


def aligned(make: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """A new array at the beginning of a cache line, or of a huge page if it has as many bytes.

    Parameters
    ----------
    make : function
        ``numpy.empty`` or ``numpy.zeros``.
    shape : tuple of int
        Its shape.
    dtype : numpy.dtype
        Its dtype.

    Returns
    -------
    array
        A view of a longer array, of which the system never maps the rest.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    line = _LINE if size < _HUGE_PAGE else _HUGE_PAGE
    memory = make(size + line - 1, np.uint8)
    first = -memory.ctypes.data % line
    return memory[first : first + size].view(dtype).reshape(shape)
