"""Rotate stored K rows to other positions, in place, on CUDA; see `numkv.kernels.cpu.shift`.

A warp takes a row, its lanes adjacent pairs. Pairs do not meet, except in the scale of a quantised row: its floats wait
in shared memory until that is known. Slots outside the pool are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv import kinds
from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.launches import INDICES, array, jit, launch, number_at
from numkv.kernels.cuda.rows import as_it_is, row_store
from numkv.kernels.cuda.simd import LANES, THREADS, ceil_div, natural
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.codec import element_codec
from numkv.rows.rope import pair_of, rotate_pair

__all__ = ["shift_rows"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_shift_rows(KIND):
    """The kernel for a pool of kind `KIND`."""
    OF_POOL = kinds.kind(KIND)
    QUANTISED, GROUP, PER_WORD = OF_POOL.has_scales, OF_POOL.group_size, OF_POOL.elements_per_word
    COMPUTE = OF_POOL.compute.name
    F, REAL = OF_POOL.compute.type, getattr(types, COMPUTE)
    value, put_element = element_codec(KIND, COMPUTE)
    _, put = row_store(KIND, COMPUTE, as_it_is)
    PER_HEAD, PER_ROW = OF_POOL.scales_per == "head", OF_POOL.scales_per == "row"
    SHAPE = (ROWS, LANES)

    def kernel(pool, scale, slots, offset, cos, sin, interleaved):
        num_blocks, num_heads, block_size, dim = pool.shape
        half, angle = cos.shape[1], natural(abs(offset))
        if GROUP:  # those that are rotated
            dim = min(PER_WORD * dim, (2 * half + GROUP - 1) // GROUP * GROUP)
        rows = slots.shape[0] * num_heads
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        if QUANTISED:
            x = cuda.shared.array(0, REAL)  # a row for each that the block takes
            peaks = cuda.shared.array(SHAPE, np.float32)
        at = warp * dim
        # All threads go round equally often, as those that quantise wait for each other inside.
        for first in range(
            np.int64(cuda.blockIdx.x) * ROWS, rows, np.int64(cuda.gridDim.x) * ROWS
        ):  # fmt: skip
            row = first + warp
            n, h = row // num_heads, row % num_heads
            slot = number_at(slots, n) if row < rows else np.int64(-1)
            here = slot >= 0 and slot < num_blocks * np.int64(block_size)
            largest = np.float32(0)
            if here:
                block, place = slot // block_size, slot % block_size
                words = pool[block, h, place]
                if PER_HEAD:
                    scales = scale[h : h + 1]
                elif PER_ROW:
                    scales = scale[block, h, place : place + 1]
                elif GROUP:
                    scales = scale[block, h, place]
                else:
                    scales = scale
                for j in range(lane, half, LANES):
                    i = natural(j)
                    low, high = pair_of(i, half, interleaved)
                    a, b = value(words, scales, low, dim), value(words, scales, high, dim)
                    c, s = F(cos[angle, i]), F(sin[angle, i])
                    a, b = rotate_pair(a, b, c, s if offset >= 0 else -s)
                    if QUANTISED:
                        x[at + low], x[at + high] = a, b
                        largest = max(largest, max(np.float32(abs(a)), np.float32(abs(b))))
                    else:
                        put_element(a, words, scales, low)
                        put_element(b, words, scales, high)
                if QUANTISED:
                    for j in range(2 * half + lane, dim, LANES):
                        d = natural(j)
                        a = value(words, scales, d, dim)
                        x[at + d] = a
                        largest = max(largest, np.float32(abs(a)))
            if QUANTISED:
                peaks[warp, lane] = largest
                cuda.syncthreads()
                if here:
                    block, place = slot // block_size, slot % block_size
                    put(x, at, dim, pool, scale, block, h, place, peaks, warp, lane, 0)
                cuda.syncthreads()

    return kernel


@functools.cache
def _shift_rows(kind: str) -> Any:
    table = array(types.float32, 2)
    signature = (
        array(WORDS[kind], 4), array(*SCALES[kind]), INDICES, types.int64, table, table, types.boolean,
    )  # fmt: skip
    return jit(make_shift_rows, (kind,), signature, 3)  # with fewer registers, it would spill


def _shared_bytes(name: str, words: int) -> int:
    """What the floats of a row take while they wait for their scale."""
    of_pool = kinds.kind(name)
    return 4 * words * of_pool.elements_per_word if of_pool.has_scales else 0


@implements(Operations.shift_rows)
def shift_rows(pool, kind, scale, slots, offset, cos, sin, interleaved):
    launch(
        _shift_rows(kind), ceil_div(slots.shape[0] * pool.shape[1], ROWS), (LANES, ROWS),
        pool, scale, slots, offset, cos, sin, bool(interleaved),
        shared_bytes=ROWS * _shared_bytes(kind, pool.shape[3]),
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for kind in WORDS:
        yield f"shift_rows[{kind}]", *_shift_rows(kind).described
