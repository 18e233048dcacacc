"""Arrays at addresses: they say where elements lie, and hold no memory.

Who makes one sees to it that there is memory while it is used, and that nobody keeps it for longer; see
`numkv.torch.alike`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

_FIRST = 4096  # nothing lies below
#: All of it: the base of arrays at addresses.
MEMORY: Any = (ctypes.c_char * (sys.maxsize - _FIRST)).from_address(_FIRST)
_array = np.ndarray


def array_at(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None
) -> np.ndarray[Any, Any]:
    """The array at an address; one of no elements, which may lie nowhere, is an ordinary array.

    Parameters
    ----------
    address : int
        Of the first element.
    shape, dtype, strides
        As NumPy has them; strides are None where elements lie one after another.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    return _array(shape, dtype, MEMORY, address - _FIRST, strides)
