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

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.simd import LANES, THREADS, c_array, ceil_div, jit, launch, loader, natural
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.convert import codec
from numkv.rows.int4 import GROUP, int4_value, store_int4_group
from numkv.rows.quantize import int8_code, int8_scale
from numkv.rows.rope import pair_of, rotate_pair

__all__ = ["shift_rows"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_shift_rows(KIND):
    """The kernel for a pool of kind `KIND`."""
    QUANTISED, GROUPS = KIND in ("int8", "int4"), KIND == "int4"
    COMPUTE = "float64" if KIND == "fp64" else "float32"
    F = np.float64 if KIND == "fp64" else np.float32
    load = loader(KIND, COMPUTE)
    _, store = codec("fp32" if QUANTISED else KIND, COMPUTE)
    SHAPE = (ROWS, LANES)

    def kernel(pool, scale, slots, offset, cos, sin, interleaved):
        num_blocks, num_heads, block_size, dim = pool.shape
        half, angle = cos.shape[1], natural(abs(offset))
        if GROUPS:  # those that turn
            dim = min(2 * dim, (2 * half + GROUP - 1) // GROUP * GROUP)
            groups = (dim + GROUP - 1) // GROUP
        rows = slots.shape[0] * num_heads
        lane, mine = cuda.threadIdx.x, cuda.threadIdx.y
        if QUANTISED:
            x = cuda.shared.array(0, types.float32)  # a row for each that the block takes
            peaks = cuda.shared.array(SHAPE, np.float32)
        at = mine * dim
        # All threads go round equally often, as those that quantise wait for each other inside.
        for first in range(
            np.int64(cuda.blockIdx.x) * ROWS, rows, np.int64(cuda.gridDim.x) * ROWS
        ):  # fmt: skip
            row = first + mine
            n, h = row // num_heads, row % num_heads
            slot = np.int64(slots[n]) if row < rows else np.int64(-1)
            here = slot >= 0 and slot < num_blocks * np.int64(block_size)
            block, place = np.int64(0), np.int64(0)
            largest = np.float32(0)
            if here:
                block, place = slot // block_size, slot % block_size
                words = pool[block, h, place]
                for j in range(lane, half, LANES):
                    i = natural(j)
                    low, high = pair_of(i, half, interleaved)
                    if GROUPS:
                        scales = scale[block, h, place]
                        a = int4_value(words, scales, low, dim)
                        b = int4_value(words, scales, high, dim)
                    else:
                        a, b = load(words[low]), load(words[high])
                    if QUANTISED and not GROUPS:
                        a, b = a * scale[block, h, place], b * scale[block, h, place]
                    c, s = F(cos[angle, i]), F(sin[angle, i])
                    a, b = rotate_pair(a, b, c, s if offset >= 0 else -s)
                    if QUANTISED:
                        x[at + low], x[at + high] = a, b
                        largest = max(largest, max(np.float32(abs(a)), np.float32(abs(b))))
                    else:
                        words[low], words[high] = store(a), store(b)
                if QUANTISED:
                    for j in range(2 * half + lane, dim, LANES):
                        d = natural(j)
                        if GROUPS:
                            a = int4_value(words, scale[block, h, place], d, dim)
                        else:
                            a = load(words[d]) * scale[block, h, place]
                        x[at + d] = a
                        largest = max(largest, np.float32(abs(a)))
            if QUANTISED:
                peaks[mine, lane] = largest
                cuda.syncthreads()
                for i in range(LANES):
                    largest = max(largest, peaks[mine, i])
                row_scale = int8_scale(largest)
                if here:
                    words = pool[block, h, place]
                    if GROUPS:  # a lane for each
                        for j in range(lane, groups, LANES):
                            begin = np.int64(j) * GROUP
                            count = min(np.int64(GROUP), dim - begin)
                            scale[block, h, place, j] = store_int4_group(
                                x, at + begin, count, words, begin // 2
                            )
                    else:
                        if lane == 0:
                            scale[block, h, place] = row_scale
                        for j in range(lane, dim, LANES):
                            d = natural(j)
                            words[d] = int8_code(x[at + d], row_scale)
                cuda.syncthreads()

    return kernel


@functools.cache
def _shift_rows(kind: str) -> Any:
    return jit(make_shift_rows(kind), 3)  # with fewer registers, it would spill


@implements(Operations.shift_rows)
def shift_rows(pool, kind, scale, slots, offset, cos, sin, interleaved):
    launch(
        _shift_rows(kind), ceil_div(slots.shape[0] * pool.shape[1], ROWS), (LANES, ROWS),
        pool, scale, slots, offset, cos, sin, bool(interleaved),
        shared_bytes=ROWS * pool.shape[3] * {"int8": 4, "int4": 8}.get(kind, 0),
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    table = c_array(types.float32, 2)
    for kind, slot in (
        ("fp64", types.int64), ("fp32", types.int32), ("fp16", types.int64), ("bf16", types.int32),
        ("int8", types.int64), ("int4", types.int32),
    ):  # fmt: skip
        signature = (
            c_array(WORDS[kind], 4), c_array(*SCALES[kind]), c_array(slot, 1), types.int64,
            table, table, types.boolean,
        )  # fmt: skip
        yield f"shift_rows[{kind}]", make_shift_rows(kind), signature
