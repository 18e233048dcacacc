"""How attention splits long KV ranges on CUDA, and the kernel that merges the parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import memory
from numkv.kernels.cuda.attention.items import (
    MAX_SPLIT_QUERIES,
    MAX_SPLITS,
    MIN_SPLIT,
    Batch,
    extent,
    parts_by_token,
)  # fmt: skip
from numkv.kernels.cuda.attention.sizes import tile_of
from numkv.kernels.cuda.launches import INDICES, array, jit, launch, number_at
from numkv.kernels.cuda.simd import THREADS, ceil_div
from numkv.rows.convert import codec
from numkv.rows.softmax import finish

__all__ = ["LN_2", "LOG2_E", "max_splits", "merge_splits", "parts_of"]

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def max_splits(capacity: int, window_left: int, compute: str) -> int:
    """Splits that a sequence can have, whatever its length."""
    reach = capacity
    if window_left >= 0:
        reach = min(reach, window_left + MAX_SPLIT_QUERIES + tile_of(compute))
    return max(1, min(MAX_SPLITS, ceil_div(reach, MIN_SPLIT)))


def parts_of(
    num_tokens: int, num_seqs: int, num_q_heads: int, splits: int, dim_v: int, compute: str
) -> Any:
    """Memory for the parts of splits: ``[row, q head, split]`` has a sum over V rows, its maximum and its total.

    Rows are tokens, or `MAX_SPLIT_QUERIES` for each sequence where that is less. It goes back to the stream when nobody
    holds it; what takes it next runs after the kernels that were launched with it.
    """
    rows = min(num_tokens, MAX_SPLIT_QUERIES * num_seqs) if splits > 1 else 1
    return memory.empty((rows, num_q_heads, splits, dim_v + 2), np.dtype(compute))


def make_merge_splits(Q_KIND, COMPUTE):
    """The kernel that merges the parts of split sequences, in order."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2
    TILE = tile_of(COMPUTE)
    _, store_q = codec(Q_KIND, COMPUTE)

    def kernel(parts, capacity, seq_lens, q_starts, ranges, window_left, sinks, out, lse):
        num_tokens, num_q_heads, dim_v = out.shape
        num_seqs = seq_lens.shape[0]
        num_sinks = sinks.shape[0]
        batch = Batch(
            seq_lens, q_starts, ranges, num_tokens, np.int64(capacity), window_left, num_tokens
        )
        thread = np.int64(cuda.threadIdx.x)
        tops = cuda.shared.array(MAX_SPLITS, F)
        weights = cuda.shared.array(MAX_SPLITS, F)
        for row in range(
            np.int64(cuda.blockIdx.x), parts.shape[0] * num_q_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            at, h = row // num_q_heads, row % num_q_heads
            if parts_by_token(num_tokens, num_seqs):
                # The sequence whose queries token `at` is one of: the last that starts no later.
                b, above = np.int64(0), np.int64(num_seqs)
                while above - b > 1:
                    middle = (b + above) // 2
                    if number_at(q_starts, middle) <= at:
                        b = middle
                    else:
                        above = middle
                t = at - number_at(q_starts, b)
            else:
                b, t = at // MAX_SPLIT_QUERIES, at % MAX_SPLIT_QUERIES
            own = extent(batch, b, TILE)
            splits = own.splits
            if splits == 1 or t < 0 or t >= own.tokens:
                continue
            for i in range(thread, splits, THREADS):
                tops[i] = parts[at, h, i, dim_v]
            cuda.syncthreads()
            top = F(-np.inf)
            for i in range(splits):
                top = max(top, tops[i])
            base = top if top > F(-np.inf) else F(0)
            for i in range(thread, splits, THREADS):
                weights[i] = F(math.exp2(tops[i] - base))
            cuda.syncthreads()
            total = F(0)
            for i in range(splits):
                total += weights[i] * parts[at, h, i, dim_v + 1]
            sink = F(sinks[h]) * F(TO_BASE_2) if num_sinks > 0 else F(-np.inf)
            factor, log_sum = finish(top, total, sink, F(TO_BASE_E))
            for d in range(thread, dim_v, THREADS):
                x = F(0)
                for i in range(splits):
                    x = cuda.fma(weights[i], parts[at, h, i, d], x)
                out[own.start + t, h, d] = store_q(F(factor) * x)
            if thread == 0 and lse.shape[0] > 0:
                lse[own.start + t, h] = log_sum
            cuda.syncthreads()

    return kernel


@functools.cache
def _merge_splits(q_kind: str, compute: str) -> Any:
    real = getattr(types, compute)
    signature = (
        array(real, 4), types.int64, INDICES, INDICES, array(types.int64, 2), types.int64,
        array(real, 1), array(WORDS[q_kind], 3), array(types.float32, 2),
    )  # fmt: skip
    return jit(make_merge_splits, (q_kind, compute), signature)


def merge_splits(
    parts, q_kind, capacity, seq_lens, q_starts, ranges, window_left, sinks, out, lse
):  # fmt: skip
    """Merge the parts of split sequences.

    Parameters
    ----------
    parts : array (num_rows, num_q_heads, splits, head_dim_v + 2)
        See `parts_of`.
    q_kind : str
        Kind of `out`.
    capacity : int
        Tokens that a row of the block table can say the places of.
    seq_lens, q_starts, ranges, window_left, sinks, out, lse
        See `numkv.kernels.operations.Operations.attend`.
    """
    launch(
        _merge_splits(q_kind, sinks.dtype.name), parts.shape[0] * parts.shape[1], THREADS,
        parts, capacity, seq_lens, q_starts, ranges, window_left, sinks, out, lse,
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for q_kind, compute in (("fp32", "float32"), ("fp16", "float32"), ("bf16", "float64")):
        yield f"splits[{q_kind}, in {compute}]", *_merge_splits(q_kind, compute).described
