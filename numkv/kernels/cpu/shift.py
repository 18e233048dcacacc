"""Rotate stored K rows to other positions, in place, on the CPU.

Angles of RoPE add up: a key that was rotated for position p, rotated by the angle of `offset`, is the key for ``p +
offset``. So cached keys can move without their projections.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.kernels.cpu.vectors.coding import row_storer
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.codec import elements_in, row_codec
from numkv.rows.rope import pair_of, rotate_pair


def make_shift_rows(KIND, INTERLEAVED):
    """The kernel for a pool of kind `KIND`; `INTERLEAVED` defines the pairs of elements."""
    COMPUTE = "float64" if KIND == "fp64" else "float32"
    F = np.float64 if KIND == "fp64" else np.float32
    _, load_row = row_codec(KIND, COMPUTE)
    store_row = row_storer(KIND, COMPUTE)
    OF_POOL = kind(KIND)
    WHOLE_ROW, GROUP = OF_POOL.scales_per == "row", OF_POOL.group_size
    elements = elements_in(OF_POOL)

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
        dim, row_dim = 2 * half, elements(pool.shape[3])
        if WHOLE_ROW:
            dim = row_dim
        elif GROUP:  # whole groups
            dim = min(row_dim, (dim + GROUP - 1) // GROUP * GROUP)
        x, scales = np.empty(dim, F), by_row(scale)
        for h in range(pool.shape[1]):
            for n in range(len(slots)):
                place = (slots[n] // block_size, np.int64(h), slots[n] % block_size)
                words, of_row = row_of(pool, place), row_of(scales, place)
                load_row(words, of_row, x)
                for i in range(half):
                    low, high = pair_of(i, half, INTERLEAVED)
                    x[low], x[high] = rotate_pair(x[low], x[high], c[i], s[i])
                store_row(x, words, of_row)

    return kernel


@functools.cache
def _shift_rows(pool: str, interleaved: bool) -> Any:
    table = array(types.float32, 2)
    signature = (
        array(WORDS[pool], 4, out=True), array(*SCALES[pool], out=True), array(types.int64, 1),
        types.int64, table, table,
    )  # fmt: skip
    label = f"shift_rows, {pool}{', interleaved' if interleaved else ''}"
    return build(make_shift_rows, signature, args=(pool, interleaved), label=label, emit=types.none)


@implements(Operations.shift_rows)
def shift_rows(pool, kind, scale, slots, offset, cos, sin, interleaved):
    _shift_rows(kind, bool(interleaved))(pool, scale, slots, offset, cos, sin)
