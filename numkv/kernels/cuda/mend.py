"""Look for NaN and infinity in rows among floats that are to be quantised later, on CUDA, and put zeros in their place.

That is what the kernels do that quantise rows; this one is for rows that wait in full precision.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.cuda import late
from numkv.kernels.cuda.launches import INDICES, MAX_BLOCKS, THREADS, array, jit, launch, number_at
from numkv.kernels.cuda.rows import V_SIDE, as_it_is, first_bad_of
from numkv.kernels.cuda.simd import LANES, ceil_div

ROWS = THREADS // LANES  # rows that a block takes at once


def make_mend_rows():
    """The kernel that looks at rows in pools of floats, and puts zeros in place of those that are not finite.

    Blocks of threads from `k_blocks` on take V. What is found is reported as by `numkv.kernels.cuda.append`.
    """
    first_bad = first_bad_of(as_it_is)

    @register_jitable
    def mend(pool, slots, part, num_parts, look, bad, found, raised):
        num_blocks, num_heads, block_size, dim = pool.shape
        num_tokens, lane, warp = slots.shape[0], cuda.threadIdx.x, cuda.threadIdx.y
        # All threads go round equally often, as those of a row wait for each other inside.
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
    return jit(make_mend_rows, (), (pool, pool, INDICES, types.int64, types.int64, words, words), 8)


def mend_rows(k, v, slots, look):
    """See `numkv.targets.base.Target.mend_rows`."""
    blocks = [
        0 if x is None else min(ceil_div(slots.shape[0] * x.shape[1], ROWS), MAX_BLOCKS // 2 or 1)
        for x in (k, v)
    ]
    k, v = v if k is None else k, k if v is None else v
    launch(_mend_rows(), sum(blocks), (LANES, ROWS), k, v, slots, blocks[0], look, *late.flags(look))  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """The kernel with a signature to compile it for; see `numkv.kernels.cuda.catalogue`."""
    yield "mend_rows", *_mend_rows().described
