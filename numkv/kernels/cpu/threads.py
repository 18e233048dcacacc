"""Run a kernel on several threads.

A kernel that can share its work has `ON_THREADS` as its last arguments, ``launch, worker, workers``. Where `launch` is
not 0 it calls `on_threads`, which runs it once for each worker, and does no more; else it does the
part of one worker: rows ``[n * worker // workers, n * (worker + 1) // workers)``, or whatever `next_item` hands out. So
one build serves small calls, which neither start threads nor wait for any, and large ones. No row depends on another,
so a result does not depend on the number of workers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numba
from numba import types

from numkv.kernels.cpu.simd import thread_launcher

__all__ = ["ON_THREADS", "launcher", "parallel_lock", "run", "workers_for"]

#: Numba types of a kernel's last arguments: ``launch, worker, workers``.
ON_THREADS = (types.int64, types.int64, types.int64)

#: Held while a kernel runs on several threads: Numba's ``workqueue`` threading layer, the only one that is always
#: there, aborts the process when two Python threads launch parallel kernels at once.
parallel_lock = threading.RLock()

# Elements below which one thread does it all. Appending float32 rows to fp16, int8 and fp32 caches, least times with
# one thread and with two of a 2-core machine, in microseconds: of 1 << 14 elements 8 and 6, 8 and 6, 5 and 5; of
# 1 << 16 elements 28 and 16, 31 and 18, 14 and 10; of 1 << 18 elements 97 and 52, 120 and 63, 51 and 32. Threads that
# have slept wake more slowly than those, which had just worked: so not before two of them save 4 us at the least.
SERIAL_ELEMENTS = 1 << 16


_launcher = functools.cache(thread_launcher)


def launcher() -> int:
    """What a kernel takes for `launch`, to run on threads, under `parallel_lock`."""
    return _launcher()


def workers_for(num_elements: int) -> int:
    """How many threads are to move so many elements."""
    # Numba starts its threads when it is asked how many there are.
    return 1 if num_elements < SERIAL_ELEMENTS else numba.get_num_threads()


def run(kernel: Callable[..., Any], workers: int, *args: Any) -> None:
    """Run a kernel with so many workers, at most as many as Numba has threads."""
    if workers == 1:
        kernel(*args, 0, 0, 1)
    else:
        with parallel_lock:
            kernel(*args, launcher(), 0, workers)
