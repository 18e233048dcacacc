"""Rows of compressed heads on CUDA: encoded, decoded, and multiplied with a matrix of their head.

A block takes a few rows of one head. Each warp has a row of its own for what goes through a row element by element, and
every thread has columns of the head's matrix, which it multiplies with all of the block's rows, so that a matrix is
read once for several rows.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.simd import LANES, natural
from numkv.rows.codes import code_at, packed_byte, refined
from numkv.rows.convert import codec

# Rows that a block takes at once: one for each warp.
ROWS = THREADS // LANES

LARGEST = float(np.finfo(np.float32).max)


@register_jitable
def _multiply(x, width, matrix, h, j, sums):
    """``sums[r] = x[r] @ matrix[h, :, j]`` for `ROWS` rows of `width` elements."""
    for r in range(ROWS):
        sums[r] = np.float32(0)
    for k in range(width):
        factor = matrix[h, k, j]
        for r in range(ROWS):
            sums[r] = cuda.fma(x[r * width + k], factor, sums[r])


@register_jitable
def _total(partial, mine, lane, value):
    """The sum of a warp's values; all threads of the block wait for each other, before `partial` is read.

    They have to wait once more before it is written again.
    """
    partial[mine, lane] = value
    cuda.syncthreads()
    total = partial[mine, 0]
    for i in range(1, LANES):
        total += partial[mine, i]
    return total


def make_encode(SRC):
    """The kernel that encodes rows of kind `SRC`."""
    load, _ = codec(SRC)
    SHAPE, TOP = (ROWS, LANES), LARGEST

    def kernel(
        rows, rotation, edges, levels, span, sketch, codes, scales, signs, residuals, slots
    ):  # fmt: skip
        bits, start = span
        num_tokens, num_heads, dim = rows.shape
        projections = sketch.shape[2]
        widest = max(dim, projections)
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        thread = mine * LANES + lane
        # First the rotated rows, then what the codes leave of them; behind them the rows as they come, or the codes.
        z = cuda.shared.array(0, types.float32)
        chosen = cuda.shared.array(0, types.int32)
        behind = ROWS * dim
        wide = cuda.shared.array(SHAPE, np.float64)
        partial = cuda.shared.array(SHAPE, np.float32)
        sums = cuda.local.array(ROWS, np.float32)
        own, own_codes = mine * dim, behind + mine * widest
        blocks = (num_tokens + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, t = item % num_heads, item // num_heads * ROWS + mine
            here = t < num_tokens
            to = start + t
            if here and slots.shape[0] > 0:
                to = np.int64(slots[t])
            square = np.float64(0)
            if here:
                for d in range(lane, dim, LANES):
                    value = np.float64(load(rows[t, h, d]))
                    square += value * value
            # As they wait here, the item before is done with all memory but `wide`, which it has not used since.
            norm = math.sqrt(_total(wide, mine, lane, square))
            for d in range(lane, dim, LANES):
                value = np.float32(0)
                if here and norm > 0:
                    value = np.float32(np.float64(load(rows[t, h, d])) / norm)
                z[behind + own + d] = value
            cuda.syncthreads()
            for j in range(thread, dim, THREADS):
                _multiply(z[behind:], dim, rotation, h, j, sums)
                for r in range(ROWS):
                    z[r * dim + j] = sums[r]
            cuda.syncthreads()

            # -- codes, and the multiple of their levels that comes nearest
            dot, square32 = np.float32(0), np.float32(0)
            for d in range(lane, dim, LANES):
                x = z[own + d]
                code = np.int64(0)
                for i in range(bits):
                    code = refined(code, x, edges, bits - 1 - i)
                chosen[own_codes + d] = code
                level = levels[code]
                dot = cuda.fma(x, level, dot)
                square32 = cuda.fma(level, level, square32)
            dot = _total(partial, mine, lane, dot)
            cuda.syncthreads()
            factor = dot / _total(partial, mine, lane, square32)
            if here:
                if lane == 0:
                    scales[h, to] = np.float32(min(norm * np.float64(factor), TOP))
                for i in range(lane, codes.shape[2], LANES):
                    codes[h, to, i] = packed_byte(chosen, own_codes, dim, bits, i)
            if projections > 0:
                rest = np.float32(0)
                for d in range(lane, dim, LANES):
                    x = z[own + d] - factor * levels[chosen[own_codes + d]]
                    z[own + d] = x
                    rest = cuda.fma(x, x, rest)
                cuda.syncthreads()
                rest = _total(partial, mine, lane, rest)
                if here and lane == 0:
                    left = norm * math.sqrt(np.float64(rest))
                    residuals[h, to] = np.float32(min(left, TOP))
                for i in range(thread, projections, THREADS):
                    _multiply(z, dim, sketch, h, i, sums)
                    for r in range(ROWS):
                        chosen[behind + r * widest + i] = 1 if sums[r] >= 0 else 0
                cuda.syncthreads()
                if here:
                    for i in range(lane, signs.shape[2], LANES):
                        signs[h, to, i] = packed_byte(chosen, own_codes, projections, 1, i)

    return kernel


def make_decode(BITS):
    """The kernel that turns codes of `BITS` bits back into rows."""

    def kernel(codes, capacity, row_bytes, scales, begin, levels, back, out):
        num_heads, num_tokens, dim = out.shape
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        z = cuda.shared.array(0, types.float32)
        sums = cuda.local.array(ROWS, np.float32)
        blocks = (num_tokens + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, t0 = item % num_heads, item // num_heads * ROWS
            t = min(t0 + mine, num_tokens - 1)
            at = (h * capacity + begin + t) * row_bytes
            for d in range(lane, dim, LANES):
                z[mine * dim + d] = scales[h, begin + t] * levels[code_at(codes, at, BITS, d)]
            cuda.syncthreads()
            for j in range(mine * LANES + lane, dim, THREADS):
                _multiply(z, dim, back, h, j, sums)
                for r in range(ROWS):
                    if t0 + r < num_tokens:
                        out[h, t0 + r, j] = sums[r]
            cuda.syncthreads()

    return kernel


def make_multiply(SRC):
    """The kernel that multiplies q rows of kind `SRC` with the matrix of their kv head.

    They come as ``(num_queries, num_q_heads, dim)``, and leave by kv head, query and q head of the group.
    """
    load, _ = codec(SRC)

    def kernel(rows, matrix, factor, out):
        num_heads, dim, columns = matrix.shape
        group = rows.shape[1] // num_heads
        of_head = rows.shape[0] * group
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        x = cuda.shared.array(0, types.float32)
        sums = cuda.local.array(ROWS, np.float32)
        blocks = (of_head + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, r0 = item % num_heads, item // num_heads * ROWS
            row = min(r0 + mine, of_head - 1)
            query, head = row // group, h * group + row % group
            for d in range(lane, dim, LANES):
                x[mine * dim + d] = factor * load(rows[query, head, d])
            cuda.syncthreads()
            for j in range(mine * LANES + lane, columns, THREADS):
                _multiply(x, dim, matrix, h, j, sums)
                for r in range(ROWS):
                    if r0 + r < of_head:
                        out[h * of_head + r0 + r, j] = sums[r]
            cuda.syncthreads()

    return kernel
