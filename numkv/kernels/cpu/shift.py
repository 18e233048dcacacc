"""Rotate stored K rows to other positions, in place, on the CPU.

Angles of RoPE add up: a key that was rotated for position p becomes the one of ``p + offset`` when it is turned by the
angle of `offset`. So what is cached can move without the projections that it was made of.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.convert import codec
from numkv.rows.int4 import GROUP, load_int4, store_int4
from numkv.rows.rope import pair_of, rotate_pair
from numkv.rows.store import row_store

__all__ = ["shift_rows"]


def make_shift_rows(KIND, INTERLEAVED):
    """The kernel for a pool of kind `KIND`; `INTERLEAVED` says which elements are a pair."""
    COMPUTE = "float64" if KIND == "fp64" else "float32"
    F = np.float64 if KIND == "fp64" else np.float32
    load, _ = codec("fp32" if KIND in ("int8", "int4") else KIND, COMPUTE)
    store_row, store = row_store(KIND, COMPUTE)

    def kernel(pool, scale, slots, offset, cos, sin):
        block_size = np.int64(pool.shape[2])
        half = cos.shape[1]
        # All rows turn by the same angles.
        c, s = np.empty(half, F), np.empty(half, F)
        for i in range(half):
            c[i], s[i] = F(cos[abs(offset), i]), F(sin[abs(offset), i])
            if offset < 0:
                s[i] = -s[i]
        # Elements that are not rotated stay as they are, except where a new scale makes new codes of them.
        dim = 2 * half
        if KIND == "int8":
            dim = pool.shape[3]
        elif KIND == "int4":  # whole groups
            dim = min(2 * pool.shape[3], (dim + GROUP - 1) // GROUP * GROUP)
        x = np.empty(dim, F)
        groups = (dim + GROUP - 1) // GROUP
        for h in range(pool.shape[1]):
            for n in range(len(slots)):
                block, place = slots[n] // block_size, slots[n] % block_size
                row = row_of(pool, (block, np.int64(h), place))
                if KIND == "int4":
                    scales = row_of(scale, (block, np.int64(h), place))[:groups]
                    load_int4(row, scales, x)
                else:
                    for d in range(len(x)):
                        x[d] = load(row[d])
                if KIND == "int8":
                    old = scale[block, h, place]
                    for d in range(len(x)):
                        x[d] *= old
                for i in range(half):
                    low, high = pair_of(i, half, INTERLEAVED)
                    x[low], x[high] = rotate_pair(x[low], x[high], c[i], s[i])
                if KIND == "int4":
                    store_int4(x, row, scales)
                    continue
                new = store_row(x, row, store)
                if KIND == "int8":
                    scale[block, h, place] = new

    return kernel


@functools.cache
def _shift_rows(kind: str, interleaved: bool) -> Any:
    table = array(types.float32, 2)
    signature = (
        array(WORDS[kind], 4, out=True), array(*SCALES[kind], out=True), array(types.int64, 1),
        types.int64, table, table,
    )  # fmt: skip
    label = f"shift_rows, {kind}{', interleaved' if interleaved else ''}"
    return build(make_shift_rows, signature, args=(kind, interleaved), label=label)


@implements(Operations.shift_rows)
def shift_rows(pool, kind, scale, slots, offset, cos, sin, interleaved):
    _shift_rows(kind, bool(interleaved))(pool, scale, slots, offset, cos, sin)
