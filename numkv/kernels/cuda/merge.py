"""Merge two attention results over disjoint parts of a KV range, on CUDA; see `numkv.kernels.cpu.merge`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.launches import array, jit, launch
from numkv.kernels.cuda.simd import LANES, THREADS, ceil_div, compute_of
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.convert import codec
from numkv.rows.softmax import merge_weights

__all__ = ["merge_states"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_merge(KIND, COMPUTE):
    """The kernel for outputs of a float kind."""
    load, store = codec(KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64

    def kernel(o_a, lse_a, o_b, lse_b, out, lse):
        num_tokens, num_heads, dim = out.shape
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS):
            t, h = row // num_heads, row % num_heads
            weight_a, weight_b, total = merge_weights(lse_a[t, h], lse_b[t, h])
            if cuda.threadIdx.x == 0:
                lse[t, h] = total
            for d in range(cuda.threadIdx.x, dim, LANES):
                # A part that saw nothing has weight 0; its row is not read, so it may hold anything.
                value = F(0) if weight_a == 0 else F(weight_a) * load(o_a[t, h, d])
                if weight_b != 0:
                    value += F(weight_b) * load(o_b[t, h, d])
                out[t, h, d] = store(value)

    return kernel


@functools.cache
def _merge(kind: str) -> Any:
    o, lse = array(WORDS[kind], 3), array(types.float32, 2)
    return jit(make_merge, (kind, compute_of(kind)), (o, lse, o, lse, o, lse), 8)


@implements(Operations.merge_states)
def merge_states(o_a, lse_a, o_b, lse_b, kind, out, lse):
    blocks = ceil_div(out.shape[0] * out.shape[1], ROWS)
    launch(_merge(kind), blocks, (LANES, ROWS), o_a, lse_a, o_b, lse_b, out, lse)


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for kind in ("fp64", "fp16", "bf16"):
        yield f"merge[{kind}]", *_merge(kind).described
