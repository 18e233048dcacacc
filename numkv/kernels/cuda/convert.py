"""Quantised rows to floats, on CUDA: what `numkv.targets.cuda.CudaTarget.dequantise` needs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.simd import LANES, THREADS, c_array, ceil_div, jit, launch
from numkv.rows.int4 import int4_value

__all__ = ["dequantise"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_dequantise(KIND):
    """The kernel that turns codes of a quantised kind into float32."""

    def kernel(codes, scale, out):
        num_heads, num_tokens, dim = out.shape
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_heads * num_tokens, np.int64(cuda.gridDim.x) * ROWS):
            h, t = row // num_tokens, row % num_tokens
            words, factor = codes[h, t], scale[h, t]
            for d in range(cuda.threadIdx.x, dim, LANES):
                if KIND == "int4":
                    out[h, t, d] = int4_value(words, factor, d, dim)
                else:
                    out[h, t, d] = np.float32(words[d]) * factor

    return kernel


@functools.cache
def _dequantise(kind: str) -> Any:
    return jit(make_dequantise(kind), 8)


def dequantise(codes, kind, scale, out):
    """Turn codes into values.

    Parameters
    ----------
    codes : array (num_heads, num_tokens, words)
        Codes, in the words of `kind`.
    kind : str
        Their kind.
    scale : array (num_heads, num_tokens) or (num_heads, num_tokens, groups)
        Scales of their rows, or of the rows' groups, in words.
    out : float32 array (num_heads, num_tokens, head_dim)
        Takes the values.
    """
    blocks = ceil_div(codes.shape[0] * codes.shape[1], ROWS)
    launch(_dequantise(kind), blocks, (LANES, ROWS), codes, scale, out)


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for kind in ("int8", "int4"):
        dtype, ndim = SCALES[kind]
        signature = (
            types.Array(WORDS[kind], 3, "A"), types.Array(dtype, ndim - 1, "A"),
            c_array(types.float32, 3),
        )  # fmt: skip
        yield f"dequantise[{kind}]", make_dequantise(kind), signature
