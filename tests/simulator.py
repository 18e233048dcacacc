"""Numba's CUDA simulator, several times as fast and with a reproducible order of threads.

Numba runs each simulated thread as a thread of the system, polls them in a busy loop until all have reached
``syncthreads``, and lists an array's attributes to look one up. Here the threads of a block are greenlets: one runs
until it comes to ``syncthreads`` or to its end, then the next, in an order that is shuffled before every round. So a
kernel that lacks a barrier reads values that other threads have not written yet, or have overwritten, and does so in
every run of the test. Shared and local memory starts as poison: NaN, or the largest integer.

Exceptions are those of Numba: the thread's own, with ``tid`` and ``ctaid`` before its message.
"""

import itertools
import random
import sys
from types import SimpleNamespace

import numpy as np
from greenlet import getcurrent, greenlet
from numba.core import types
from numba.cuda.simulator import kernel, kernelapi
from numba.cuda.simulator.cudadrv import devicearray
from numba.np import numpy_support

#: The random seed of every launch's order of threads; `seed` sets it.
_seed = 0


def seed(number: int) -> None:
    """Choose the order in which threads take turns in the launches from now on, each of them alike."""
    global _seed
    _seed = number


class Thread(greenlet):
    """A simulated thread, with the attributes of Numba's ``BlockThread`` that kernels use."""

    def __init__(self, block, args, block_index, thread_index) -> None:
        super().__init__()
        self._manager = block
        self._args = args
        self.blockIdx = kernelapi.Dim3(*block_index)
        self.threadIdx = kernelapi.Dim3(*thread_index)
        size = kernelapi.Dim3(*block._block_dim)
        x, y, z = thread_index
        self.thread_id = x + size.x * (y + size.y * z)

    def run(self) -> None:
        """Run the kernel, until the end of it."""
        if self._manager._debug:
            np.seterr(divide="raise")
        self._manager._f(*self._args)

    def syncthreads(self) -> None:
        """Let the other threads come this far."""
        self.parent.switch()

    # Numba's other barriers call `syncthreads`.
    syncthreads_count = kernel.BlockThread.syncthreads_count
    syncthreads_and = kernel.BlockThread.syncthreads_and
    syncthreads_or = kernel.BlockThread.syncthreads_or


def _run_block(block, block_index, *args) -> None:
    """Run the threads of a block: all of them to the next barrier, again and again, until they have ended."""
    shared = kernel._get_kernel_context().shared
    shared._allocations.clear()  # Numba's own blocks would see the previous block's arrays
    shared._dynshared.fill(-1)  # NaN as floats
    order = random.Random(f"{_seed} {block_index}")
    points = itertools.product(*map(range, block._block_dim))
    threads = [Thread(block, args, block_index, point) for point in points]
    try:
        while threads:
            order.shuffle(threads)
            for thread in threads:
                try:
                    thread.switch()
                except Exception as error:
                    raise _located(error, thread).with_traceback(error.__traceback__) from None
            threads = [thread for thread in threads if not thread.dead]
    finally:
        for thread in threads:  # ends those that wait after an error in another
            thread.throw()


def _located(error: Exception, thread: Thread) -> Exception:
    """An error of the same type that says which thread it is from, in Numba's words."""
    where = f"tid={list(thread.threadIdx)} ctaid={list(thread.blockIdx)}"
    return type(error)(f"{where}: {error}" if str(error) else where)


def _poisoned(shape, dtype) -> np.ndarray:
    """Return a new array of poison."""
    if isinstance(dtype, types.Type):
        dtype = numpy_support.as_dtype(dtype)
    dtype = np.dtype(dtype)
    poison = {"f": np.nan, "c": np.nan, "b": True}.get(dtype.kind)
    return np.full(shape, np.iinfo(dtype).max if poison is None else poison, dtype)


def _local_array(self, shape, dtype) -> np.ndarray:
    return _poisoned(shape, dtype)


def _shared_array(self, shape, dtype, dynamic=kernelapi.FakeCUDAShared.array) -> np.ndarray:
    """Return the block's array for the calling line; the first thread to reach the line makes it."""
    if shape == 0:
        return dynamic(self, shape, dtype)
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno, caller.f_lasti
    if place not in self._allocations:
        self._allocations[place] = _poisoned(shape, dtype)
    return self._allocations[place]


Array = devicearray.FakeWithinKernelCUDAArray
_ATTRIBUTES = frozenset(dir(np.ndarray))


def _get_attribute(self, name, field_of_record=Array.__getattr__):
    array = self._item._ary
    if name in _ATTRIBUTES and isinstance(array, np.ndarray):
        return getattr(array, name)
    return field_of_record(self, name)


def _get_item(self, index):
    item = self._item._ary[index]
    if isinstance(item, (np.ndarray, np.void)):
        return Array(devicearray.FakeCUDAArray(item, self._item.stream))
    return item


def _set_item(self, index, value) -> None:
    self._item._ary[index] = value


def install() -> None:
    """Replace Numba's simulator in this process."""
    kernel.BlockManager.run = _run_block
    # The simulated `cuda` module asks this name for the thread that is running.
    kernelapi.threading = SimpleNamespace(current_thread=getcurrent)
    kernelapi.FakeCUDALocal.array = _local_array
    kernelapi.FakeCUDAShared.array = _shared_array
    Array.__getattr__ = _get_attribute
    Array.__getitem__ = _get_item
    Array.__setitem__ = _set_item
