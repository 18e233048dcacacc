"""Scores of query rows against INT8 rows as they are stored, where one instruction adds products of bytes by fours.

A query's integers are taken apart into low and high bytes, and each half meets 64 codes at a time, which nothing has to
widen. One side of these products has no sign: codes get 128 more, which flips their highest bit, and sums start with
128 times the sum of the query's bytes less. All that is exact in integers.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import (
    I8,
    I16,
    I64,
    emits,
    for_rows,
    keep_in_memory,
    scratch_floats,
    steps,
)
from numkv.kernels.cpu.vectors.levels import LOOKED_UP, levels_of
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.stored import in_words
from numkv.kernels.cpu.vectors.words import Words

# Tokens whose sums, of low and of high bytes, fit into registers.
TOKENS = 8


@emits()
def interleave_bytes(b, rows, q, q_at, q_step, columns, to_at):
    """Interleave `rows` query rows of 16-bit integers, taken apart into high and low bytes.

    A unit is two vectors, the high bytes and then the low ones: with n = 16 / rows the next ``4 * n`` columns of each
    row. The integer is ``256 * high + low``, both with a sign. Of four rows::

        a0 ... a15 | b0 ... b15 | c0 ... c15 | d0 ... d15        high bytes of 16 columns of each row
        a0 ... a15 | b0 ... b15 | c0 ... c15 | d0 ... d15        low bytes

    Row r is at ``q_at + r * q_step`` of the floats `q`; units go to ``q[to_at]`` and on. `columns` is a multiple of 64.
    """

    def emit(rows):
        v = Words(b)
        each = v.lanes // rows
        words, bytes_ = (ir.VectorType(x, 4 * each) for x in (I16, I8))
        half = ir.Constant(words, [I16(128)] * words.count)
        eight = ir.Constant(words, [I16(8)] * words.count)
        with steps(b, I64(0), columns, 4 * each) as (d, _):
            to = b.add(to_at, b.mul(b.sdiv(d, I64(4)), I64(2 * rows)))
            for r in range(rows):
                at = b.add(b.add(q_at, b.mul(I64(r), q_step)), b.ashr(d, I64(1)))
                pointer = b.bitcast(v.pointer(q, at, v.float), words.as_pointer())
                x = b.load(pointer, align=4)
                for i, part in enumerate((b.ashr(b.add(x, half), eight), x)):
                    place = v.pointer(q, b.add(to, I64(i * v.lanes + r * each)), v.float)
                    place = b.bitcast(place, bytes_.as_pointer())
                    b.store(b.trunc(part, bytes_), place, align=4)

    for_rows(b, rows, emit)


def add_queries(v, floats, at, sums, codes):
    """Add products of a unit of `interleave_bytes`, at `at`, with the codes of some tokens to their sums.

    `sums` has two slots for each token, of high and of low bytes; ``codes(t)`` loads those of token t.
    """
    b = v.b
    high, low = (v.load_floats(floats, b.add(at, I64(i * v.lanes))) for i in range(2))
    for t, (of_high, of_low) in enumerate(sums):
        x = codes(t)
        b.store(v.add_fours(b.load(of_high), x, high), of_high)
        b.store(v.add_fours(b.load(of_low), x, low), of_low)


@functools.cache
def make_qk_int8(next_kind, kind="int8"):
    """`qk_int8`; `next_kind` is the storage kind of the rows that are prefetched, `kind` INT8, CODE4 or CODE6."""

    @emits()
    def qk_int8(b, rows, floats, queries, keys, count, s_at, extents):
        """Scores of `rows` query rows and `count` INT8 rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

        In NumPy, of integers q of `quantise_query`: ``s = q_scale * k_scale[:, None] * (codes @ q.T)``. Query rows are
        those of `interleave_bytes`, with zeros up to 64 columns. For the rest see `qk_tile`.
        """
        emitter = _Int8(b, (kind, next_kind), floats, queries, keys, count, s_at, extents)
        for_rows(b, rows, emitter.emit)

    return qk_int8


class _Int8:
    """Emits `qk_int8`."""

    def __init__(self, b, kinds, floats, queries, keys, count, s_at, extents):
        self.b, self.v = b, Words(b)
        self.kind, next_kind = kinds
        self.stream = PrefetchStream(b, next_kind, extents)
        self.floats, self.queries, self.keys, self.count, self.s_at = (
            floats, queries, keys, count, s_at
        )  # fmt: skip
        if self.kind in LOOKED_UP:
            self.scratch = scratch_floats(b, self.v.float, TOKENS * self.v.lanes)

    def emit(self, rows):
        """The code for a number of query rows."""
        b, v = self.b, self.v
        self.rows, self.each = rows, v.lanes // rows
        self.columns = 4 * self.each
        # Units that are taken at once: of CODE4 and CODE6 a vector of levels.
        self.units = rows if self.kind in LOOKED_UP else 1
        self.flip = v.opaque(v.splat_int(0x80808080 - 2**32))
        starts = self.first_sums()
        row_scales = v.repeated(self.floats, self.queries.scales_at, rows)
        # Lanes are only added where as many tokens are at hand as a row has lanes.
        parts = max(1, self.each // TOKENS)
        with steps(b, I64(0), self.count, parts * TOKENS) as (t0, _):
            totals = []
            for part in range(parts):
                totals += self.products(b.add(t0, I64(part * TOKENS)), starts)
            for i, scores in enumerate(v.sums_by_row(totals, rows)):
                token = b.add(t0, I64(i * self.each))
                scores = b.fmul(b.sitofp(scores, v.type), row_scales)
                factors = v.stretched(self.floats, b.add(self.keys.scales_at, token), self.each)
                at = b.add(self.s_at, b.mul(token, I64(rows)))
                v.store(b.fmul(scores, factors), self.floats, at)

    def unit_at(self, d):
        """Where the query's bytes are for columns from d on."""
        b = self.b
        return b.add(self.queries.at, b.mul(b.ashr(d, I64(2)), I64(2 * self.rows)))

    def first_sums(self):
        """What sums start with, of high and of low bytes: -128 times the query's bytes."""
        b, v = self.b, self.v
        slots = [[cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(2)]]
        with steps(b, I64(0), self.keys.dim, self.columns) as (d, _):
            add_queries(v, self.floats, self.unit_at(d), slots, lambda t: self.flip)
        return [b.sub(v.splat_int(0), b.load(slot)) for slot in slots[0]]

    def products(self, t0, starts):
        """Products of some tokens with query rows, by lanes."""
        b, v, dim = self.b, self.v, self.keys.dim
        sums = [[cgutils.alloca_once(b, v.int_type) for _ in range(2)] for _ in range(TOKENS)]
        for slots in sums:
            for slot, start in zip(slots, starts, strict=True):
                b.store(start, slot)
        k_at = [b.load(b.gep(self.keys.offsets, [b.add(t0, I64(t))])) for t in range(TOKENS)]

        def add(d, left=None):
            if self.kind in LOOKED_UP:
                self.add_levels(k_at, sums, d, left)
                return

            def codes(t):
                self.stream.issue(self.columns, t)
                return self.load(b.add(k_at[t], d), left)

            add_queries(v, self.floats, self.unit_at(d), sums, codes)

        step = self.columns * self.units
        whole = b.and_(dim, I64(-step))
        with steps(b, I64(0), whole, step) as (d, _):
            add(d)
        with b.if_then(b.icmp_signed("<", whole, dim)):
            add(whole, b.sub(dim, whole))
        eight = v.splat_int(8)
        return [b.add(b.shl(b.load(high), eight), b.load(low)) for high, low in sums]

    def add_levels(self, k_at, sums, d, left):
        """Add the products of several units of CODE4 or CODE6, whose levels are looked up once for all rows.

        Past a row's end queries are 0.
        """
        b, v, columns = self.b, self.v, self.columns * self.units
        levels = []
        for t, row_at in enumerate(k_at):
            self.stream.issue(columns, t)
            at = b.add(row_at, in_words(b, self.kind, d))
            if left is None:
                packed = v.load_packed(self.kind, self.keys.words, at, columns)
            else:
                packed = v.load_some(self.kind, self.keys.words, at, left, columns)
            levels.append(b.bitcast(levels_of(b, self.kind, packed, True), v.type))
        if self.units == 1:
            add_queries(v, self.floats, self.unit_at(d), sums, levels.__getitem__)
            return
        for t, x in enumerate(levels):
            v.store(x, self.scratch, I64(t * v.lanes))
        keep_in_memory(b, self.scratch)
        for unit in range(self.units):
            at = self.unit_at(b.add(d, I64(unit * self.columns)))
            starts = [I64(t * v.lanes + unit * self.each) for t in range(TOKENS)]
            add_queries(
                v, self.floats, at, sums,
                lambda t, starts=starts: v.repeated(self.scratch, starts[t], self.each),
            )  # fmt: skip

    def load(self, at, left):
        """Some codes of a K row without signs, once for each query row."""
        b, v = self.b, self.v
        if left is None:
            type_ = ir.VectorType(v.int, self.each)
            pointer = v.pointer(self.keys.words, at, I8)
            part = b.load(b.bitcast(pointer, type_.as_pointer()), align=1)
        else:
            part = v.load_bytes(self.keys.words, at, left, self.columns)
            part = b.bitcast(part, ir.VectorType(v.int, self.each))
        x = v.shuffle(part, part, [i % self.each for i in range(v.lanes)])
        return b.xor(x, self.flip)
