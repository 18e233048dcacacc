"""Keys by channel: a token group's scales go to the query, so that a tile is multiplied as if it were INT8.

A score is ``sum of q * (zero + scale * (code + 1/2))``. A tile is a token group, for which each query row is multiplied
by the scales once, and what codes have nothing to do with, ``sum of q * (zero + scale / 2)``, is added to its scores.
Codes of 4 bits are looked up as odd levels, twice the code and one: then it is half of the scale, and the zero point.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.emit import I16, I32, I64, emits, for_rows, steps
from numkv.kernels.cpu.vectors.features import row_unroll
from numkv.kernels.cpu.vectors.vectors import Vectors


@functools.cache
def make_gather_channels(compute, odd_levels):
    """`gather_channels` for scratch memory of a float type; `odd_levels` says whether codes become such."""

    @emits()
    def gather_channels(b, to, to_at, scales, offsets, dim, padded_dim):
        """Put down what a tile's query rows are multiplied by, and what is added to its scores.

        From `to_at` on: 1 for each of `KV_TILE` tokens, as scales of rows; `padded_dim` factors, as many addends. Those
        of elements past `dim` are 0. The group's words are at ``scales[offsets[0]]``: `dim` scales, then zero points.
        """
        v = Vectors(b, compute)
        half = v.splat(0.5)
        first = b.load(offsets)
        with steps(b, I64(0), I64(KV_TILE), v.lanes) as (t, _):
            v.store(v.splat(1.0), to, b.add(to_at, t))
        factors_at = b.add(to_at, I64(KV_TILE))
        with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
            mask = v.lanes_below(b.sub(dim, d))
            words = b.gep(scales, [b.add(first, d)])
            scale, zero = (
                _floats(v, v.masked_load(x, ir.VectorType(I16, v.lanes), 2, mask))
                for x in (words, b.gep(words, [dim]))
            )
            step = b.fmul(scale, half)
            v.store(step if odd_levels else scale, to, b.add(factors_at, d))
            addend = zero if odd_levels else b.fadd(zero, step)
            v.store(addend, to, b.add(b.add(factors_at, padded_dim), d))

    return gather_channels


def _floats(v, words):
    """bfloat16 words as floats of the vectors' type."""
    wide = ir.VectorType(I32, v.lanes)
    bits = v.b.shl(v.b.zext(words, wide), ir.Constant(wide, [I32(16)] * v.lanes))
    floats = v.b.bitcast(bits, ir.VectorType(ir.FloatType(), v.lanes))
    return v.b.fpext(floats, v.type) if v.double else floats


@functools.cache
def make_scale_query(compute):
    """`scale_query` for a float type."""

    @emits(types.float64 if compute == "float64" else types.float32)
    def scale_query(b, data, q_at, factors_at, to_at, padded_dim):
        """Multiply a query row by what `gather_channels` has put at `factors_at`; return its product with the addends.

        All are floats of `data`; the row goes to `to_at`.
        """
        v = Vectors(b, compute)
        total = cgutils.alloca_once_value(b, v.splat(0.0))
        addends_at = b.add(factors_at, padded_dim)
        with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
            q, factor, addend = (
                v.load_floats(data, b.add(at, d)) for at in (q_at, factors_at, addends_at)
            )
            v.store(b.fmul(q, factor), data, b.add(to_at, d))
            b.store(v.fma(q, addend, b.load(total)), total)
        return v.fold(b.load(total), b.fadd)

    return scale_query


@functools.cache
def make_add_to_scores(compute):
    """`add_to_scores` for a float type."""

    @emits()
    def add_to_scores(b, rows, data, scores_at, addends_at, count):
        """Add to the scores of `count` tokens and `rows` query rows a number of each row, from `addends_at` on.

        `count` is rounded up to whole vectors.
        """

        def emit(rows):
            v = Vectors(b, compute)
            addends = v.repeated(data, addends_at, rows)
            with steps(b, I64(0), b.mul(count, I64(rows)), v.lanes) as (i, _):
                at = b.add(scores_at, i)
                v.store(b.fadd(v.load_floats(data, at), addends), data, at)

        for_rows(b, rows, emit, row_unroll(compute))

    return add_to_scores
