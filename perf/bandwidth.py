"""The machine's own read and copy bandwidth, with all of Numba's threads, and that of a GPU's memory."""

import functools
import time

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

NAME = "read bandwidth"
SIZE = 256 << 20  # bytes: far more than any cache

#: Bytes that pieces in shuffled order are read at once, and parts that are asked for ahead. Sums of shorter parts take
#: time of their own: a Zen 5 reads pieces of 64 KB in order at 0.85 of the bandwidth straight through in parts of 512
#: bytes, at 0.91 in parts of 4 KB, and such pieces in shuffled order at 0.81 and 0.95. A Zen 4 that reads 31 GB/s in
#: order reads shuffled pieces of 4 KB at 18 GB/s without asking, at 22, 25 and 26 where it asks 2, 4 and 8 KB ahead.
PART = 4096
PARTS_AHEAD = 2


def versions():
    """What is measured, for `perf.worker`: here the threads that measure."""
    read()
    return f"{numba.get_num_threads()} threads, Numba's threading layer {numba.threading_layer()}"


@numba.njit(parallel=True, fastmath=True)
def _read(rows):
    sums = np.empty(rows.shape[0], np.float32)
    for i in numba.prange(rows.shape[0]):
        total = np.float32(0)
        for j in range(rows.shape[1]):
            total += rows[i, j]
        sums[i] = total
    return sums


@numba.njit(parallel=True)
def _copy(rows, to):
    for i in numba.prange(rows.shape[0]):
        for j in range(rows.shape[1]):
            to[i, j] = rows[i, j]


@intrinsic
def _ask(typing_context, array, at):
    """Prefetch the cache line of an array's element into the second cache."""

    def codegen(context, b, sig, args):
        data = cgutils.create_struct_proxy(sig.args[0])(context, b, args[0]).data
        pointer = b.bitcast(b.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        of = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(b.module, of, "llvm.prefetch.p0")
        b.call(function, [pointer, i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@numba.njit(fastmath=True)
def _sum(part):
    total = np.float32(0)
    for i in range(len(part)):
        total += part[i]
    return total


@numba.njit(parallel=True)
def _read_pieces(floats, starts, size, part, ahead, threads):
    sums = np.empty(threads, np.float32)
    for thread in numba.prange(threads):
        first, end = len(starts) * thread // threads, len(starts) * (thread + 1) // threads
        total = np.float32(0)
        asked, at = first + ahead * part // size, ahead * part % size
        for piece in range(first, end):
            for i in range(starts[piece], starts[piece] + size, part):
                if asked < end:
                    for line in range(0, part, 16):
                        _ask(floats, starts[asked] + at + line)
                    at += part
                    if at >= size:
                        asked, at = asked + 1, 0
                total += _sum(floats[i : i + part])
        sums[thread] = total
    return sums


@functools.cache
def _pieces(size):
    """Where pieces of 256 MB begin, shuffled, and how long they are: elements, in whole parts."""
    part = PART // 4
    size = -(-size // PART) * part
    starts = np.random.default_rng(0).permutation(SIZE // 4 // size) * size
    return starts, size, part


@functools.cache
def _buffers():
    rows = np.ones((SIZE >> 17, (1 << 17) // 4), np.float32)
    to = np.zeros((rows.shape[0] // 2, rows.shape[1]), np.float32)
    _read(rows)
    _copy(rows[: len(to)], to)
    return rows, to


def _best_rate(run, size):
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return size / np.median(times) / 1e9


def read():
    """GB/s of reading memory: median of a few passes over 256 MB."""
    rows, _ = _buffers()
    return _best_rate(lambda: _read(rows), rows.nbytes)


def shuffled_pieces(size):
    """How many times as long pieces of so many bytes take in shuffled order as in order: the median of a few turns.

    Both are asked for ahead of time.
    """
    rows, _ = _buffers()
    floats, (starts, size, part) = rows.reshape(-1), _pieces(size)
    threads, times = numba.get_num_threads(), []
    _read_pieces(floats, starts[:threads], size, part, PARTS_AHEAD, threads)
    for _ in range(3):
        for order in (np.sort(starts), starts):
            start = time.perf_counter()
            _read_pieces(floats, order, size, part, PARTS_AHEAD, threads)
            times.append(time.perf_counter() - start)
    return float(np.median(np.divide(times[1::2], times[::2])))


def copy():
    """GB/s of copying memory, bytes read plus bytes written: median of a few copies of 128 MB."""
    rows, to = _buffers()
    return _best_rate(lambda: _copy(rows[: len(to)], to), 2 * to.nbytes)


class Cuda:
    """The same of a GPU's memory; the driver copies, and a read is taken to be as fast as a copy, byte for byte."""

    @staticmethod
    @functools.cache
    def _buffers():
        from numba import cuda

        return cuda.device_array(SIZE // 8, np.float32), cuda.device_array(SIZE // 8, np.float32)

    @classmethod
    def copy(cls):
        """GB/s, bytes read plus bytes written: median of a few copies of 128 MB."""
        from numba import cuda

        rows, to = cls._buffers()

        def run():
            to.copy_to_device(rows)
            cuda.synchronize()

        run()
        return _best_rate(run, 2 * to.nbytes)

    read = copy
