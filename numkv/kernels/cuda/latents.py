"""Write rows of latents into a cache, on CUDA: RMS norm of the latent, RoPE of what follows it, and the write.

A warp processes a row. The row is in shared memory, where the two elements of a rotated pair meet. A block processes
several rows at once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import late
from numkv.kernels.cuda.launches import (
    INDICES,
    ROW_BYTES,
    Kernel,
    array,
    launch,
    number_at,
    pool_types,
)
from numkv.kernels.cuda.rows import as_it_is, needs_peak, row_store
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite
from numkv.rows.rmsnorm import root_mean_square
from numkv.rows.rope import pair_of, rotate_pair


def make_scatter_latents(SRC, KIND, COMPUTE):
    """Make the kernel for rows of kind `SRC` and a pool of kind `KIND`, computing in `COMPUTE`.

    A token is skipped if its slot lies outside the pool, or its angles outside the tables.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    REAL = getattr(types, COMPUTE)  # element type of dynamic shared memory
    load, _ = codec(SRC, COMPUTE)
    peak, put = row_store(KIND, COMPUTE, as_it_is)
    NEEDS_PEAK = needs_peak(KIND)
    SHAPE = (ROWS, LANES)

    def kernel(rows, cos, sin, how, weight, angles, pool, scale, slots, look, found, raised):
        normalise, rotate, interleaved, eps, width = how
        heads, dim = rows.shape[1], rows.shape[2]
        block_size = np.int64(pool.shape[2])
        num_rows, half = rows.shape[0] * heads, cos.shape[1] if rotate else 0
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        x = cuda.shared.array(0, REAL)  # a row for each warp
        at = warp * dim
        squares = cuda.shared.array(SHAPE, F)
        # All threads have the same number of iterations, because they synchronise within.
        at_once = np.int64(cuda.blockDim.y)
        for first in range(
            np.int64(cuda.blockIdx.x) * at_once, num_rows, np.int64(cuda.gridDim.x) * at_once
        ):
            row = first + warp
            t, h = row // heads, row % heads
            angle, slot = np.int64(0), np.int64(-1)
            if row < num_rows:
                slot = number_at(slots, t)
                if rotate:
                    angle = number_at(angles, t)
            here = slot >= 0 and slot < pool.shape[0] * block_size
            here = here and (not rotate or (angle >= 0 and angle < cos.shape[0]))
            total, first_bad = F(0), np.int64(-1)
            if here:
                for d in range(lane, dim, LANES):
                    value = load(rows[t, h, d])
                    x[at + d] = value
                    if d < width:
                        total += value * value
                    if NEEDS_PEAK and first_bad < 0 and not is_finite(value):
                        first_bad = np.int64(d)
            squares[warp, lane] = total
            cuda.syncthreads()
            if here and normalise:
                total = F(0)
                for i in range(LANES):
                    total += squares[warp, i]
                root = F(root_mean_square(total, F(width), F(eps)))
                for d in range(lane, width, LANES):
                    x[at + d] = x[at + d] / root * weight[d]
            if here:
                for i in range(lane, half, LANES):
                    low, high = pair_of(i, half, interleaved)
                    low, high = at + width + low, at + width + high
                    c, s = F(cos[angle, i]), F(sin[angle, i])
                    x[low], x[high] = rotate_pair(x[low], x[high], c, s)
            cuda.syncthreads()
            if NEEDS_PEAK:
                largest = peak(x, at, dim, lane) if here else np.float32(0)
                if here and look > 0 and first_bad >= 0:
                    largest = np.float32(np.inf)
                    word = t & (found.shape[0] - 1)
                    cuda.atomic.min(found, word, look + row * dim + first_bad)
                    cuda.threadfence_system()
                    raised[0] = 1
                squares[warp, lane] = largest
                cuda.syncthreads()
            if here:
                block, offset = slot // block_size, slot % block_size
                put(x, at, dim, pool, scale, block, h, offset, squares, warp, lane, look)
            cuda.syncthreads()

    return kernel


@functools.cache
def _scatter(src: str, kind: str, compute: str, table: str) -> Any:
    real, i64, flag = getattr(types, compute), types.int64, types.boolean
    angles = array(getattr(types, table), 2)
    signature = (
        array(WORDS[src], 3), angles, angles, types.Tuple((flag, flag, flag, types.float64, i64)), array(real, 1),
        INDICES, *pool_types(kind), INDICES, i64, array(i64, 1), array(i64, 1),
    )  # fmt: skip
    return Kernel(make_scatter_latents, (src, kind, compute), signature, 3 if kind == "int4" else 6)


@implements(Operations.scatter_latents)
def scatter_latents(
    rows, rows_kind, cos, sin, how, weight, positions, pool, pool_kind, scale, slot_mapping, look=0
):  # fmt: skip
    compute, dim = weight.dtype, rows.shape[2]
    row_bytes = dim * compute.itemsize
    if row_bytes > ROW_BYTES:
        raise NotSupported(
            f"`rows`: expected rows of at most {ROW_BYTES // compute.itemsize} elements on CUDA, which lie in shared "
            f"memory while they are rotated, got {dim}; rotate them before, and append them"
        )
    at_once = max(1, min(ROWS, ROW_BYTES // row_bytes))
    normalise, rotate, interleaved, eps, width = how
    launch(
        _scatter(rows_kind, pool_kind, compute.name, cos.dtype.name),
        ceil_div(rows.shape[0] * rows.shape[1], at_once), (LANES, at_once), rows, cos, sin,
        (bool(normalise), bool(rotate), bool(interleaved), float(eps), int(width)), weight, positions, pool, scale,
        slot_mapping, look, *late.flags(look), shared_bytes=at_once * row_bytes,
    )  # fmt: skip
