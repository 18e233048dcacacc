"""How fast the machine reads memory, in the same run as what is measured beside it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numba
import numpy as np

_SIZE = 256 << 20  # far more than any cache
_PASSES = 3


@numba.njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _sum(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


class Probe:
    """Reads 256 MB on some threads. They are Python's own, so that no OpenMP runtime is disturbed.

    Parameters
    ----------
    num_threads : int
        Threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._parts = np.array_split(np.ones(_SIZE // 4, np.float32), num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self()

    def __call__(self) -> float:
        """Bytes a second: the median of a few passes."""
        times = []
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(self._pool.map(_sum, self._parts))
            times.append(time.perf_counter() - start)
        return _SIZE / median(times)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
