"""The machine's own read and copy bandwidth, with all of Numba's threads, and that of a GPU's memory."""

import functools
import time

import numba
import numpy as np

NAME = "read bandwidth"
SIZE = 256 << 20  # bytes: far more than any cache


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


@functools.cache
def _buffers():
    rows = np.ones((SIZE >> 17, (1 << 17) // 4), np.float32)
    to = np.zeros((rows.shape[0] // 2, rows.shape[1]), np.float32)
    _read(rows)
    _copy(rows[: len(to)], to)
    return rows, to


def _best_rate(run, size, rounds=7):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return size / np.median(times) / 1e9


def read():
    """GB/s of reading memory: median of a few passes over 256 MB."""
    rows, _ = _buffers()
    return _best_rate(lambda: _read(rows), rows.nbytes)


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
