"""Quantised rows to floats, on CUDA: what `numkv.targets_cuda.CudaTarget.dequantise` needs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.cuda.simd import LANES, THREADS, c_array, ceil_div, jit, launch

__all__ = ["dequantise"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_dequantise():
    """The kernel that turns INT8 codes into float32."""

    def kernel(codes, scale, out):
        num_heads, num_tokens, dim = codes.shape
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_heads * num_tokens, np.int64(cuda.gridDim.x) * ROWS):
            h, t = row // num_tokens, row % num_tokens
            factor = scale[h, t]
            for d in range(cuda.threadIdx.x, dim, LANES):
                out[h, t, d] = np.float32(codes[h, t, d]) * factor

    return kernel


@functools.cache
def _dequantise() -> Any:
    return jit(make_dequantise(), 8)


def dequantise(codes, scale, out):
    """Turn codes into values.

    Parameters
    ----------
    codes : int8 array (num_heads, num_tokens, head_dim)
        Codes.
    scale : float32 array (num_heads, num_tokens)
        Their rows' scales.
    out : float32 array (num_heads, num_tokens, head_dim)
        Takes the values.
    """
    blocks = ceil_div(codes.shape[0] * codes.shape[1], ROWS)
    launch(_dequantise(), blocks, (LANES, ROWS), codes, scale, out)


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    signature = (
        types.Array(types.int8, 3, "A"), types.Array(types.float32, 2, "A"),
        c_array(types.float32, 3),
    )  # fmt: skip
    yield "dequantise[int8]", make_dequantise(), signature
