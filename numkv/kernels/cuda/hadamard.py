"""Rotate rows by random signs and a Hadamard transform, on CUDA; see `numkv.kernels.cpu.hadamard`.

A warp rotates a row. The row is in shared memory as floats, where the stages run in place.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.launches import SHARED_BYTES, Kernel, array, launch
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.hadamard import block_length, butterfly, lower_of


def make_rotate_rows(SRC, DST):
    """Make the kernel that rotates rows of kind `SRC` into rows of kind `DST`, both float kinds."""
    COMPUTE = "float64" if "fp64" in (SRC, DST) else "float32"
    F = np.float64 if COMPUTE == "float64" else np.float32
    SHARED = getattr(types, COMPUTE)
    load, _ = codec(SRC, COMPUTE)
    _, store = codec(DST, COMPUTE)

    def kernel(x, signs, inverse, out):
        num_tokens, num_heads, dim = x.shape
        block = block_length(dim)
        scale = F(1) / F(math.sqrt(F(block)))
        values = cuda.shared.array(0, SHARED)
        lane, mine, at_once = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockDim.y
        row_at = mine * dim
        rows = num_tokens * num_heads
        # All threads have the same number of iterations, because they synchronise within.
        for first in range(
            np.int64(cuda.blockIdx.x) * at_once, rows, np.int64(cuda.gridDim.x) * at_once
        ):  # fmt: skip
            row = first + mine
            t, h = row // num_heads, row % num_heads
            here = row < rows
            if here:
                for d in range(lane, dim, LANES):
                    value = load(x[t, h, d]) * scale
                    values[row_at + d] = value if inverse else value * F(signs[d])
            stride = np.int64(1)
            while stride < block:
                cuda.syncthreads()
                if here:
                    for i in range(lane, dim // 2, LANES):
                        low = row_at + lower_of(np.int64(i), stride)
                        high = low + stride
                        values[low], values[high] = butterfly(values[low], values[high])
                stride *= np.int64(2)
            cuda.syncthreads()
            # A thread ends with the elements that it starts the next row with, so no barrier is needed.
            if here:
                for d in range(lane, dim, LANES):
                    value = values[row_at + d]
                    out[t, h, d] = store(value * F(signs[d]) if inverse else value)

    return kernel


@functools.cache
def _rotate_rows(src: str, dst: str) -> Any:
    signature = (
        array(WORDS[src], 3), array(types.float32, 1), types.boolean, array(WORDS[dst], 3)
    )  # fmt: skip
    return Kernel(make_rotate_rows, (src, dst), signature, 8)


@implements(Operations.rotate_rows)
def rotate_rows(x, x_kind, signs, inverse, out, out_kind):
    if not x.size:
        return
    row_bytes = x.shape[2] * (8 if "fp64" in (x_kind, out_kind) else 4)
    if row_bytes > SHARED_BYTES:
        raise NotSupported(
            f"`x`: expected rows of at most {SHARED_BYTES * x.shape[2] // row_bytes} elements to rotate on CUDA, as "
            f"they lie in shared memory, got {x.shape[2]}; rotate them on the CPU"
        )
    at_once = max(1, min(ROWS, SHARED_BYTES // row_bytes))
    launch(
        _rotate_rows(x_kind, out_kind), ceil_div(x.shape[0] * x.shape[1], at_once), (LANES, at_once),
        x, signs, bool(inverse), out, shared_bytes=at_once * row_bytes,
    )  # fmt: skip
