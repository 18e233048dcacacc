"""Dequantise rows to floats, on CUDA, for `numkv.targets.cuda.CudaTarget.dequantise`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.launches import Kernel, array, launch
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div
from numkv.kinds import kind
from numkv.rows.codec import element_codec


def make_dequantise(KIND):
    """Make the kernel that turns stored rows of a kind with scales into float32."""
    value, _ = element_codec(KIND)
    HEAD, ROW = (kind(KIND).scales_per == per for per in ("head", "row"))

    def kernel(codes, scale, out):
        num_heads, num_tokens, dim = out.shape
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_heads * num_tokens, np.int64(cuda.gridDim.x) * ROWS):
            h, t = row // num_tokens, row % num_tokens
            words = codes[h, t]
            if HEAD:  # one of the axes is 1
                g = t % np.int64(scale.shape[1])
                scales = scale[h % np.int64(scale.shape[0]), g : g + 1]
            elif ROW:
                scales = scale[h, t : t + 1]
            else:
                scales = scale[h, t]
            for d in range(cuda.threadIdx.x, dim, LANES):
                out[h, t, d] = value(words, scales, d, dim)

    return kernel


@functools.cache
def _dequantise(name: str) -> Any:
    dtype, ndim = SCALES[name]
    signature = (array(WORDS[name], 3), array(dtype, max(2, ndim - 1)), array(types.float32, 3))
    return Kernel(make_dequantise, (name,), signature, 8)


def dequantise(codes, kind, scale, out):
    """Dequantise stored rows.

    Parameters
    ----------
    codes : array (num_heads, num_tokens, words)
        Rows of one block, in the words of `kind`.
    kind : str
        Storage kind of the rows, one with scales.
    scale : array (num_heads, num_tokens) or (num_heads, num_tokens, groups)
        Scales of the rows, or of their groups, in words. Kinds with scales of heads have one axis of length 1.
    out : float32 array (num_heads, num_tokens, head_dim)
        Receives the values.
    """
    blocks = ceil_div(codes.shape[0] * codes.shape[1], ROWS)
    launch(_dequantise(kind), blocks, (LANES, ROWS), codes, scale, out)
