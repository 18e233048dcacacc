"""Look for NaN and infinity in rows that are to be quantised, on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import uploads
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import THREADS, array, jit, launch
from numkv.kernels.cuda.octets import bytes_of, lanes_for, octet_loader, octets_fit
from numkv.kernels.cuda.simd import LANES, ceil_div, natural
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite

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


def make_first_non_finite_octets(KIND):
    """The kernel of `make_first_non_finite` for rows that are aligned: an octet a thread at once."""
    COMPUTE = "float64" if KIND == "fp64" else "float32"
    load, SIZE = octet_loader(KIND, COMPUTE), bytes_of(KIND)
    REAL = np.float64 if KIND == "fp64" else np.float32

    def kernel(rows, found, log):
        num_tokens, num_heads, dim = rows.shape[0], natural(rows.shape[1]), natural(rows.shape[2])
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        lane, first = thread & (lanes - 1), np.int64(cuda.blockIdx.x) * at_once + (thread >> log)
        x, mine = cuda.local.array(8, REAL), np.int64(NOWHERE)
        for item in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * at_once):
            row = natural(item)
            t = row // num_heads
            source = (
                global_address(rows) + t * rows.strides[0] + (row - t * num_heads) * rows.strides[1]
            )
            for octet in range(lane, dim >> 3, lanes):
                load(source + octet * SIZE, x, 0)
                for i in range(8):
                    if not is_finite(x[i]):
                        mine = min(mine, row * dim + octet * 8 + i)
        if mine < NOWHERE:
            cuda.atomic.min(found, 0, mine)

    return kernel


@functools.cache
def _first_non_finite(kind: str, octets: bool = False) -> Any:
    signature = (array(WORDS[kind], 3), array(types.int64, 1))
    if octets:
        return jit(make_first_non_finite_octets, (kind,), (*signature, types.int64), 8)
    return jit(make_first_non_finite, (kind,), signature, 8)


@implements(Operations.first_non_finite)
def first_non_finite(rows, kind):
    if not rows.size:
        return -1
    found = uploads.filled_word(HIGH)
    if octets_fit(rows, kind, rows.shape[2]):
        lanes = lanes_for(rows.shape[2] // 8)
        blocks = ceil_div(rows.shape[0] * rows.shape[1], THREADS >> lanes)
        launch(_first_non_finite(kind, True), blocks, THREADS, rows, found, lanes)
    else:
        blocks = ceil_div(rows.shape[0] * rows.shape[1], ROWS)
        launch(_first_non_finite(kind), blocks, (LANES, ROWS), rows, found)
    index = uploads.word_of(found)
    return index if index < NOWHERE >> 8 else -1


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for kind in ("fp64", "bf16"):
        yield f"first_non_finite[{kind}]", *_first_non_finite(kind).described
    yield f"first_non_finite[{kind}, octets]", *_first_non_finite(kind, True).described
