"""Attention in integers where rows are INT8: queries and probabilities as 16-bit integers, their products with rows.

Probabilities take 15 bits of the largest in the tile: what is lost beside codes of 7 or 4 bits does not count. What
belongs to a whole tile (the integers' common scale) is multiplied once, at its end. For sums of V rows, codes are
widened to 16 bits, and one instruction multiplies and adds as many pairs as a vector has 32-bit lanes; so they are for
scores (`floats`), unless one instruction adds products of bytes by fours. Then a query's integers are taken apart into
low and high bytes, and each half meets 64 codes at a time, which nothing has to widen. One side of these products has
no sign: codes get 128 more, which flips their highest bit, and sums start with 128 times the sum of the query's bytes
less. All that is exact in integers.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import KV_TILE
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
from numkv.kernels.cpu.vectors.features import FEATURES, row_unroll
from numkv.kernels.cpu.vectors.levels import LOOKED_UP, levels_of
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.stored import in_words
from numkv.kernels.cpu.vectors.vectors import Vectors
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
        emitter = _ScoresOfInt8(b, (kind, next_kind), floats, queries, keys, count, s_at, extents)
        for_rows(b, rows, emitter.emit)

    return qk_int8


class _ScoresOfInt8:
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


# Rows whose sums fit into registers: of four vectors of columns, and of two.
_ROWS, _MORE_ROWS = 4, 8


@emits(types.float32)
def quantise_query(b, q, q_at, head_dim, padded_dim):
    """Replace a row of float32 by 16-bit integers at its beginning, and return their scale.

    In NumPy: ``scale = abs(q).max() / limit; q = rint(q / scale).astype(int16)``, where the limit is 32,639 or so much
    less that sums of `head_dim` products with codes of 8 bits fit into 32 bits. 15 bits of a query lose nothing beside
    the 7 bits of what it meets. A row with NaN or infinity gets the scale NaN.
    """
    v = Vectors(b, "float32")
    peak, faults = (cgutils.alloca_once_value(b, v.splat(0.0)) for _ in range(2))
    magnitude = v.splat_int(0x7FFFFFFF)
    with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
        x = v.load_floats(q, b.add(q_at, d))
        size = b.bitcast(b.and_(b.bitcast(x, v.int_type), magnitude), v.type)
        b.store(v.larger(size, b.load(peak)), peak)
        b.store(b.fadd(b.load(faults), b.fsub(x, x)), faults)  # 0 unless x is not finite
    largest = v.fold(b.load(peak), v.larger)
    fault = v.fold(b.load(faults), b.fadd)
    # As large as codes may be for head_dim products with 127 to stay below 2**31.
    limit = b.sdiv(I64((2**31 - 1) // 127), head_dim)
    limit = b.select(b.icmp_signed("<", limit, I64(32639)), limit, I64(32639))
    limit = b.sitofp(limit, v.float)
    usable = b.and_(
        b.fcmp_ordered(">", largest, v.float(1e-30)), b.fcmp_ordered("==", fault, v.float(0.0))
    )
    factor = v.splat(b.select(usable, b.fdiv(limit, largest), v.float(0.0)))
    halves = ir.VectorType(I16, v.lanes)
    with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
        x = b.fmul(v.load_floats(q, b.add(q_at, d)), factor)
        x = b.select(b.fcmp_ordered("ord", x, x), x, v.splat(0.0))  # infinity times 0
        magic = v.splat(12582912.0)  # 1.5 * 2**23: its sum's low bits hold the nearest integer
        codes = b.trunc(b.bitcast(b.fadd(x, magic), v.int_type), halves)
        at = b.add(q_at, b.ashr(d, I64(1)))  # behind what is read, from the second step on
        pointer = v.pointer(q, at, v.float)
        b.store(codes, b.bitcast(pointer, halves.as_pointer()), align=2)
    scale = b.select(usable, b.fdiv(largest, limit), v.float(0.0))
    return b.fadd(scale, fault)


@emits()
def quantise_probs(b, rows, s, s_at, factors_at, begin, end, scales_at):
    """Replace probabilities of some rows and a tile by 16-bit integers, each token's times its factor.

    In NumPy, of probabilities p (KV_TILE, rows) and factors (KV_TILE,), the scales of V rows, with 0 for tokens outside
    ``[begin, end)``, whatever their factors are::

        w = p * factors[:, None];  scale = abs(w).max(0) / 32639;  w = rint(w / scale).astype(int16)

    All floats are in the array `s`: p[t, r] at ``s_at + t * rows + r``, factors at `factors_at`; scales go to
    `scales_at`, up to a whole vector. Integers take the place of probabilities, two tokens in 32 bits; of two rows::

        p   t0r0 | t0r1 | t1r0 | t1r1 | t2r0 ...  ->  w   t0r0 t1r0 | t0r1 t1r1 | t2r0 t3r0 ...
    """

    def emit(rows):
        v = Words(b)
        each = v.lanes // rows  # tokens in a vector
        first, last = (b.mul(x, I64(rows)) for x in (begin, end))
        peaks = [cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(2)]
        with steps(b, I64(0), I64(KV_TILE * rows), 2 * v.lanes) as (i, _):
            for j, slot in enumerate(peaks):
                here = b.add(i, I64(j * v.lanes))
                at = b.add(s_at, here)
                token = b.add(factors_at, b.sdiv(here, I64(rows)))
                weight = b.fmul(v.load_floats(s, at), v.stretched(s, token, each))
                below = v.lanes_below(b.sub(last, here))
                seen = b.and_(below, b.not_(v.lanes_below(b.sub(first, here))))
                weight = b.select(seen, weight, v.splat(0.0))
                v.store(weight, s, at)
                b.store(v.larger_size(weight, b.load(slot)), slot)
        peak = v.fold_by_row(v.larger_int(*map(b.load, peaks)), I64(rows), v.larger_int)
        factor, scale = v.quantiser(peak)
        v.store(scale, s, scales_at)
        even = [2 * turn * rows + r for turn in range(each) for r in range(rows)]
        odd = [i + rows for i in even]
        with steps(b, I64(0), I64(KV_TILE * rows // 2), v.lanes) as (i, _):
            at = b.add(b.add(s_at, i), i)
            codes = []
            for j in range(2):
                weight = v.load_floats(s, b.add(at, I64(j * v.lanes)))
                codes.append(v.nearest(b.fmul(weight, factor)))
            pairs = v.pairs(v.shuffle(*codes, even), v.shuffle(*codes, odd))
            v.store(b.bitcast(pairs, v.type), s, b.add(s_at, i))

    for_rows(b, rows, emit, row_unroll("float32"))


def add_to_output(v, floats, outputs, row, value, column, mask=None):
    """Add a vector of columns to an output row, rescaled: ``o[row, d] = rescale[row] * o[row, d] + value``."""
    b = v.b
    rescale = v.splat(v.load_one(floats, b.add(outputs.rescale_at, row)))
    place = b.add(b.add(outputs.at, b.mul(row, outputs.step)), column)
    value = v.fma(v.load_floats(floats, place, mask), rescale, value)
    if mask is None:
        v.store(value, floats, place)
    else:
        v.store_masked(value, floats, place, mask)


@functools.cache
def make_accumulate_int8(next_kind, kind="int8"):
    """`accumulate_int8`; `next_kind` is the storage kind of rows that are prefetched, `kind` INT8, CODE4 or CODE6."""

    @emits()
    def accumulate_int8(b, rows, count, floats, weights, values, begin, end, outputs, extents):
        """Add INT8 rows weighted by integers: ``o[r] = rescale[r] * o[r] + scale[r] * (w[:, r] @ v)``.

        All floats are in one array. Weights and their scales are those of `quantise_probs`. Of the `rows` rows the
        first `count` are written, to columns below the head dim; up to 15 more get what does not matter.

        The words of two tokens are interleaved, so that a lane holds a pair of tokens for one column, and one
        instruction adds both products::

            even columns   t0c0 t1c0 | t0c2 t1c2 | ...        weights   t0 t1 | t0 t1 | ...
            odd columns    t0c1 t1c1 | t0c3 t1c3 | ...        sums      c0 | c2 | ...   and   c1 | c3 | ...

        `Words.in_order` brings sums back into the order of columns. Of CODE4, more than four rows take half as many
        columns at a time (`Words.load_level_pairs`): its levels are looked up once for all of them.

        Meanwhile the memory in `extents` (the next tile's K rows) is prefetched.
        """
        emitter = _SumsOfInt8(
            b, (kind, next_kind), count, floats, weights, values, begin, end, outputs, extents
        )
        for_rows(b, rows, emitter.emit, row_unroll("float32"))

    return accumulate_int8


class _SumsOfInt8:
    """Emits `accumulate_int8`."""

    def __init__(self, b, kinds, count, floats, weights, values, begin, end, outputs, extents):
        self.b, self.v = b, None
        (self.kind, self.next_kind), self.extents = kinds, extents
        self.count, self.floats, self.weights, self.values = count, floats, weights, values
        self.begin, self.end, self.outputs = begin, end, outputs

    def emit(self, rows):
        """The code for a number of query rows."""
        b = self.b
        self.v, self.rows = Words(b), rows
        self.stream = PrefetchStream(b, self.next_kind, self.extents)
        # A look into the table costs enough to take half as many columns of twice as many rows.
        self.narrow = (
            self.kind == "code4" and rows > _ROWS and self.v.lanes == 16 and "avx512bw" in FEATURES
        )
        self.vectors, self.at_once = (2, _MORE_ROWS) if self.narrow else (4, _ROWS)
        self.columns = self.vectors * self.v.lanes
        num_blocks = b.sdiv(b.add(self.values.dim, I64(self.columns - 1)), I64(self.columns))
        with steps(b, I64(0), num_blocks, 1) as (block, _):
            for first in range(0, rows, self.at_once):
                self.one_pass(block, range(first, min(rows, first + self.at_once)))

    def one_pass(self, block, taken):
        """A block of columns, for some rows."""
        b, v = self.b, self.v
        passes = (self.rows + self.at_once - 1) // self.at_once
        sums = {
            row: [cgutils.alloca_once(b, v.int_type) for _ in range(self.vectors)] for row in taken
        }
        for slot in (slot for slots in sums.values() for slot in slots):
            b.store(v.splat_int(0), slot)
        at = b.mul(block, I64(self.columns))
        left = b.sub(self.values.dim, at)
        turns = b.ashr(b.add(self.end, I64(1)), I64(1))
        with steps(b, b.ashr(self.begin, I64(1)), turns, 1) as (turn, _):
            self.stream.issue(2 * self.columns // passes, turn)
            places = []
            for i in range(2):
                token = b.add(b.mul(turn, I64(2)), I64(i))
                row_at = b.load(b.gep(self.values.offsets, [token]))
                places.append(b.add(row_at, in_words(b, self.kind, at)))
            if self.narrow:
                mixed = v.load_level_pairs(self.values.words, places, left)
            else:
                codes = [v.load_int8(self.values.words, x, left, self.kind) for x in places]
                mixed = [x for pair in zip(*codes, strict=True) for x in v.interleave(*pair)]
            for row in taken:
                at_turn = b.add(self.weights.at, b.add(b.mul(turn, I64(self.rows)), I64(row)))
                weights = v.splat(v.load_one(self.floats, at_turn))
                for slot, x in zip(sums[row], mixed, strict=True):
                    b.store(v.add_pairs(b.load(slot), x, weights), slot)
        for row in taken:
            with b.if_then(b.icmp_signed("<", I64(row), self.count)):
                self.finish(block, row, [b.load(slot) for slot in sums[row]])

    def finish(self, block, row, totals):
        """Add a block of a row's sums to the output."""
        b, v = self.b, self.v
        if self.narrow:
            columns = v.by_turns(totals)
        else:
            pairs = zip(totals[:2], totals[2:], strict=True)
            columns = v.in_order([x for pair in pairs for x in v.interleave(*pair)])
        scale = v.splat(v.load_one(self.floats, b.add(self.weights.scales_at, I64(row))))
        for j, total in enumerate(columns):
            column = b.add(b.mul(block, I64(self.columns)), I64(j * v.lanes))
            with b.if_then(b.icmp_signed("<", column, self.values.dim)):
                value = b.fmul(b.sitofp(total, v.type), scale)
                add_to_output(v, self.floats, self.outputs, I64(row), value, column)
