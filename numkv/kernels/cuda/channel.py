"""Quantise token groups by channel, on CUDA: a thread block has a group of a head, a thread some of its channels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.launches import (
    INDICES,
    THREADS,
    Kernel,
    array,
    launch,
    number_at,
    pool_types,
)
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.channel import TOKENS, channel_storer, put_widest
from numkv.rows.convert import codec


def make_quantise_groups(SRC, DST):
    """Make the kernel that quantises rows of kind `SRC` to codes of kind `DST`."""
    load, _ = codec(SRC)
    EACH, FINE = kind(DST).unit[0], kind(DST).fine_channels
    store, store_fine = channel_storer(8 // EACH, load)

    def kernel(rows, groups, pool, scale, to_groups):
        heads, dim = rows.shape[1], rows.shape[3]
        each, to_each = rows.shape[2] // TOKENS, pool.shape[2] // TOKENS
        for item in range(
            np.int64(cuda.blockIdx.x), groups.shape[0] * heads, np.int64(cuda.gridDim.x)
        ):
            i, h = item // heads, item % heads
            a, b = number_at(groups, i), number_at(to_groups, i)
            if a < 0 or a >= rows.shape[0] * each or b < 0 or b >= pool.shape[0] * to_each:
                continue
            at, to = a % each * TOKENS, b % to_each
            source = rows[a // each, h, at : at + TOKENS]
            codes = pool[b // to_each, h, to * TOKENS : (to + 1) * TOKENS]
            scales = scale[b // to_each, h, to]
            for d in range(EACH * cuda.threadIdx.x, dim, EACH * THREADS):
                store(source, codes, scales, d)
            if FINE:
                cuda.syncthreads()
                if cuda.threadIdx.x == 0:
                    put_widest(scales, dim)
                cuda.syncthreads()
                for f in range(EACH * cuda.threadIdx.x, FINE, EACH * THREADS):
                    store_fine(source, codes, scales, f)

    return kernel


@functools.cache
def _quantise_groups(src: str, dst: str) -> Any:
    signature = (array(WORDS[src], 4), INDICES, *pool_types(dst), INDICES)
    return Kernel(make_quantise_groups, (src, dst), signature, 8)


@implements(Operations.quantise_groups)
def quantise_groups(rows, rows_kind, groups, pool, pool_kind, scale, to_groups):
    blocks = groups.shape[0] * rows.shape[1]
    if blocks:
        launch(
            _quantise_groups(rows_kind, pool_kind), blocks, THREADS, rows, groups, pool, scale, to_groups
        )  # fmt: skip
