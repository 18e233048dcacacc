"""Scores of many query rows: a tile's rows as floats, once for all query rows, and products of blocks in registers."""

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.offsets import EXTENTS
from numkv.kernels.cpu.attention.records import PANEL
from numkv.kernels.cpu.vectors.emit import I32, I64, emits, steps
from numkv.kernels.cpu.vectors.features import MANY_ROWS, MANY_VECTORS
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.vectors import Vectors

#: What `many_qk` prefetches, as bits: K rows, V rows.
ASK_K, ASK_V = 1, 2
# Elements of a row that are multiplied in one turn of the innermost loop.
_UNROLL = 4


@emits()
def transpose_queries(b, f, q_at, q_step, count, units, to_at):
    """Put up to a panel of query rows side by side: ``to[i, r] = q[min(r, count - 1), i]`` of `units` numbers of each.

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
        """Put rows ``[begin, end)`` of a tile down as float32, and return whether all of them are finite.

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
        """The code."""
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
        """Lane by lane the larger integer."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def put(self, row_at, d, to_row, mask=None):
        """Put down a vector of columns, and keep the largest magnitudes as bits, which are in the same order."""
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

        Query rows are those of `transpose_queries`, of which as many vectors are taken as `count` rows need; K row t is
        at ``keys_at + t * step``, as `widen_rows` puts it. Of both, `size` numbers are taken, a multiple of the lanes
        of a vector; `tokens` is a multiple of `MANY_ROWS`. A row of scores has `PANEL` floats. All floats are in one
        array. A score does not depend on what else is in its panel.

        A vector holds query rows, and a number of a K row is repeated in all lanes: nothing is left to be added across
        lanes. Sums of a few tokens stay in registers while their rows pass::

            s[t, 0:16]  += q[d, 0:16]  * k[t, d]
            s[t, 16:32] += q[d, 16:32] * k[t, d]         for some tokens

        Meanwhile the next tile's rows are prefetched: if `asking` has `ASK_K`, the memory in `extents`, if it has
        `ASK_V`, that in the extents after these.
        """
        ProductsOfPanels(b, kind, f, q_at, keys_at, step, size, tokens, s_at, asking, extents).emit(
            count
        )

    return many_qk


class ProductsOfPanels:
    """Emits `many_qk`; what is multiplied with what is a subclass's own."""

    #: Elements of a row that a number in a panel stands for.
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

    def emit(self, count):
        """The code for `count` query rows: those that fill one vector, or more."""
        one = self.b.icmp_signed("<=", count, I64(self.v.lanes))
        with self.b.if_else(one) as (of_one, of_more):
            with of_one:
                self.emit_for(1)
            with of_more:
                self.emit_for(MANY_VECTORS)

    def emit_for(self, vectors):
        """The code for so many vectors of query rows."""
        b, v = self.b, self.v
        sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in range(MANY_ROWS)]
        with steps(b, I64(0), self.tokens, MANY_ROWS) as (t0, _):
            for slot in (x for slots in sums for x in slots):
                b.store(v.splat(0.0), slot)
            rows = [
                b.add(self.keys_at, b.mul(b.add(t0, I64(t)), self.step)) for t in range(MANY_ROWS)
            ]
            with steps(b, I64(0), self.size, _UNROLL) as (d0, _):
                turn = b.ashr(d0, I64(_UNROLL.bit_length() - 1))
                for asked, stream in self.streams:
                    with b.if_then(asked):
                        stream.issue(MANY_ROWS * _UNROLL * self.elements, turn)
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
        """What is multiplied, of a vector of a panel or of a row's number in all lanes."""
        return vector

    def add(self, total, q, k):
        """A sum and one more product."""
        return self.v.fma(q, k, total)

    def score(self, total):
        """The score that a sum stands for."""
        return total
