"""Sum the attention that each cached token gets, on CUDA; `numkv.kernels.cpu.mass` has the formula.

A thread computes a token, for one kv head, and a few query rows at a time. Every element of the key serves them all,
and threads exchange nothing. Tokens whose block lies outside the pool get 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.instructions import load_shared_16, shared_address
from numkv.kernels.cuda.launches import (
    INDICES,
    SHARED_BYTES,
    THREADS,
    Kernel,
    array,
    launch,
    number_at,
    pool_types,
)
from numkv.kernels.cuda.simd import WIDTH, aligned, ceil_div, column_of, natural, reader
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.visible import is_visible, queries_that_see

# Query rows that a thread processes at once.
AT_ONCE = 4


def make_attention_weights(Q_KIND, K_KIND, WIDE):
    """Make the kernel for a kind of q and a kind of K; with `WIDE`, K rows are read 16 bytes at a time."""
    # A few elements if they are read one by one: more would not fit into registers.
    STEP, SCALES_PER = WIDTH[K_KIND] if WIDE else 4, kind(K_KIND).scales_per
    BY_ROW, BY_HEAD, HALF = SCALES_PER == "row", SCALES_PER == "head", STEP // 2
    read, column = reader(K_KIND, "float32", STEP, WIDE), column_of(K_KIND, STEP)
    load, _ = codec(Q_KIND)

    def kernel(
        q, k, k_scale, block_table, seq_lens, q_starts, ranges, options, lse, weights
    ):  # fmt: skip
        by_slot, window_left = options[0], options[3]
        sm_scale, cap = np.float32(options[1]), np.float32(options[2])
        num_blocks, num_kv_heads, block_size = k.shape[0], k.shape[1], np.int64(k.shape[2])
        dim, group = q.shape[2], q.shape[1] // num_kv_heads
        columns = np.int64(weights.shape[2])
        pieces = (columns + THREADS - 1) // THREADS
        x = cuda.local.array(STEP, np.float32)
        sums = cuda.local.array(AT_ONCE, np.float32)
        for item in range(
            np.int64(cuda.blockIdx.x), seq_lens.shape[0] * num_kv_heads * pieces,
            np.int64(cuda.gridDim.x),
        ):  # fmt: skip
            piece, g = item % pieces, item // pieces % num_kv_heads
            b = item // pieces // num_kv_heads
            j = piece * THREADS + cuda.threadIdx.x
            if j >= columns:
                continue
            length, first_row = number_at(seq_lens, b), number_at(q_starts, b)
            tokens = number_at(q_starts, b + 1) - first_row
            position = length - tokens  # of the first query
            low, high = np.int64(0), np.int64(0)
            if j < length and first_row >= 0 and first_row + tokens <= q.shape[0]:
                low, high = queries_that_see(ranges, first_row, tokens, position, window_left, j)
            block, place = np.int64(-1), j % block_size
            if low < high and by_slot:
                if j < block_table.shape[1]:
                    slot = np.int64(block_table[b, j])
                    block, place = slot // block_size, slot % block_size
            elif low < high and j // block_size < block_table.shape[1]:
                block = np.int64(block_table[b, j // block_size])
            total = np.float32(0)
            if block >= 0 and block < num_blocks:
                scale = sm_scale
                if BY_ROW:
                    scale *= k_scale[block, g, place]
                if BY_HEAD:
                    scale *= k_scale[g]
                for r0 in range(low * group, high * group, AT_ONCE):
                    for i in range(AT_ONCE):
                        sums[i] = np.float32(0)
                    for chunk in range((dim + STEP - 1) // STEP):
                        read(k, k_scale, block, g, place, chunk, x, 0)
                        # A whole chunk has a row's elements from `first` on, and from `second` on.
                        first, second = column(chunk, 0, dim), column(chunk, HALF, dim)
                        for i in range(AT_ONCE):
                            r = min(r0 + i, high * group - 1)
                            row = q[first_row + r // group, g * group + r % group]
                            for n in range(STEP):
                                d = first + n if n < HALF else second + n - HALF
                                if not WIDE:
                                    d = column(chunk, n, dim)
                                if WIDE or d < dim:
                                    sums[i] += load(row[d]) * x[n]
                    for i in range(AT_ONCE):
                        r = r0 + i
                        if r < high * group and (
                            ranges.shape[0] == 0
                            or is_visible(ranges, first_row + r // group, position, window_left, j)
                        ):
                            score = scale * sums[i]
                            if cap > np.float32(0):
                                score = cap * np.float32(math.tanh(score / cap))
                            of_row = lse[first_row + r // group, g * group + r % group]
                            total += np.float32(math.exp(score - of_row))
            weights[b, g, j] = total

    return kernel


def make_staged_weights(Q_KIND, K_KIND):
    """Make the kernel of `make_attention_weights` for keys read 16 bytes at a time, and queries without ranges.

    The block's threads write four query rows to shared memory as floats, element by element. A thread multiplies an
    element of its key by four numbers, which all threads load at once.
    """
    STEP, SCALES_PER = WIDTH[K_KIND], kind(K_KIND).scales_per
    BY_ROW, BY_HEAD, HALF = SCALES_PER == "row", SCALES_PER == "head", STEP // 2
    read, column = reader(K_KIND, "float32", STEP, True), column_of(K_KIND, STEP)
    load, _ = codec(Q_KIND)

    @register_jitable
    def four(address, d):
        a, b, c, e = load_shared_16(np.uint32(address + np.uint32(d) * np.uint32(16)))
        return a.view(np.float32), b.view(np.float32), c.view(np.float32), e.view(np.float32)

    @register_jitable
    def weight(sum_, scale, cap, lse):
        score = scale * sum_
        if cap > np.float32(0):
            score = cap * np.float32(math.tanh(score / cap))
        return np.float32(math.exp(score - lse))

    @register_jitable
    def stage(q, rows, first_row, head, group, r0, end):
        dim, chunks = q.shape[2], (q.shape[2] + STEP - 1) // STEP
        for i in range(AT_ONCE):
            r = natural(min(r0 + i, end - 1))
            row = q[first_row + r // group, head + r % group]
            for d in range(cuda.threadIdx.x, chunks * STEP, THREADS):
                rows[AT_ONCE * d + i] = load(row[d]) if d < dim else np.float32(0)

    def kernel(
        q, k, k_scale, block_table, seq_lens, q_starts, ranges, options, lse, weights
    ):  # fmt: skip
        by_slot, window_left = options[0], options[3]
        sm_scale, cap = np.float32(options[1]), np.float32(options[2])
        num_blocks, num_kv_heads, block_size = k.shape[0], natural(k.shape[1]), natural(k.shape[2])
        dim, group = natural(q.shape[2]), natural(q.shape[1]) // num_kv_heads
        columns = np.int64(weights.shape[2])
        pieces, thread = (columns + THREADS - 1) // THREADS, np.int64(cuda.threadIdx.x)
        rows = cuda.shared.array(0, types.float32)
        address = np.uint32(shared_address(rows))
        x = cuda.local.array(STEP, np.float32)
        for item in range(
            np.int64(cuda.blockIdx.x), seq_lens.shape[0] * num_kv_heads * pieces,
            np.int64(cuda.gridDim.x),
        ):  # fmt: skip
            piece, g = item % pieces, item // pieces % num_kv_heads
            b = item // pieces // num_kv_heads
            j = piece * THREADS + thread
            length, first_row = number_at(seq_lens, b), number_at(q_starts, b)
            tokens = number_at(q_starts, b + 1) - first_row
            position = length - tokens  # of the first query
            low, high, all_low, all_high = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
            if first_row >= 0 and first_row + tokens <= q.shape[0] and piece * THREADS < length:
                last = min((piece + 1) * THREADS, length) - 1
                all_low, _ = queries_that_see(
                    ranges, first_row, tokens, position, window_left, piece * THREADS
                )
                _, all_high = queries_that_see(
                    ranges, first_row, tokens, position, window_left, last
                )
                if j < length:
                    low, high = queries_that_see(
                        ranges, first_row, tokens, position, window_left, j
                    )
            block, place = np.int64(-1), j % block_size
            if low < high and by_slot:
                if j < block_table.shape[1]:
                    slot = np.int64(block_table[b, j])
                    block, place = slot // block_size, slot % block_size
            elif low < high and j // block_size < block_table.shape[1]:
                block = np.int64(block_table[b, j // block_size])
            total, scale = np.float32(0), sm_scale
            if block < 0 or block >= num_blocks:
                low = high
            elif BY_ROW:
                scale *= k_scale[block, g, place]
            elif BY_HEAD:
                scale *= k_scale[g]
            for r0 in range(all_low * group, all_high * group, AT_ONCE):
                cuda.syncthreads()
                stage(q, rows, first_row, g * group, group, r0, all_high * group)
                cuda.syncthreads()
                if r0 >= high * group or r0 + AT_ONCE <= low * group:
                    continue
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for chunk in range((dim + STEP - 1) // STEP):
                    read(k, k_scale, block, g, place, chunk, x, 0)
                    # A whole chunk has a row's elements from `first` on, and from `second` on.
                    first, second = column(chunk, 0, dim), column(chunk, HALF, dim)
                    for n in range(STEP):
                        a0, a1, a2, a3 = four(address, first + n if n < HALF else second + n - HALF)
                        s0 += a0 * x[n]
                        s1 += a1 * x[n]
                        s2 += a2 * x[n]
                        s3 += a3 * x[n]
                for i in range(AT_ONCE):
                    r = natural(r0 + i)
                    own = s0 if i == 0 else (s1 if i == 1 else (s2 if i == 2 else s3))
                    if r >= low * group and r < high * group:
                        of_row = lse[first_row + r // group, g * group + r % group]
                        total += weight(own, scale, cap, of_row)
            if j < columns:
                weights[b, g, j] = total

    return kernel


@functools.cache
def _attention_weights(q_kind: str, k_kind: str, wide: bool, staged: bool = False) -> Any:
    signature = (
        array(WORDS[q_kind], 3), *pool_types(k_kind), array(types.int32, 2), INDICES, INDICES, array(types.int64, 2),
        types.Tuple((types.int64, types.float64, types.float64, types.int64)),
        array(types.float32, 2), array(types.float32, 3),
    )  # fmt: skip
    if staged:
        return Kernel(make_staged_weights, (q_kind, k_kind), signature, 4)
    return Kernel(make_attention_weights, (q_kind, k_kind, wide), signature, 4)


@implements(Operations.attention_weights)
def attention_weights(
    q, q_kind, k, k_kind, k_scale, block_table, seq_lens, q_starts, ranges, by_slot, lse, sm_scale,
    logits_soft_cap, window_left, weights,
):  # fmt: skip
    num_seqs, num_kv_heads, columns = weights.shape
    wide = aligned(k, k_kind, WIDTH[k_kind])
    row_bytes = 4 * AT_ONCE * ceil_div(q.shape[2], WIDTH[k_kind]) * WIDTH[k_kind]
    staged = wide and not SIMULATED and not ranges.shape[0] and row_bytes <= SHARED_BYTES
    kernel = _attention_weights(q_kind, k_kind, wide, staged)
    launch(
        kernel, num_seqs * num_kv_heads * ceil_div(columns, THREADS), THREADS, q, k, k_scale,
        block_table, seq_lens, q_starts, ranges,
        (int(by_slot), float(sm_scale), float(logits_soft_cap), int(window_left)), lse, weights,
        shared_bytes=row_bytes * staged,
    )  # fmt: skip
