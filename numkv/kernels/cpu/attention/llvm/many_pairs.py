"""Scores of many query rows in bf16 over K rows in bf16: products of pairs, which take half the time of float32's.

A lane, or a number that is repeated in all lanes, is two neighbouring elements of a row::

    K row t        k[t, 0] k[t, 1] | k[t, 2] k[t, 3] | ...                           as stored
    panel, unit i  q[0, 2i] q[0, 2i + 1] | q[1, 2i] q[1, 2i + 1] | ... of all rows
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types

from numkv.kernels.cpu.attention.llvm.many_qk import ProductsOfPanels
from numkv.kernels.cpu.vectors.emit import I32, emits


class _Pairs(ProductsOfPanels):
    """Emits `many_qk_of_pairs`."""

    elements = 2

    def __init__(self, b, kind, factor, *rest):
        super().__init__(b, kind, *rest)
        self.factor = self.v.splat(factor)

    def numbers(self, vector):
        return self.b.bitcast(vector, ir.VectorType(I32, self.v.lanes))

    def add(self, total, q, k):
        return self.v.add_bf16_pairs(total, q, k)

    def score(self, total):
        return self.b.fmul(total, self.factor)


@functools.cache
def make_many_qk_of_pairs(kind):
    """`many_qk_of_pairs`; `kind` is that of the rows that are prefetched."""

    @emits(factor=types.float32)
    def many_qk_of_pairs(
        b, f, q_at, count, keys_at, step, size, tokens, s_at, asking, extents, factor
    ):
        """`many_qk` of panels of `pair_row` and of rows of `copy_rows`, `size` pairs each, times a factor."""
        panels = _Pairs(
            b, kind, factor, f, q_at, keys_at, step, size, tokens, s_at, asking, extents
        )
        panels.emit(count)

    return many_qk_of_pairs
