"""Look for NaN and infinity in rows that are to be quantised, on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import uploads
from numkv.kernels.cuda.launches import array, jit, launch
from numkv.kernels.cuda.simd import LANES, THREADS, ceil_div
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite

__all__ = ["first_non_finite"]

ROWS = THREADS // LANES  # rows that a block takes at once
NOWHERE = (1 << 63) - 1  # greater than any index
HIGH = 0x7F  # a byte: eight of them are greater than any index too


def make_first_non_finite(KIND):
    """The kernel for rows of a float kind."""
    load, _ = codec(KIND)

    def kernel(rows, found):
        num_tokens, num_heads, dim = rows.shape
        mine = np.int64(NOWHERE)
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS):
            t, h = row // num_heads, row % num_heads
            for d in range(cuda.threadIdx.x, dim, LANES):
                if not is_finite(load(rows[t, h, d])):
                    mine = min(mine, row * dim + d)
        if mine < NOWHERE:
            cuda.atomic.min(found, 0, mine)

    return kernel


@functools.cache
def _first_non_finite(kind: str) -> Any:
    signature = (array(WORDS[kind], 3), array(types.int64, 1))
    return jit(make_first_non_finite, (kind,), signature, 8)


@implements(Operations.first_non_finite)
def first_non_finite(rows, kind):
    if not rows.size:
        return -1
    found = uploads.filled_word(HIGH)
    blocks = ceil_div(rows.shape[0] * rows.shape[1], ROWS)
    launch(_first_non_finite(kind), blocks, (LANES, ROWS), rows, found)
    index = uploads.word_of(found)
    return index if index < NOWHERE >> 8 else -1


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for kind in ("fp64", "bf16"):
        yield f"first_non_finite[{kind}]", *_first_non_finite(kind).described
