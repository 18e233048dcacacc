"""Share a kernel's rows among threads where there are enough of them.

A kernel that moves rows is built twice from one source: alone, and with threads (``prange``). Small calls take the
first, so that they neither start threads nor wait for any; each build is made when it is first needed. The kernel's
last argument is the number of workers, and worker w takes rows ``[n * w // workers, n * (w + 1) // workers)``. No row
depends on another, so a result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from numkv.kernels.kernel import parallel_lock

__all__ = ["run", "workers_for"]

# Elements below which one thread does it all: about as long as it takes to wake the others.
SERIAL_ELEMENTS = 1 << 18


def workers_for(num_elements: int) -> int:
    """How many threads are to move so many elements."""
    # Numba starts its threads when it is asked how many there are.
    return 1 if num_elements < SERIAL_ELEMENTS else numba.get_num_threads()


def run(kernel: Callable[..., Any], workers: int, *args: Any) -> None:
    """Run a kernel, which for more than one worker is the build with threads."""
    if workers == 1:
        kernel(*args, 1)
    else:
        with parallel_lock:
            kernel(*args, workers)
