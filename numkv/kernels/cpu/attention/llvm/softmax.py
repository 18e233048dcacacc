"""The soft cap and the online softmax over a tile: Milakov and Gimelshein (arXiv:1805.02867), algorithm 3."""

from __future__ import annotations

import functools
import math

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.attention.records import TILE_UNIT
from numkv.kernels.cpu.vectors.emit import I32, I64, emits, for_rows, steps, unpack
from numkv.kernels.cpu.vectors.features import row_unroll
from numkv.kernels.cpu.vectors.vectors import Vectors, exp2, tanh


def whole_units(b, tokens):
    """Round a number of tokens up to whole units."""
    return b.and_(b.add(tokens, I64(TILE_UNIT - 1)), I64(-TILE_UNIT))


@functools.cache
def make_soft_cap(compute):
    """`soft_cap` for a float type."""

    @emits(cap=getattr(types, compute))
    def soft_cap(b, rows, tokens, s, s_at, cap):
        """Bound the scores of some rows and tokens, up to whole units: ``s = cap * tanh(s / cap) * log2(e)``."""
        v = Vectors(b, compute)
        cap = v.splat(cap)
        factor = b.fmul(cap, v.splat(math.log2(math.e)))
        with steps(b, I64(0), b.mul(rows, whole_units(b, tokens)), v.lanes) as (i, _):
            at = b.add(s_at, i)
            score = b.fdiv(v.load_floats(s, at), cap)
            v.store(b.fmul(tanh(v, score), factor), s, at)

    return soft_cap


@functools.cache
def make_online_softmax_step(compute):
    """`online_softmax_step` for a float type."""

    @emits()
    def online_softmax_step(b, rows, count, s, s_at, begin, end, state):
        """Turn the scores of some rows and a tile into probabilities relative to the running maxima.

        For scores s (tokens, rows) in base 2, where tokens outside ``[begin, end)`` count as -inf::

            new = maximum(maxima, s.max(0));  s = exp2(s - new)
            rescale = exp2(maxima - new);  sums = sums * rescale + s.sum(0);  maxima = new

        Scores are at ``s_at + t * rows + r``. Those outside ``[begin, end)`` may be anything, and become 0 up to
        whole units. Maxima and sums, in the same array, are updated for the first `count` rows. `rescale` goes to
        ``state.rescale_at``, up to a whole vector. A row that has seen no token keeps its maximum of -inf.
        """
        v = Vectors(b, compute)
        tokens = whole_units(b, end)
        size = b.mul(rows, tokens)
        partial = b.or_(b.icmp_signed(">", begin, I64(0)), b.icmp_signed("<", end, tokens))
        with b.if_then(partial, likely=False), steps(b, I64(0), size, v.lanes) as (i, _):
            at = b.add(s_at, i)
            below = v.lanes_below(b.sub(b.mul(end, rows), i))
            seen = b.and_(below, b.not_(v.lanes_below(b.sub(b.mul(begin, rows), i))))
            v.store(b.select(seen, v.load_floats(s, at), v.splat(-math.inf)), s, at)

        old, before = (cgutils.alloca_once(b, v.type) for _ in range(2))

        def load_rows(rows):
            b.store(v.repeated(s, state.maxima_at, rows), old)
            b.store(v.repeated(s, state.sums_at, rows), before)

        for_rows(b, rows, load_rows, row_unroll(compute))
        old = b.load(old)
        # Several chains of vectors, as each vector waits for its predecessor.
        chains = range(4)

        def pieces(i):
            """Return the next vector of each chain, and where it is."""
            for j in chains:
                at = b.add(b.add(s_at, i), I64(j * v.lanes))
                yield v.load_floats(s, at), at

        def merged(slots, combine):
            a, b_, c, d = (b.load(slot) for slot in slots)
            return v.fold_by_row(combine(combine(a, b_), combine(c, d)), rows, combine)

        peaks = [cgutils.alloca_once_value(b, v.splat(-math.inf)) for _ in chains]
        with steps(b, I64(0), size, len(chains) * v.lanes) as (i, _):
            for (score, _), slot in zip(pieces(i), peaks, strict=True):
                b.store(v.larger(score, b.load(slot)), slot)
        new = v.larger(merged(peaks, v.larger), old)
        # Where no token has been seen, subtracting 0 avoids inf - inf.
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        base = b.select(nothing, v.splat(0.0), new)
        totals = [cgutils.alloca_once_value(b, v.splat(0.0)) for _ in chains]
        with steps(b, I64(0), size, len(chains) * v.lanes) as (i, _):
            for (score, at), slot in zip(pieces(i), totals, strict=True):
                p = exp2(v, b.fsub(score, base))
                v.store(p, s, at)
                b.store(b.fadd(b.load(slot), p), slot)
        rescale = exp2(v, b.fsub(old, base))
        total = v.fma(b.load(before), rescale, merged(totals, b.fadd))
        there = v.lanes_below(count)
        v.store_masked(new, s, state.maxima_at, there)
        v.store_masked(total, s, state.sums_at, there)
        v.store(rescale, s, state.rescale_at)

    return online_softmax_step


@intrinsic
def online_softmax_row(typing_context, s, s_at, begin, end, maximum):
    """`online_softmax_step` for one row of float32, whose scores are adjacent.

    Scores outside ``[begin, end)`` of a unit become 0. Returns the new maximum, the factor that rescales earlier
    sums, and the sum of the probabilities.
    """
    signature = types.UniTuple(types.float32, 3)(
        s, types.int64, types.int64, types.int64, types.float32
    )

    def codegen(context, b, sig, args):
        data, s_at, begin, end, old = unpack(context, b, sig.args, args)
        v = Vectors(b, "float32")
        infinity = v.splat(-math.inf)
        starts = range(0, TILE_UNIT, v.lanes)
        tiles = []
        for i in starts:
            seen = b.and_(v.lanes_below(end, i), b.not_(v.lanes_below(begin, i)))
            score = v.load_floats(data, b.add(s_at, I64(i)))
            tiles.append((seen, b.select(seen, score, infinity)))
        peak = v.splat(old)
        for _, score in tiles:
            peak = v.larger(score, peak)
        new = v.fold(peak, v.larger)
        nothing = b.fcmp_ordered("==", new, v.float(-math.inf))
        base = v.splat(b.select(nothing, v.float(0.0), new))
        total = v.splat(0.0)
        for i, (seen, score) in zip(starts, tiles, strict=True):
            p = b.select(seen, exp2(v, b.fsub(score, base)), v.splat(0.0))
            v.store(p, data, b.add(s_at, I64(i)))
            total = b.fadd(total, p)
        rescale = b.extract_element(exp2(v, b.fsub(v.splat(old), base)), I32(0))
        results = [new, rescale, v.fold(total, b.fadd)]
        return context.make_tuple(b, sig.return_type, results)

    return signature, codegen
