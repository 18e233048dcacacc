"""Rotate rows by random signs and a Hadamard transform before they are quantised, or rotate them back, on the CPU.

With S the diagonal matrix of the signs and H the normalised transform of `numkv.rows.hadamard` (a row x is a column)::

    forward  y = H S x          inverse  x = S H y

A rotation of both rows does not change their inner product, so scores of rotated q and k are those of q and k.
Attention over rotated v returns the rotated output. A NaN or an infinity spreads over its whole block.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import WORDS, array, build
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.hadamard import block_length, butterflies


def make_rotate_rows(SRC, DST):
    """Make the kernel that takes rows of kind `SRC` and gives rows of kind `DST`, both float kinds."""
    COMPUTE = "float64" if "fp64" in (SRC, DST) else "float32"
    F = np.float64 if COMPUTE == "float64" else np.float32
    load, _ = codec(SRC, COMPUTE)
    _, store = codec(DST, COMPUTE)

    def kernel(x, signs, inverse, out):
        dim = np.int64(x.shape[2])
        block = block_length(dim)
        half, num_blocks = dim // 2, dim // block
        # Signs come first on the way forward and last on the way back. The scale is always first: nothing overflows
        # that fits in the end.
        before, after = np.empty(dim, F), np.empty(dim, F)
        for d in range(dim):
            sign = F(signs[d])
            before[d] = (F(1) if inverse else sign) / np.sqrt(F(block))
            after[d] = sign if inverse else F(1)
        # Stages go from a to b and back, two at a time.
        a, b = np.empty(dim, F), np.empty(dim, F)
        a_low, a_high, b_low, b_high = a[:half], a[half:], b[:half], b[half:]
        two_stages, length = 0, 1
        while length * 4 <= block:
            two_stages, length = two_stages + 1, length * 4
        one_more = length < block
        last = b if one_more else a
        for t in range(x.shape[0]):
            for h in range(x.shape[1]):
                source = row_of(x, (np.int64(t), np.int64(h)))
                target = row_of(out, (np.int64(t), np.int64(h)))
                for d in range(dim):
                    a[d] = load(source[d]) * before[d]
                for _ in range(two_stages):
                    butterflies(a, b_low, b_high)
                    butterflies(b, a_low, a_high)
                if one_more:
                    butterflies(a, b_low, b_high)
                if num_blocks == 1:
                    for d in range(dim):
                        target[d] = store(last[d] * after[d])
                else:  # see rows.hadamard for the order
                    for c in range(num_blocks):
                        part, mine = slice(c * block, (c + 1) * block), last[c:]
                        to, factor = target[part], after[part]
                        for i in range(block):
                            to[i] = store(mine[i * num_blocks] * factor[i])

    return kernel


@functools.cache
def _rotate_rows(src: str, dst: str) -> Any:
    signature = (
        array(WORDS[src], 3), array(types.float32, 1), types.boolean,
        array(WORDS[dst], 3, out=True),
    )  # fmt: skip
    return build(make_rotate_rows, signature, args=(src, dst), label=f"rotate_rows, {src} to {dst}")


@implements(Operations.rotate_rows)
def rotate_rows(x, x_kind, signs, inverse, out, out_kind):
    if x.size:
        _rotate_rows(x_kind, out_kind)(x, signs, bool(inverse), out)
