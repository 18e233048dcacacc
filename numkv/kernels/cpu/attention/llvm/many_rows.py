"""Many query rows: scores, the online softmax and weighted sums, with a tile's K and V widened once for all.

Products are of blocks in registers. A lane is a query row, or a column of V in the sums, so no sum crosses lanes. Where
all is bf16, products of pairs are 2x faster than float32. A lane, or a number that is repeated in all lanes, is then
two neighbouring elements of a row::

    K row t        k[t, 0] k[t, 1] | k[t, 2] k[t, 3] | ...                           as stored
    panel, unit i  q[0, 2i] q[0, 2i + 1] | q[1, 2i] q[1, 2i + 1] | ... of all rows
"""

from __future__ import annotations

import functools
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.offsets import EXTENTS
from numkv.kernels.cpu.attention.records import PANEL
from numkv.kernels.cpu.vectors.emit import I32, I64, emits, steps
from numkv.kernels.cpu.vectors.features import SCORE_ROWS, SCORE_VECTORS, SUM_ROWS, SUM_VECTORS
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.vectors import Vectors, exp2, tanh

#: What `many_qk` prefetches, as bits: K rows, V rows.
ASK_K, ASK_V = 1, 2
# Elements of a row that are multiplied in one turn of the innermost loop.
_UNROLL = 4


@emits()
def transpose_queries(b, f, q_at, q_step, count, units, to_at):
    """Transpose up to a panel of query rows of `units` numbers: ``to[i, r] = q[min(r, count - 1), i]``.

    Row r is at ``q_at + r * q_step``; a row of the result, in the same array from `to_at` on, has `PANEL` floats.
    `units` is a multiple of the lanes of a vector.
    """
    v = Vectors(b, "float32")
    last = b.sub(count, I64(1))
    with steps(b, I64(0), I64(PANEL), v.lanes) as (r0, _):
        places = []
        for i in range(v.lanes):
            r = b.add(r0, I64(i))
            r = b.select(b.icmp_signed("<", r, last), r, last)
            places.append(b.add(q_at, b.mul(r, q_step)))
        with steps(b, I64(0), units, v.lanes) as (i, _):
            rows = [v.load_floats(f, b.add(at, i)) for at in places]
            for j, column in enumerate(v.transposed(rows)):
                unit = b.mul(b.add(i, I64(j)), I64(PANEL))
                v.store(column, f, b.add(b.add(to_at, unit), r0))


@functools.cache
def make_widen_rows(kind):
    """`widen_rows` for a storage kind of floats."""

    @emits(types.boolean)
    def widen_rows(b, f, to_at, step, rows, begin, end):
        """Write rows ``[begin, end)`` of a tile as float32, and return whether all of them are finite.

        Row t goes to ``to_at + t * step``, with zeros up to a whole vector.
        """
        return _Widening(b, kind, f, to_at, step, rows, begin, end).emit()

    return widen_rows


class _Widening:
    """Emits `widen_rows`."""

    def __init__(self, b, kind, data, to_at, step, rows, begin, end):
        self.b, self.v, self.kind, self.data = b, Vectors(b, "float32"), kind, data
        self.to_at, self.step, self.rows, self.begin, self.end = to_at, step, rows, begin, end
        self.largest = cgutils.alloca_once_value(b, self.v.splat_int(0))

    def emit(self):
        """Emit the code."""
        b, v, dim = self.b, self.v, self.rows.dim
        whole = b.and_(dim, I64(-v.lanes))
        rest = b.sub(dim, whole)
        with steps(b, self.begin, self.end, 1) as (t, _):
            row_at = b.load(b.gep(self.rows.offsets, [t]))
            to_row = b.add(self.to_at, b.mul(t, self.step))
            with steps(b, I64(0), whole, v.lanes) as (d, _):
                self.put(row_at, d, to_row)
            with b.if_then(b.icmp_signed(">", rest, I64(0))):
                self.put(row_at, whole, to_row, v.lanes_below(rest))
        largest = v.fold(b.load(self.largest), self.larger)
        return b.icmp_signed("<", largest, I32(0x7F800000))

    def larger(self, x, y):
        """Return the larger integer of each lane."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def put(self, row_at, d, to_row, mask=None):
        """Write a vector of columns; update the largest magnitudes as bits, whose order is the same."""
        b, v = self.b, self.v
        value = v.load(self.kind, self.rows.words, b.add(row_at, d), mask)
        v.store(value, self.data, b.add(to_row, d))
        bits = b.and_(b.bitcast(value, v.int_type), v.splat_int(0x7FFFFFFF))
        b.store(self.larger(bits, b.load(self.largest)), self.largest)


@functools.cache
def make_many_qk(kind):
    """`many_qk`; `kind` is that of the rows that are prefetched."""

    @emits()
    def many_qk(b, f, q_at, count, keys_at, step, size, tokens, s_at, asking, extents):
        """Scores of a panel of query rows: ``s[t, r] = sum over d of q[d, r] * k[t, d]`` for t in ``[0, tokens)``.

        Query rows are those of `transpose_queries`, in as many vectors as `count` rows need. K row t is at ``keys_at +
        t * step``, as `widen_rows` writes it. Both have `size` numbers, a multiple of the lanes of a vector. `tokens`
        is a multiple of `SCORE_ROWS`. A row of scores has `PANEL` floats. All floats are in one array. A score does not
        depend on the other rows of its panel.

        A vector has query rows, and a number of a K row is repeated in all lanes, so no sum crosses lanes. Sums of a
        few tokens stay in registers while their rows are read::

            s[t, 0:16]  += q[d, 0:16]  * k[t, d]
            s[t, 16:32] += q[d, 16:32] * k[t, d]         for some tokens

        Meanwhile the next tile's rows are prefetched. If `asking` has `ASK_K`, that is the memory in `extents`; if it
        has `ASK_V`, that in the extents after these.
        """
        ProductsOfPanels(b, kind, f, q_at, keys_at, step, size, tokens, s_at, asking, extents).emit(
            count
        )

    return many_qk


class ProductsOfPanels:
    """Emits `many_qk`; subclasses define the products."""

    #: Elements of a row in one number of a panel.
    elements = 1

    def __init__(self, b, kind, data, q_at, keys_at, step, size, tokens, s_at, asking, extents):
        self.b, self.v, self.data = b, Vectors(b, "float32"), data
        self.q_at, self.keys_at, self.step, self.size = q_at, keys_at, step, size
        self.tokens, self.s_at = tokens, s_at
        streams = (ASK_K, extents), (ASK_V, b.gep(extents, [I64(EXTENTS)]))
        self.streams = [
            (b.icmp_signed("!=", b.and_(asking, I64(bit)), I64(0)), PrefetchStream(b, kind, at, 2))
            for bit, at in streams
        ]

    def emit(self, count, vectors=1):
        """The code for `count` query rows, which fill `vectors` vectors or more."""
        if vectors == SCORE_VECTORS:
            self.emit_for(vectors)
            return
        enough = self.b.icmp_signed("<=", count, I64(vectors * self.v.lanes))
        with self.b.if_else(enough) as (of_these, of_more):
            with of_these:
                self.emit_for(vectors)
            with of_more:
                self.emit(count, vectors + 1)

    def emit_for(self, vectors):
        """The code for so many vectors of query rows."""
        b, v = self.b, self.v
        sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in range(SCORE_ROWS)]
        with steps(b, I64(0), self.tokens, SCORE_ROWS) as (t0, _):
            for slot in (x for slots in sums for x in slots):
                b.store(v.splat(0.0), slot)
            rows = [
                b.add(self.keys_at, b.mul(b.add(t0, I64(t)), self.step)) for t in range(SCORE_ROWS)
            ]
            with steps(b, I64(0), self.size, _UNROLL) as (d0, _):
                turn = b.ashr(d0, I64(_UNROLL.bit_length() - 1))
                for asked, stream in self.streams:
                    with b.if_then(asked):
                        stream.issue(SCORE_ROWS * _UNROLL * self.elements, turn)
                for i in range(_UNROLL):
                    d = b.add(d0, I64(i))
                    at = b.add(self.q_at, b.mul(d, I64(PANEL)))
                    q = [
                        self.numbers(v.load_floats(self.data, b.add(at, I64(j * v.lanes))))
                        for j in range(vectors)
                    ]
                    for row, slots in zip(rows, sums, strict=True):
                        k = self.numbers(v.splat(v.load_one(self.data, b.add(row, d))))
                        for slot, lanes in zip(slots, q, strict=True):
                            b.store(self.add(b.load(slot), lanes, k), slot)
            for t, slots in enumerate(sums):
                at = b.add(self.s_at, b.mul(b.add(t0, I64(t)), I64(PANEL)))
                for j, slot in enumerate(slots):
                    score = self.score(b.load(slot))
                    v.store(score, self.data, b.add(at, I64(j * v.lanes)))

    def numbers(self, vector):
        """Return the factor in a vector of a panel, or in a row's number in all lanes."""
        return vector

    def add(self, total, q, k):
        """A sum and one more product."""
        return self.v.fma(q, k, total)

    def score(self, total):
        """Return the score of a sum."""
        return total


class _PairsOfPanels(ProductsOfPanels):
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
        panels = _PairsOfPanels(
            b, kind, factor, f, q_at, keys_at, step, size, tokens, s_at, asking, extents
        )
        panels.emit(count)

    return many_qk_of_pairs


# Tokens that are computed at once; one by one, each would wait for the one before.
_AT_ONCE = 4


@emits(soft_cap=types.float32)
def many_softmax(b, f, s_at, count, tokens, soft_cap, partly, bounds_at, state):
    """Turn scores of a panel of query rows into probabilities relative to the running maxima.

    As `online_softmax_step`, for `tokens` tokens (a multiple of four) and `count` rows. Score s[t, r] is at ``s_at + t
    * PANEL + r``, and is capped first if `soft_cap` is above 0. If `partly` is not 0, row r sees tokens from
    ``f[bounds_at + r]`` on that are below ``f[bounds_at + PANEL + r]``; else all. Maxima and sums are updated. The
    factors that rescale earlier sums go to ``f[state.rescale_at:]``, up to a whole vector.
    """
    emitter = _PanelSoftmax(b, f, s_at, count, tokens, soft_cap, partly, bounds_at, state)
    with steps(b, I64(0), emitter.count, emitter.v.lanes) as (row, _):
        emitter.emit(row)


class _PanelSoftmax:
    """Emits `many_softmax`."""

    def __init__(self, b, data, s_at, count, tokens, soft_cap, partly, bounds_at, state):
        self.b, self.v, self.data, self.s_at = b, Vectors(b, "float32"), data, s_at
        self.count, self.tokens, self.soft_cap, self.partly = count, tokens, soft_cap, partly
        self.bounds_at, self.state = bounds_at, state

    def emit(self, row):
        """The code for the rows of a vector, from `row` on."""
        b, v, state = self.b, self.v, self.state
        first = b.add(self.s_at, row)

        def at_token(t, i=0):
            return b.add(first, b.mul(b.add(t, I64(i)), I64(PANEL)))

        with b.if_then(b.fcmp_ordered(">", self.soft_cap, v.float(0.0)), likely=False):
            cap = v.splat(self.soft_cap)
            with steps(b, I64(0), self.tokens, 1) as (t, _):
                score = b.fdiv(v.load_floats(self.data, at_token(t)), cap)
                score = b.fmul(b.fmul(tanh(v, score), cap), v.splat(math.log2(math.e)))
                v.store(score, self.data, at_token(t))
        with b.if_then(b.icmp_signed("!=", self.partly, I64(0)), likely=False):
            low, high = (
                v.load_floats(self.data, b.add(b.add(self.bounds_at, row), I64(i)))
                for i in (0, PANEL)
            )
            # The token's index, counted as a float: conversions are slow.
            number = cgutils.alloca_once_value(b, v.splat(0.0))
            with steps(b, I64(0), self.tokens, 1) as (t, _):
                here = b.load(number)
                seen = b.and_(b.fcmp_ordered(">=", here, low), b.fcmp_ordered("<", here, high))
                score = v.load_floats(self.data, at_token(t))
                v.store(b.select(seen, score, v.splat(-math.inf)), self.data, at_token(t))
                b.store(b.fadd(here, v.splat(1.0)), number)

        def merged(slots, combine):
            one, two, three, four = (b.load(slot) for slot in slots)
            return combine(combine(one, two), combine(three, four))

        peaks, totals = (
            [cgutils.alloca_once(b, v.type) for _ in range(_AT_ONCE)] for _ in range(2)
        )
        for peak, sum_ in zip(peaks, totals, strict=True):
            b.store(v.splat(-math.inf), peak)
            b.store(v.splat(0.0), sum_)
        with steps(b, I64(0), self.tokens, _AT_ONCE) as (t, _):
            for i, slot in enumerate(peaks):
                score = v.load_floats(self.data, at_token(t, i))
                b.store(v.larger(score, b.load(slot)), slot)
        there = v.lanes_below(b.sub(self.count, row))
        maxima_at, sums_at = b.add(state.maxima_at, row), b.add(state.sums_at, row)
        old = v.load_floats(self.data, maxima_at, there)
        new = v.larger(merged(peaks, v.larger), old)
        # Where no token has been seen, subtracting 0 avoids inf - inf.
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        base = b.select(nothing, v.splat(0.0), new)
        with steps(b, I64(0), self.tokens, _AT_ONCE) as (t, _):
            for i, slot in enumerate(totals):
                score = v.load_floats(self.data, at_token(t, i))
                p = exp2(v, b.fsub(score, base))
                v.store(p, self.data, at_token(t, i))
                b.store(b.fadd(b.load(slot), p), slot)
        rescale = exp2(v, b.fsub(old, base))
        before = v.load_floats(self.data, sums_at, there)
        v.store_masked(v.fma(before, rescale, merged(totals, b.fadd)), self.data, sums_at, there)
        v.store_masked(new, self.data, maxima_at, there)
        v.store(rescale, self.data, b.add(state.rescale_at, row))


@functools.cache
def make_many_pv(in_pairs):
    """`many_pv`; if `in_pairs`, a weight is a lane of `pair_panel_weights`, a V row one of `pair_rows`."""

    @emits()
    def many_pv(b, f, count, p_at, values_at, step, begin, end, outputs):
        """Add weighted V rows: ``o[r, d] = rescale[r] * o[r, d] + sum over t in [begin, end) of p[t, r] * v[t, d]``.

        Weight p[t, r] of `count` query rows is at ``p_at + t * PANEL + r``. V row t is at ``values_at + t * step``, as
        `widen_rows` writes it. Output row r is at ``outputs.at + r * outputs.step``, and has whole vectors. All floats
        are in one array. Up to `SUM_ROWS` rows are read past the last one, but not written.

        A vector has columns, and a weight is repeated in all lanes. Sums of a block of rows and columns stay in
        registers while all tokens are added.
        """
        _PanelSums(b, in_pairs, f, count, p_at, values_at, step, begin, end, outputs).emit()

    return many_pv


class _PanelSums:
    """Emits `many_pv`."""

    def __init__(self, b, in_pairs, data, count, p_at, values_at, step, begin, end, outputs):
        self.b, self.v = b, Vectors(b, "float32")
        self.data, self.count, self.p_at = data, count, p_at
        self.in_pairs = in_pairs
        self.values_at, self.step, self.begin, self.end = values_at, step, begin, end
        self.outputs = outputs

    def emit(self):
        """Emit the code: blocks of several vectors of columns, then of one."""
        b, v = self.b, self.v
        wide = SUM_VECTORS * v.lanes
        whole = b.and_(self.outputs.step, I64(-wide))
        with (
            steps(b, I64(0), whole, wide) as (column, _),
            steps(b, I64(0), self.count, SUM_ROWS) as (r, _),
        ):
            self.add_block(r, column, SUM_VECTORS)
        rest = b.icmp_signed("<", whole, self.outputs.step)
        with b.if_then(rest), steps(b, I64(0), self.count, SUM_ROWS) as (r, _):
            self.add_block(r, whole, 1)

    def add_block(self, first_row, column, vectors):
        """Add to the sums of a block of rows and of some vectors of columns."""
        b, v, outputs = self.b, self.v, self.outputs
        sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in range(SUM_ROWS)]
        left = b.sub(self.count, first_row)
        places = []
        for i, slots in enumerate(sums):
            row = b.add(first_row, I64(i))
            place = b.add(b.add(outputs.at, b.mul(row, outputs.step)), column)
            places.append(place)
            factor = v.splat(v.load_one(self.data, b.add(outputs.rescale_at, row)))
            for j, slot in enumerate(slots):
                before = v.load_floats(self.data, b.add(place, I64(j * v.lanes)))
                b.store(b.fmul(before, factor), slot)
        with steps(b, self.begin, self.end, 1) as (t, _):
            v_at = b.add(b.add(self.values_at, b.mul(t, self.step)), column)
            values = [
                v.load_floats(self.data, b.add(v_at, I64(j * v.lanes))) for j in range(vectors)
            ]
            p_at = b.add(b.add(self.p_at, b.mul(t, I64(PANEL))), first_row)
            for i, slots in enumerate(sums):
                weight = v.splat(v.load_one(self.data, b.add(p_at, I64(i))))
                for slot, value in zip(slots, values, strict=True):
                    b.store(self.add(b.load(slot), weight, value), slot)
        for i, (place, slots) in enumerate(zip(places, sums, strict=True)):
            # A branch, not a mask: on Zen 1 to 3 a masked store is many micro-operations.
            with b.if_then(b.icmp_signed(">", left, I64(i)), likely=True):
                for j, slot in enumerate(slots):
                    v.store(b.load(slot), self.data, b.add(place, I64(j * v.lanes)))

    def add(self, total, weight, value):
        """A sum and one more product."""
        b, v = self.b, self.v
        if not self.in_pairs:
            return v.fma(weight, value, total)
        return v.add_bf16_pairs(total, *(b.bitcast(x, v.int_type) for x in (weight, value)))
