"""Scores of many query rows in bf16 over K rows in bf16: products of pairs, which take half the time of float32's.

Both are as they came, so the products are exact, and the softmax scale is left for the scores. A lane, or a number that
is repeated in all lanes, is two neighbouring elements of a row::

    K row t        k[t, 0] k[t, 1] | k[t, 2] k[t, 3] | ...                           as stored
    panel, unit i  q[0, 2i] q[0, 2i + 1] | q[1, 2i] q[1, 2i + 1] | ... of all rows

Denormal numbers (below 1.2e-38) count as 0, and sums have to be numbers of float32 before they get the scale.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numkv.kernels.cpu.attention.llvm.many_qk import ProductsOfPanels
from numkv.kernels.cpu.attention.records import PANEL
from numkv.kernels.cpu.vectors.emit import I16, I32, I64, steps, unpack
from numkv.kernels.cpu.vectors.vectors import Vectors

__all__ = ["copy_rows", "make_many_qk_of_pairs", "pair_units"]


@intrinsic
def pair_units(typing_context, f, at, units):
    """Make a panel of bf16 pairs of one of floats, in place: unit i, `PANEL` lanes, is made of units 2i and 2i + 1.

    The floats are those of `transpose_queries`, and have no more bits than bf16 has; the lower ones are dropped.
    `units` is even.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data, at, units = unpack(context, b, sig.args, args)
        v = Vectors(b, "float32")
        with steps(b, I64(0), units, 2) as (i, _), steps(b, I64(0), I64(PANEL), v.lanes) as (r, _):
            from_at = b.add(b.add(at, b.mul(i, I64(PANEL))), r)
            first, second = (
                b.bitcast(v.load_floats(data, b.add(from_at, I64(PANEL * n))), v.int_type)
                for n in (0, 1)
            )
            low = b.lshr(first, v.splat_int(16))
            high = b.and_(second, v.splat_int(-0x10000))
            to = b.add(b.add(at, b.mul(b.ashr(i, I64(1)), I64(PANEL))), r)
            v.store(b.bitcast(b.or_(low, high), v.type), data, to)
        return context.get_dummy_value()

    return types.void(f, i8, i8), codegen


@intrinsic
def copy_rows(typing_context, f, to_at, step, rows, end):
    """Put rows ``[0, end)`` of a tile in bf16 side by side, two elements to a float, with zeros up to a whole vector.

    Row t goes to ``to_at + t * step``.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data, to_at, step, rows, end = unpack(context, b, sig.args, args)
        v = Vectors(b, "float32")
        lanes = 2 * v.lanes
        words = ir.VectorType(I16, lanes)
        whole = b.and_(rows.dim, I64(-lanes))
        rest = b.sub(rows.dim, whole)

        def put(row_at, d, to_row, mask=None):
            pointer = v.pointer(rows.words, b.add(row_at, d), I16)
            if mask is None:
                value = b.load(b.bitcast(pointer, words.as_pointer()), align=2)
            else:
                value = v.masked_load(pointer, words, 2, mask)
            v.store(b.bitcast(value, v.type), data, b.add(to_row, b.ashr(d, I64(1))))

        with steps(b, I64(0), end, 1) as (t, _):
            row_at = b.load(b.gep(rows.offsets, [t]))
            to_row = b.add(to_at, b.mul(t, step))
            with steps(b, I64(0), whole, lanes) as (d, _):
                put(row_at, d, to_row)
            with b.if_then(b.icmp_signed(">", rest, I64(0))):
                put(row_at, whole, to_row, v.lanes_below(rest, lanes=lanes))
        return context.get_dummy_value()

    return types.void(f, i8, i8, rows, i8), codegen


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

    @intrinsic
    def many_qk_of_pairs(
        typing_context, f, q_at, count, keys_at, step, size, tokens, s_at, asking, extents, factor
    ):
        """`many_qk` of panels of `pair_units` and of rows of `copy_rows`, `size` pairs each, times a factor."""
        i8 = types.int64

        def codegen(context, b, sig, args):
            data, q_at, count, *others, factor = unpack(context, b, sig.args, args)
            _Pairs(b, kind, factor, data, q_at, *others).emit(count)
            return context.get_dummy_value()

        return types.void(f, i8, i8, i8, i8, i8, i8, i8, i8, extents, types.float32), codegen

    return many_qk_of_pairs
