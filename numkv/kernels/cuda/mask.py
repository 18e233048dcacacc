"""Write attention's mask of each query, on CUDA: a thread for each query. All values read are range-checked."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.cuda.launches import INDICES, THREADS, Kernel, array, launch, number_at
from numkv.kernels.cuda.simd import ceil_div
from numkv.kernels.operations import Operations, implements
from numkv.rows.mask import fill_row


def make_fill_mask(COMPUTE):
    """Make the kernel for attention's computing float type."""
    F = np.float32 if COMPUTE == "float32" else np.float64

    def kernel(seq_lens, q_starts, ranges, bits, options, sinks, slopes, rows, heads):
        causal, window_left, first, capacity = options
        number = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        step = np.int64(cuda.gridDim.x) * THREADS
        for row in range(number, rows.shape[0], step):
            # The last sequence whose queries start at this one or before.
            low, high = np.int64(0), np.int64(seq_lens.shape[0])
            while low + 1 < high:
                middle = (low + high) >> 1
                if number_at(q_starts, middle) <= row:
                    low = middle
                else:
                    high = middle
            start, end = number_at(q_starts, low), number_at(q_starts, low + 1)
            tokens = min(end - start, np.int64(rows.shape[0]))
            if start >= 0 and start <= row and row < end:
                length = min(max(number_at(seq_lens, low), np.int64(0)), capacity)
                fill_row(
                    rows, row, row - start, tokens, length, causal, window_left, first, ranges, bits
                )  # fmt: skip
            else:
                for i in range(rows.shape[1]):
                    rows[row, i] = 0
        half = heads.shape[0] >> 1
        for h in range(number, half, step):
            heads[h] = sinks[h] if sinks.shape[0] > 0 else F(-np.inf)
            heads[half + h] = slopes[h]

    return kernel


@functools.cache
def _fill_mask(compute: str, of_ranges: str) -> Any:
    table, reals = array(types.int64, 2), array(getattr(types, compute), 1)
    ranges = array(getattr(types, of_ranges), 2)
    signature = (
        INDICES, INDICES, ranges, array(types.uint32, 2), types.UniTuple(types.int64, 4), reals, reals, table,
        reals,
    )  # fmt: skip
    return Kernel(make_fill_mask, (compute,), signature, 8)


@implements(Operations.fill_mask)
def fill_mask(
    seq_lens, q_starts, ranges, bits, causal, window_left, first, capacity, sinks, slopes, rows, heads
):  # fmt: skip
    items = max(rows.shape[0], heads.shape[0] // 2)
    if items and seq_lens.shape[0]:
        launch(
            _fill_mask(heads.dtype.name, ranges.dtype.name), ceil_div(items, THREADS), THREADS,
            seq_lens, q_starts, ranges, bits, (int(causal), int(window_left), int(first), int(capacity)), sinks, slopes,
            rows, heads,
        )  # fmt: skip
