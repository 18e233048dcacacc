"""Find NaN and infinity in rows to be quantised, on CUDA, and replace such full-precision rows by zeros.

Kernels that quantise rows also check them, and store zeros for rows that are not finite. `mend_rows` does the same for
float rows that are quantised later.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import late, uploads
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import (
    INDICES,
    MAX_BLOCKS,
    THREADS,
    Kernel,
    array,
    launch,
    number_at,
)
from numkv.kernels.cuda.octets import bytes_of, lanes_for, octet_loader, octets_fit
from numkv.kernels.cuda.rows import NOWHERE, V_SIDE, as_it_is, first_bad_of
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, natural
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite

HIGH = 0x7F  # a byte: eight of them are greater than any index, as `NOWHERE` is


def make_first_non_finite(KIND):
    """Make the kernel that finds the first non-finite element in rows of a float kind."""
    load, _ = codec(KIND)

    def kernel(rows, found):
        num_tokens, num_heads, dim = rows.shape
        mine = np.int64(NOWHERE)
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS):
            t, h = row // num_heads, row % num_heads
            for d in range(cuda.threadIdx.x, dim, LANES):
                if not is_finite(load(rows[t, h, d])):
                    mine = min(mine, row * dim + d)
        if mine < NOWHERE:
            cuda.atomic.min(found, 0, mine)

    return kernel


def make_first_non_finite_octets(KIND):
    """Make the kernel of `make_first_non_finite` for aligned rows: an octet a thread at once."""
    COMPUTE = "float64" if KIND == "fp64" else "float32"
    load, SIZE = octet_loader(KIND, COMPUTE), bytes_of(KIND)
    REAL = np.float64 if KIND == "fp64" else np.float32

    def kernel(rows, found, log):
        num_tokens, num_heads, dim = rows.shape[0], natural(rows.shape[1]), natural(rows.shape[2])
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        lane, first = thread & (lanes - 1), np.int64(cuda.blockIdx.x) * at_once + (thread >> log)
        x, mine = cuda.local.array(8, REAL), np.int64(NOWHERE)
        for item in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * at_once):
            row = natural(item)
            t = row // num_heads
            source = (
                global_address(rows) + t * rows.strides[0] + (row - t * num_heads) * rows.strides[1]
            )
            for octet in range(lane, dim >> 3, lanes):
                load(source + octet * SIZE, x, 0)
                for i in range(8):
                    if not is_finite(np.float32(x[i])):
                        mine = min(mine, row * dim + octet * 8 + i)
        if mine < NOWHERE:
            cuda.atomic.min(found, 0, mine)

    return kernel


@functools.cache
def _first_non_finite(kind: str, octets: bool = False) -> Any:
    signature = (array(WORDS[kind], 3), array(types.int64, 1))
    if octets:
        return Kernel(make_first_non_finite_octets, (kind,), (*signature, types.int64), 8)
    return Kernel(make_first_non_finite, (kind,), signature, 8)


@implements(Operations.first_non_finite)
def first_non_finite(rows, kind):
    if not rows.size:
        return -1
    found = uploads.filled_word(HIGH)
    if octets_fit(rows, kind, rows.shape[2]):
        lanes = lanes_for(rows.shape[2] // 8)
        blocks = ceil_div(rows.shape[0] * rows.shape[1], THREADS >> lanes)
        launch(_first_non_finite(kind, True), blocks, THREADS, rows, found, lanes)
    else:
        blocks = ceil_div(rows.shape[0] * rows.shape[1], ROWS)
        launch(_first_non_finite(kind), blocks, (LANES, ROWS), rows, found)
    index = uploads.word_of(found)
    return index if index < NOWHERE >> 8 else -1


def make_mend_rows():
    """Make the kernel that checks rows in pools of floats, and replaces those that are not finite by zeros.

    Blocks of threads from `k_blocks` on check V. Reports are those of `numkv.kernels.cuda.append`.
    """
    first_bad = first_bad_of(as_it_is)

    @register_jitable
    def mend(pool, slots, part, num_parts, look, bad, found, raised):
        num_blocks, num_heads, block_size, dim = pool.shape
        num_tokens, lane, warp = slots.shape[0], cuda.threadIdx.x, cuda.threadIdx.y
        # All threads have the same number of iterations, because those of a row synchronise within.
        for first in range(part * ROWS, num_tokens * num_heads, num_parts * ROWS):
            row = first + warp
            t, h = row // num_heads, row % num_heads
            slot = np.int64(-1)
            if row < num_tokens * num_heads:
                slot = number_at(slots, t)
            here = slot >= 0 and slot < num_blocks * block_size
            block, offset = np.int64(0), np.int64(0)
            mine = np.int64(-1)
            if here:
                block, offset = slot // block_size, slot % block_size
                mine = first_bad(pool[block, h, offset], 0, dim, lane)
            bad[warp, lane] = np.int32(1) if mine >= 0 else np.int32(0)
            cuda.syncthreads()
            if mine >= 0:
                cuda.atomic.min(found, t & (found.shape[0] - 1), look + row * dim + mine)
                cuda.threadfence_system()
                raised[0] = 1
            of_row = np.int32(0)
            for i in range(LANES):
                of_row = of_row | bad[warp, i]
            if here and of_row != 0:
                for d in range(lane, dim, LANES):
                    pool[block, h, offset, d] = np.float32(0)
            cuda.syncthreads()

    def kernel(k, v, slots, k_blocks, look, found, raised):
        bad = cuda.shared.array((ROWS, LANES), np.int32)
        block, grid = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        if block < k_blocks:
            mend(k, slots, block, k_blocks, look, bad, found, raised)
        else:
            mend(v, slots, block - k_blocks, grid - k_blocks, look + V_SIDE, bad, found, raised)

    return kernel


@functools.cache
def _mend_rows() -> Any:
    pool, words = array(types.float32, 4), array(types.int64, 1)
    return Kernel(
        make_mend_rows, (), (pool, pool, INDICES, types.int64, types.int64, words, words), 8
    )


def mend_rows(k, v, slots, look):
    """See `numkv.targets.base.Target.mend_rows`."""
    blocks = [
        0 if x is None else min(ceil_div(slots.shape[0] * x.shape[1], ROWS), MAX_BLOCKS // 2 or 1)
        for x in (k, v)
    ]
    k, v = v if k is None else k, k if v is None else v
    launch(_mend_rows(), sum(blocks), (LANES, ROWS), k, v, slots, blocks[0], look, *late.flags(look))  # fmt: skip
