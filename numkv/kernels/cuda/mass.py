"""How much attention each cached token gets, on CUDA; what is computed is on top of `numkv.kernels.cpu.mass`.

A thread takes a token, for one kv head, and a few query rows at a time: every element of the key serves them all, and
threads have nothing to tell each other. Tokens whose block lies outside the pool get 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.launches import INDICES, array, jit, launch, number_at
from numkv.kernels.cuda.simd import (
    STORED_ONLY,
    THREADS,
    WIDTH,
    aligned,
    ceil_div,
    column_of,
    reader,
)  # fmt: skip
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.visible import is_visible, queries_that_see

__all__ = ["attention_weights"]

# Query rows that a thread takes at once.
AT_ONCE = 4


def make_attention_weights(Q_KIND, K_KIND, WIDE):
    """The kernel for a kind of q and a kind of K; `WIDE` says whether K rows are read 16 bytes at a time."""
    STEP, SCALES_PER = WIDTH[K_KIND], kind(K_KIND).scales_per
    BY_ROW, BY_HEAD, HALF = SCALES_PER == "row", SCALES_PER == "head", STEP // 2
    read, column = reader(K_KIND, "float32", STEP, WIDE), column_of(K_KIND, STEP)
    load, _ = codec(Q_KIND)

    def kernel(
        q, k, k_scale, block_table, seq_lens, q_starts, ranges, options, lse, weights
    ):  # fmt: skip
        by_slot, sm_scale, soft_cap, window_left = options
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
                scale = np.float32(sm_scale)
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
                            if soft_cap > 0:
                                cap = np.float32(soft_cap)
                                score = cap * np.float32(math.tanh(score / cap))
                            of_row = lse[first_row + r // group, g * group + r % group]
                            total += np.float32(math.exp(score - of_row))
            weights[b, g, j] = total

    return kernel


@functools.cache
def _attention_weights(q_kind: str, k_kind: str, wide: bool) -> Any:
    signature = (
        array(WORDS[q_kind], 3), array(WORDS[k_kind], 4), array(*SCALES[k_kind]),
        array(types.int32, 2), INDICES, INDICES, array(types.int64, 2),
        types.Tuple((types.int64, types.float64, types.float64, types.int64)),
        array(types.float32, 2), array(types.float32, 3),
    )  # fmt: skip
    return jit(make_attention_weights, (q_kind, k_kind, wide), signature, 4)


@implements(Operations.attention_weights)
def attention_weights(
    q, q_kind, k, k_kind, k_scale, block_table, seq_lens, q_starts, ranges, by_slot, lse, sm_scale,
    logits_soft_cap, window_left, weights,
):  # fmt: skip
    num_seqs, num_kv_heads, columns = weights.shape
    kernel = _attention_weights(q_kind, k_kind, aligned(k, k_kind, WIDTH[k_kind]))
    launch(
        kernel, num_seqs * num_kv_heads * ceil_div(columns, THREADS), THREADS, q, k, k_scale,
        block_table, seq_lens, q_starts, ranges,
        (int(by_slot), float(sm_scale), float(logits_soft_cap), int(window_left)), lse, weights,
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for q_kind, k_kind, wide in (
        ("fp64", "fp64", True), ("fp32", "fp32", False), ("fp16", "fp16", True), ("bf16", "bf16", True),
        ("fp32", "int8", True), ("bf16", "int8", False), ("fp32", "int4", False),
        *(("bf16", name, True) for name in STORED_ONLY),
    ):  # fmt: skip
        name = f"attention_weights[q {q_kind}, K {k_kind}{', wide' if wide else ''}]"
        yield name, *_attention_weights(q_kind, k_kind, wide).described
