"""Attention in integers over INT8 or INT4: queries and probabilities become 16-bit integers.

**INT8.** Probabilities are rounded to 15 bits of the tile's largest one. This error is negligible compared with that of
codes of 7 or 4 bits. The integers' common scale is applied once, at the end of a tile.

For sums of V rows, codes are widened to 16 bits. One instruction then multiplies and adds one pair per 32-bit lane.
Scores are computed in the same way (`floats`), unless one instruction adds products of bytes by fours. In that case,
a query's integers are split into low and high bytes. Each half is multiplied with 64 codes at a time, without widening.
One operand of these products is unsigned. Codes are therefore offset by 128, which flips their highest bit. Sums start
at -128 times the sum of the query's bytes. All of this is exact in integers.

**INT4.**

*Scores.* A lane is a token. One quantisation group (16 bytes) of each of 16 tokens is transposed. No sums across lanes
remain, and a group's scales are vectors too. Low nibbles and high nibbles form separate vectors of bytes. A query's
integers are split into low and high bytes, as for INT8. Four of these bytes are repeated in all lanes::

    rows          t0: b0 b1 b2 b3 | b4 ... b7 | b8 ... b11 | b12 ... b15        t1: ...
    transposed    t0: b0 b1 b2 b3 | t1: b0 b1 b2 b3 | t2: b0 b1 b2 b3 | ...     b4 ... b7: a second vector, and so on
    products      s[t0] += b0 * q0 + ... + b3 * q3 | s[t1] ...                  for each query row

Without an instruction for four bytes, products are added in pairs. 16 bits suffice for the sums of a group.

*Sums.* With an instruction for four bytes and 32 registers, codes are not widened. Weights are split into low and high
bytes. A lane holds a column's bytes of four tokens, and a vector holds those of one quantisation group. Each group
takes one pass over the tile's tokens, with the sums of four query rows in registers. Otherwise codes are widened to
words, and a lane holds a column of two tokens. High nibbles are never extracted: sums of whole bytes less sums of low
nibbles are 16 times the sums of high nibbles.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.llvm.softmax import whole_units
from numkv.kernels.cpu.attention.records import INT4_SPAN, KV_TILE
from numkv.kernels.cpu.vectors.emit import (
    I8,
    I16,
    I32,
    I64,
    emits,
    for_rows,
    keep_in_memory,
    numbers_taken,
    opaque_number,
    scratch_floats,
    steps,
)
from numkv.kernels.cpu.vectors.features import (
    DOT_PRODUCTS,
    FEATURES,
    HAS_FOURS,
    LANES,
    REGISTERS,
    row_unroll,
)
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.stored import LOOKED_UP, in_words, levels_of
from numkv.kernels.cpu.vectors.words import Words
from numkv.rows.int4 import GROUP

# Tokens whose sums (of low bytes and of high bytes) fit into registers.
TOKENS = 8


@emits()
def interleave_bytes(b, rows, q, q_at, q_step, columns, to_at):
    """Interleave `rows` query rows of 16-bit integers, split into high and low bytes.

    A unit is two vectors, first of high bytes, then of low bytes. With n = 16 / rows, it has the next ``4 * n`` columns
    of each row. The integer is ``256 * high + low``, both signed. For four rows::

        a0 ... a15 | b0 ... b15 | c0 ... c15 | d0 ... d15        high bytes of 16 columns of each row
        a0 ... a15 | b0 ... b15 | c0 ... c15 | d0 ... d15        low bytes

    Row r is at ``q_at + r * q_step`` of the floats `q`. Units start at ``q[to_at]``. `columns` is a multiple of 64.
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
    """Multiply the unit of `interleave_bytes` at `at` with the codes of some tokens, and add to their sums.

    `sums` has two slots for each token: for high bytes and for low bytes. ``codes(t)`` loads the codes of token t.
    """
    b = v.b
    high, low = (v.load_floats(floats, b.add(at, I64(i * v.lanes))) for i in range(2))
    for t, (of_high, of_low) in enumerate(sums):
        x = codes(t)
        b.store(v.add_fours(b.load(of_high), x, high), of_high)
        b.store(v.add_fours(b.load(of_low), x, low), of_low)


@functools.cache
def make_qk_int8(next_kind, kind="int8", by_channel=False):
    """Make `qk_int8` for INT8, or for a kind whose levels come from a table.

    `next_kind` is the storage kind of the prefetched rows. With `by_channel`, ``"int8"`` stands for INT8_CHANNEL.
    """

    @emits()
    def qk_int8(b, rows, floats, queries, keys, count, s_at, extents):
        """Compute scores of `rows` query rows and `count` INT8 rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

        In NumPy, with integers q of `quantise_query`: ``s = q_scale * k_scale[:, None] * (codes @ q.T)``. Query rows
        are those of `interleave_bytes`, with zeros up to a multiple of 64 columns. See `qk_tile` for the rest.
        """
        emitter = _ScoresOfInt8(
            b, (kind, next_kind), by_channel, floats, queries, keys, count, s_at, extents
        )
        for_rows(b, rows, emitter.emit)

    return qk_int8


class _ScoresOfInt8:
    """Emit `qk_int8`."""

    def __init__(self, b, kinds, by_channel, floats, queries, keys, count, s_at, extents):
        self.b, self.v, self.by_channel = b, Words(b), by_channel
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
        # Units of a step. For CODE4 and CODE6 they are a vector of levels.
        self.units = rows if self.kind in LOOKED_UP else 1
        self.flip = v.opaque(v.splat_int(0x80808080 - 2**32))
        starts = self.first_sums()
        row_scales = v.repeated(self.floats, self.queries.scales_at, rows)
        # Sums across lanes need as many tokens as a row has lanes.
        parts = max(1, self.each // TOKENS)
        with steps(b, I64(0), self.count, parts * TOKENS) as (t0, _):
            totals = []
            for part in range(parts):
                totals += self.products(b.add(t0, I64(part * TOKENS)), starts)
            for i, scores in enumerate(v.sums_by_row(totals, rows)):
                token = b.add(t0, I64(i * self.each))
                scores = b.fmul(b.sitofp(scores, v.type), row_scales)
                if self.by_channel:
                    scores = b.fadd(scores, v.repeated(self.floats, self.queries.addends_at, rows))
                else:
                    factors = v.stretched(self.floats, b.add(self.keys.scales_at, token), self.each)
                    scores = b.fmul(scores, factors)
                v.store(scores, self.floats, b.add(self.s_at, b.mul(token, I64(rows))))

    def unit_at(self, d):
        """Return where the query's bytes for columns from d on start."""
        b = self.b
        return b.add(self.queries.at, b.mul(b.ashr(d, I64(2)), I64(2 * self.rows)))

    def first_sums(self):
        """Return the initial sums of high and of low bytes: -128 times the query's bytes."""
        b, v = self.b, self.v
        slots = [[cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(2)]]
        with steps(b, I64(0), self.keys.dim, self.columns) as (d, _):
            add_queries(v, self.floats, self.unit_at(d), slots, lambda t: self.flip)
        return [b.sub(v.splat_int(0), b.load(slot)) for slot in slots[0]]

    def products(self, t0, starts):
        """Return the products of some tokens with query rows, by lanes."""
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
        """Add the products of several units of CODE4 or CODE6; one table lookup of levels serves all rows.

        Queries are 0 past a row's end.
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
        """Load some codes of a K row as unsigned bytes, repeated for each query row."""
        b, v = self.b, self.v
        if left is None:
            type_ = ir.VectorType(v.int, self.each)
            pointer = v.pointer(self.keys.words, at, I8)
            part = b.load(b.bitcast(pointer, type_.as_pointer()), align=1)
        else:
            part = v.load_bytes(self.keys.words, at, left, self.columns)
            part = b.bitcast(part, ir.VectorType(v.int, self.each))
        return b.xor(v.in_parts(part, v.lanes), self.flip)


# Rows whose sums fit into registers: with four vectors of columns or the codes of a group, and with two vectors.
_ROWS, _MORE_ROWS = 4, 8


@emits(types.float32)
def quantise_query(b, q, q_at, head_dim, padded_dim):
    """Replace a row of float32 by 16-bit integers at its beginning, and return their scale.

    In NumPy: ``scale = abs(q).max() / limit; q = rint(q / scale).astype(int16)``. The limit is at most 32,639. It is
    lower if sums of `head_dim` products with 8-bit codes would exceed 32 bits. The error of 15 bits is negligible
    compared with that of codes of 7 bits. A row with NaN or infinity gets the scale NaN.
    """
    v = Words(b)
    peak = cgutils.alloca_once_value(b, v.splat_int(0))
    with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
        b.store(v.larger_size(v.load_floats(q, b.add(q_at, d)), b.load(peak)), peak)
    factor, scale = (
        b.extract_element(x, I32(0)) for x in query_quantisers(v, [b.load(peak)], head_dim)
    )
    factor = v.splat(factor)
    with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
        x = b.fmul(v.load_floats(q, b.add(q_at, d)), factor)
        x = b.select(b.fcmp_ordered("ord", x, x), x, v.splat(0.0))  # infinity times 0
        codes = b.trunc(v.nearest(x), ir.VectorType(I16, v.lanes))
        at = b.add(q_at, b.ashr(d, I64(1)))  # never reaches floats that are still to be read
        pointer = v.pointer(q, at, v.float)
        b.store(codes, b.bitcast(pointer, codes.type.as_pointer()), align=2)
    return scale


def query_quantisers(v, peaks, head_dim):
    """Return factors that turn query rows into 16-bit integers, and the scales of these: an element for each row.

    `peaks` are results of `larger_size`, by lanes.
    """
    b = v.b
    bits = v.folds(peaks, v.larger_int)
    largest = b.bitcast(bits, ir.VectorType(v.float, len(peaks)))

    def all_rows(x):
        return ir.Constant(largest.type, [v.float(x)] * len(peaks))

    # The largest integer for which head_dim products with -128 stay within 32 bits.
    limit = b.sdiv(I64((2**31 - 1) // 128), head_dim)
    limit = b.select(b.icmp_signed("<", limit, I64(32639)), limit, I64(32639))
    limit = b.insert_element(all_rows(0.0), b.sitofp(limit, v.float), I32(0))
    limit = v.shuffle(limit, limit, [0] * len(peaks))
    finite = b.icmp_signed("<", bits, ir.Constant(bits.type, [I32(0x7F800000)] * len(peaks)))
    usable = b.and_(b.fcmp_ordered(">", largest, all_rows(1e-30)), finite)
    nothing = b.select(finite, all_rows(0.0), all_rows(math.nan))
    factors = b.select(usable, b.fdiv(limit, largest), all_rows(0.0))
    return factors, b.select(usable, b.fdiv(largest, limit), nothing)


@emits()
def quantise_probs(b, rows, s, s_at, factors_at, begin, end, scales_at):
    """Replace probabilities of some rows and a tile by 16-bit integers, after multiplying each token's by its factor.

    In NumPy, with probabilities p (tokens, rows) and factors (tokens,), the scales of V rows. Tokens outside
    ``[begin, end)`` get 0, up to whole units, whatever their factors are::

        w = p * factors[:, None];  scale = abs(w).max(0) / 32639;  w = rint(w / scale).astype(int16)

    All floats are in the array `s`: p[t, r] at ``s_at + t * rows + r``, factors at `factors_at`. Scales go to
    `scales_at`, up to a whole vector. Integers replace probabilities, with two tokens in 32 bits. For two rows::

        p   t0r0 | t0r1 | t1r0 | t1r1 | t2r0 ...  ->  w   t0r0 t1r0 | t0r1 t1r1 | t2r0 t3r0 ...
    """

    def emit(rows):
        v = Words(b)
        each = v.lanes // rows  # tokens in a vector
        size = b.mul(whole_units(b, end), I64(rows))
        first, last = (b.mul(x, I64(rows)) for x in (begin, end))
        peaks = [cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(2)]
        with steps(b, I64(0), size, 2 * v.lanes) as (i, _):
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
        with steps(b, I64(0), b.ashr(size, I64(1)), v.lanes) as (i, _):
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
    """Make `accumulate_int8` for INT8, CODE4 or CODE6; `next_kind` is the storage kind of the prefetched rows."""

    @emits()
    def accumulate_int8(b, rows, count, floats, weights, values, begin, end, outputs, extents):
        """Add INT8 rows weighted by integers: ``o[r] = rescale[r] * o[r] + scale[r] * (w[:, r] @ v)``.

        All floats are in one array. Weights and their scales are those of `quantise_probs`. The first `count` of `rows`
        rows are written, to columns below the head dim. Up to 15 columns past it get undefined values.

        The words of two tokens are interleaved. A lane then holds a pair of tokens for one column, and one instruction
        adds both products::

            even columns   t0c0 t1c0 | t0c2 t1c2 | ...        weights   t0 t1 | t0 t1 | ...
            odd columns    t0c1 t1c1 | t0c3 t1c3 | ...        sums      c0 | c2 | ...   and   c1 | c3 | ...

        `Words.in_order` restores the order of columns in the sums. With more than four rows, or with 16 registers
        and more than two, a step has half as many columns, and four tokens (`Words.byte_pairs`). Sums then stay in
        registers. With CODE4 and more than four rows, a step also has half as many columns
        (`Words.load_level_pairs`): one table lookup serves all rows.

        Meanwhile the memory in `extents` (the next tile's K rows) is prefetched.
        """
        emitter = _SumsOfInt8(
            b, (kind, next_kind), count, floats, weights, values, begin, end, outputs, extents
        )
        for_rows(b, rows, emitter.emit, row_unroll("float32"))

    return accumulate_int8


class _SumsOfInt8:
    """Emit `accumulate_int8`."""

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
        # Table lookups are expensive: half as many columns of twice as many rows need fewer of them.
        self.narrow = (
            self.kind == "code4" and rows > _ROWS and self.v.lanes == 16 and "avx512bw" in FEATURES
        )
        # Registers have room for the sums of two vectors of columns and eight rows; 16 registers for those of four.
        most = 2 if REGISTERS == 16 else _ROWS
        self.in_bytes = self.kind not in LOOKED_UP and rows > most
        few = self.narrow or self.in_bytes
        self.vectors = 2 if few else 4
        self.at_once = _MORE_ROWS if few and REGISTERS > 16 else _ROWS
        self.columns = self.vectors * self.v.lanes
        self.pieces = None
        if self.kind not in LOOKED_UP and LANES < 16:  # else masks cost nothing
            units = whole_units(b, self.end)
            self.pieces = _Pieces(self.v, self.values, self.values.dim, units, self.columns)
        num_blocks = b.sdiv(b.add(self.values.dim, I64(self.columns - 1)), I64(self.columns))
        with steps(b, I64(0), num_blocks, 1) as (block, _):
            for first in range(0, rows, self.at_once):
                self.one_pass(block, range(first, min(rows, first + self.at_once)))

    def one_pass(self, block, taken):
        """Compute a block of columns for some rows."""
        b, v = self.b, self.v
        passes = (self.rows + self.at_once - 1) // self.at_once
        sums = {
            row: [cgutils.alloca_once(b, v.int_type) for _ in range(self.vectors)] for row in taken
        }
        for slot in (slot for slots in sums.values() for slot in slots):
            b.store(v.splat_int(0), slot)
        load_pair = self.pair_loader(block)
        # In turns of four, each token takes fewer instructions.
        tokens = 4 if self.in_bytes else 2
        turns = b.sdiv(b.add(self.end, I64(tokens - 1)), I64(tokens))
        with steps(b, b.sdiv(self.begin, I64(tokens)), turns, 1) as (turn, _):
            self.stream.issue(tokens * self.columns // passes, turn)
            for i in range(tokens // 2):
                pair = b.add(b.mul(turn, I64(tokens // 2)), I64(i))
                mixed = load_pair([b.add(b.mul(pair, I64(2)), I64(j)) for j in range(2)])
                for row, slots in sums.items():
                    place = b.add(self.weights.at, b.add(b.mul(pair, I64(self.rows)), I64(row)))
                    weights = v.splat(v.load_one(self.floats, place))
                    for slot, x in zip(slots, mixed, strict=True):
                        b.store(v.add_pairs(b.load(slot), x, weights), slot)
        for row in taken:
            with b.if_then(b.icmp_signed("<", I64(row), self.count)):
                self.finish(block, row, [b.load(slot) for slot in sums[row]])

    def pair_loader(self, block):
        """Return a function that loads a block of two tokens as words, for `add_pairs`."""
        b, v, words = self.b, self.v, self.values.words
        column = b.mul(block, I64(self.columns))
        left = b.sub(self.values.dim, column)
        first, offsets = self.pieces.place(block) if self.pieces else (None, None)

        def load(tokens):
            if self.pieces:
                codes = self.pieces.load_each(first, [b.gep(offsets, [t]) for t in tokens])
            else:
                starts = [b.load(b.gep(self.values.offsets, [t])) for t in tokens]
                places = [b.add(x, in_words(b, self.kind, column)) for x in starts]
                if self.narrow:
                    return v.load_level_pairs(words, places, left)
                codes = [v.load_some(self.kind, words, x, left, self.columns) for x in places]
            if self.in_bytes:
                return v.byte_pairs(*codes)
            both = [v.even_odd(x, self.kind) for x in codes]
            return [x for pair in zip(*both, strict=True) for x in v.interleave(*pair)]

        return load

    def finish(self, block, row, totals):
        """Add a block of a row's sums to the output."""
        b, v = self.b, self.v
        if self.narrow:
            columns = v.by_turns(totals)
        elif self.in_bytes:
            columns = v.columns_of_pairs(*totals)
        else:
            pairs = zip(totals[:2], totals[2:], strict=True)
            columns = v.in_order([x for pair in pairs for x in v.interleave(*pair)])
        scale = v.splat(v.load_one(self.floats, b.add(self.weights.scales_at, I64(row))))
        for j, total in enumerate(columns):
            column = b.add(b.mul(block, I64(self.columns)), I64(j * v.lanes))
            with b.if_then(b.icmp_signed("<", column, self.values.dim)):
                value = b.fmul(b.sitofp(total, v.type), scale)
                add_to_output(v, self.floats, self.outputs, I64(row), value, column)


#: Rows of at most this many elements have at most two groups.
SHORT = 64
# Tokens that one instruction multiplies: four as bytes, or two as words.
_PACKED = 4 if HAS_FOURS else 2
# Vectors of a tile's weights as words, or as low and high bytes, and where high bytes begin. With `KV_TILE` tokens,
# sums of whole bytes times weights just fit in 32 bits.
_WEIGHTS, _HIGH = KV_TILE // 2, 4 * KV_TILE
assert 255 * 32639 * KV_TILE < 2**31
# As many rows share a vector of weights at least, if there are so many.
_SHARING = LANES // 4
_BYTES = GROUP // 2


@register_jitable
def spread_query(to, row):
    """Put the elements of a query row into the order of unpacked INT4 codes.

    Each group has first the elements of low nibbles, then those of high nibbles. A short group has zeros after each.
    """
    dim = len(row)
    for first in range(0, dim, GROUP):
        half = min(GROUP, dim - first) >> 1
        for i in range(half):
            to[first + i] = row[first + i]
            to[first + _BYTES + i] = row[first + half + i]


@emits()
def sum_query_groups(b, q, q_at, head_dim, sums_at):
    """Compute the sums of a query row's integers, group by group: ``sums = q.reshape(-1, 32).sum(1)``.

    Each span of 128 elements has four sums, and zeros up to a vector, at ``q[sums_at + 16 * span]``.
    """
    v = Words(b)
    spans = b.sdiv(b.add(head_dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
    with steps(b, I64(0), spans, 1) as (span, _):
        sums = v.splat_int(0)
        for i in range(4):
            group = v.splat_int(0)
            for j in range(0, _BYTES, v.lanes):
                at = b.add(b.add(q_at, b.mul(span, I64(INT4_SPAN // 2))), I64(i * _BYTES + j))
                group = v.add_pairs(group, v.load_words(q, at), v.splat_word(1))
            width = v.lanes
            while width > 1:
                width //= 2
                other = v.shuffle(group, group, [lane ^ width for lane in range(v.lanes)])
                group = b.add(group, other)
            lanes = [v.lanes if lane == i else lane for lane in range(v.lanes)]
            sums = v.shuffle(sums, group, lanes)
        at = b.add(sums_at, b.mul(span, I64(16)))
        v.store(b.sitofp(sums, v.type), q, at)


class _Pieces:
    """Pieces of `size` bytes of a tile's rows: those of a short last one are copied, with zeros behind.

    A group of INT4, or a block of columns of INT8.
    """

    def __init__(self, v, rows, row_bytes, count, size=_BYTES):
        b = v.b
        self.v, self.rows, self.size = v, rows, size
        self.whole, left = b.sdiv(row_bytes, I64(size)), b.srem(row_bytes, I64(size))
        self.copies = scratch_floats(b, I8, size * KV_TILE)
        self.offsets = b.bitcast(scratch_floats(b, I64, KV_TILE), rows.offsets.type)
        short = b.icmp_signed(">", left, I64(0))
        with b.if_then(short, likely=False), steps(b, I64(0), count, 1) as (t, _):
            at = b.add(b.load(b.gep(rows.offsets, [t])), b.mul(self.whole, I64(size)))
            piece = v.load_bytes(rows.words, at, left, size)
            to = b.mul(t, I64(size))
            b.store(to, b.gep(self.offsets, [t]))
            place = b.gep(self.copies, [to])
            b.store(piece, b.bitcast(place, piece.type.as_pointer()), align=size)

    def place(self, piece):
        """Return what `load` needs for a piece: where its bytes are, as an address and offsets by token."""
        b = self.v.b
        short = b.icmp_signed("==", piece, self.whole)
        first = self.v.pointer(self.rows.words, b.mul(piece, I64(self.size)), I8)
        return b.select(short, self.copies, first), b.select(short, self.offsets, self.rows.offsets)

    def load_each(self, first, offsets, size=None):
        """Load `size` bytes of tokens, all by default: from `first` on, at offsets of which pointers come."""
        b = self.v.b
        type_ = ir.VectorType(I8, size or self.size).as_pointer()
        return [b.load(b.bitcast(b.gep(first, [b.load(x)]), type_), align=1) for x in offsets]

    def load(self, first, offsets, size=None):
        """Load the same bytes, side by side in a vector."""
        parts = self.load_each(first, offsets, size)
        while len(parts) > 1:
            both = [*range(2 * parts[0].type.count)]
            parts = [self.v.shuffle(*parts[i : i + 2], both) for i in range(0, len(parts), 2)]
        return parts[0]


@functools.cache
def make_qk_int4(next_kind):
    """Make `qk_int4`; `next_kind` is the storage kind of the prefetched rows."""

    @emits()
    def qk_int4(b, rows, floats, queries, keys, count, s_at, extents):
        """Compute scores of `rows` query rows and `count` INT4 rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

        In NumPy, with integers q of `quantise_query`, codes, and scales and minima of their groups::

            products = (q * codes).reshape(-1, 32).sum(1);  s = q_scale * sum(scale * products + minimum * q_sums)

        Query rows have the order of `spread_query`, with zeros up to whole spans, and are those of `interleave_bytes`.
        Their sums are those of `sum_query_groups`. `keys` has the place of the scales and minima that `gather_groups`
        recorded by group. See `qk_tile` for the rest.
        """
        emitter = _ScoresOfInt4(b, next_kind, floats, queries, keys, count, s_at, extents)
        for_rows(b, rows, emitter.emit)

    return qk_int4


class _ScoresOfInt4:
    """Emits `qk_int4`."""

    def __init__(self, b, next_kind, floats, queries, keys, count, s_at, extents):
        self.b, self.v = b, Words(b)
        self.stream = PrefetchStream(b, next_kind, extents)
        self.floats, self.queries, self.keys, self.count, self.s_at = (
            floats, queries, keys, count, s_at
        )  # fmt: skip
        if REGISTERS == 16:
            self.scratch = scratch_floats(b, self.v.float, 8 * self.v.lanes)
            self.number = opaque_number(b, I64(4))
        self.pieces = _Pieces(self.v, keys, b.ashr(keys.dim, I64(1)), whole_units(b, count))
        spans = b.sdiv(b.add(keys.dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
        self.minimum_at = b.mul(spans, I64(4 * KV_TILE))
        self.sums_step = b.mul(spans, I64(16))  # floats of a query row's sums

    def emit(self, rows):
        """The code for a number of query rows."""
        b, v = self.b, self.v
        # Each lane has one or two tokens. Weights that are repeated in all lanes are loaded once for both.
        self.sets = range(1 if rows > _ROWS and REGISTERS > 16 else 2)
        self.tokens = len(self.sets) * v.lanes
        sums = [[cgutils.alloca_once(b, v.type) for _ in self.sets] for _ in range(rows)]
        groups = b.sdiv(b.add(self.keys.dim, I64(GROUP - 1)), I64(GROUP))
        with steps(b, I64(0), self.count, self.tokens) as (t0, _):
            for slot in itertools.chain(*sums):
                b.store(v.splat(0.0), slot)
            with steps(b, I64(0), groups, 1) as (group, _):
                self.add_group(t0, group, sums)
            factors = []
            for r in range(rows):
                at = b.add(self.queries.scales_at, I64(r))
                factors.append(v.splat(v.load_one(self.floats, at)))
            at = b.add(self.s_at, b.mul(t0, I64(rows)))
            for slots in zip(*sums, strict=True):
                scores = [b.fmul(b.load(x), y) for x, y in zip(slots, factors, strict=True)]
                for x in v.by_turns(scores):
                    v.store(x, self.floats, at)
                    at = b.add(at, I64(v.lanes))

    def add_group(self, t0, group, sums):
        """Add the contribution of one group to the scores of some tokens."""
        b, v, sets = self.b, self.v, self.sets
        place = self.pieces.place(group)
        vectors = [self.codes(b.add(t0, I64(i * v.lanes)), *place) for i in sets]
        if REGISTERS == 16:
            for i, x in enumerate(itertools.chain(*vectors)):
                v.store(b.bitcast(x, v.type), self.scratch, I64(i * v.lanes))
        at = b.add(b.add(self.keys.scales_at, b.mul(group, I64(KV_TILE))), t0)
        places = [b.add(at, I64(i * v.lanes)) for i in sets]
        scales, minima = (
            [v.load_floats(self.floats, b.add(x, start)) for x in places]
            for start in (I64(0), self.minimum_at)
        )
        q_at = self.place_of_bytes(len(sums), group)
        sum_at = b.add(b.mul(b.ashr(group, I64(2)), I64(16)), b.and_(group, I64(3)))
        sum_at = b.add(self.queries.sums_at, sum_at)
        zero, add = (v.splat_int(0), v.add_fours) if DOT_PRODUCTS else (v.splat_word(0), v.add_twos)
        at_once = _MORE_ROWS if REGISTERS > 16 else 2
        for first in range(0, len(sums), at_once):
            some = range(first, min(len(sums), first + at_once))
            totals = {
                (r, half): [cgutils.alloca_once_value(b, zero) for _ in sets]
                for r in some
                for half in range(2)
            }

            def add_words(i, words, totals=totals, first=first):
                """Add products of a word of each token, low nibbles then high ones, with bytes of each query row."""
                if first == 0:
                    self.stream.issue(self.tokens * GROUP // 4)
                for upper in range(2):
                    codes = [b.lshr(x, v.splat_int(4)) for x in words] if upper else words
                    codes = [b.and_(x, v.splat_int(0x0F0F0F0F)) for x in codes]
                    for (r, half), slots in totals.items():
                        at, further = self.further(len(sums), q_at, i, upper)
                        further += half * v.lanes + r * (v.lanes // len(sums))
                        if v.has_fours and len(slots) == 1:
                            total, x = b.load(slots[0]), codes[0]
                            b.store(v.add_fours_of(total, x, self.floats, at, further), slots[0])
                            continue
                        weights = v.repeated_weights(self.floats, at, further)
                        for slot, x in zip(slots, codes, strict=True):
                            b.store(add(b.load(slot), x, weights), slot)

            self.for_words(vectors, add_words)
            for r in some:
                q_sum = b.add(sum_at, b.mul(self.sums_step, I64(r)))
                q_sum = v.splat(v.load_one(self.floats, q_sum))
                for i in sets:
                    total = self.joined(*(b.load(totals[r, half][i]) for half in range(2)))
                    value = v.fma(q_sum, minima[i], b.load(sums[r][i]))
                    b.store(v.fma(b.sitofp(total, v.type), scales[i], value), sums[r][i])

    def place_of_bytes(self, rows, group):
        """Return where a group of `rows` query rows begins in the units of `interleave_bytes`."""
        b = self.b
        at = b.mul(group, I64(16 * rows))
        if 4 * self.v.lanes // rows > GROUP:  # two groups make a unit
            at = b.sub(at, b.mul(b.and_(group, I64(1)), I64(8)))
        return b.add(self.queries.at, at)

    def further(self, rows, at, i, upper):
        """Return where word `i` of the first row's low or high nibbles is: an address, and what to add to it."""
        b, lanes = self.b, self.v.lanes
        each = lanes // rows  # words of a row in a unit, of two vectors
        if not isinstance(i, int):
            if each < 4:
                units = b.ashr(i, I64(each.bit_length() - 1))
                i = b.add(b.mul(units, I64(2 * lanes)), b.and_(i, I64(each - 1)))
            at, i = b.add(at, i), 0
        unit, word = divmod(i + 4 * upper, each)
        return at, 2 * lanes * unit + word

    def for_words(self, vectors, emit):
        """Emit ``emit(i, words)`` for vector i of each set; with 32 registers the vectors stay in them."""
        b, v = self.b, self.v
        if REGISTERS > 16:
            for i, words in enumerate(zip(*vectors, strict=True)):
                emit(i, words)
            return
        # This loop must not be unrolled: then its values would exceed 16 registers.
        with steps(b, I64(0), self.number, 1) as (i, _):
            at = [b.mul(b.add(i, I64(4 * k)), I64(v.lanes)) for k in self.sets]
            emit(i, [b.bitcast(v.load_floats(self.scratch, x), v.int_type) for x in at])

    def joined(self, high, low):
        """Combine sums of high bytes and of low bytes into sums of 32 bits."""
        b, v = self.b, self.v
        if DOT_PRODUCTS:
            return b.add(b.shl(high, v.splat_int(8)), low)
        total = v.add_pairs(v.splat_int(0), low, v.splat_word(1))
        return v.add_pairs(total, high, v.splat_word(256))

    def codes(self, t0, first, offsets):
        """Load one group of each of `lanes` tokens: vectors with four bytes of each token."""
        b, v = self.b, self.v
        some = []
        for i in range(4):
            tokens = [b.add(t0, I64(i + j)) for j in range(0, v.lanes, 4)]
            group = self.pieces.load(first, [b.gep(offsets, [t]) for t in tokens])
            some.append(b.bitcast(group, v.int_type))
        # Transpose four tokens by four lanes in each 128 bits.
        wide = ir.VectorType(I64, v.lanes // 2)
        halves = [
            [b.bitcast(x, wide) for x in v.interleave(*some[i : i + 2])] for i in range(0, 4, 2)
        ]
        turned = [x for pair in zip(*halves, strict=True) for x in v.interleave(*pair)]
        return [b.bitcast(x, v.int_type) for x in turned]


class Shares(NamedTuple):
    """How weights of INT4 groups share a vector: lanes of a token and row, rows, and tokens, which are consecutive."""

    width: int
    together: int
    tokens: int


def shares(rows, short):
    """Return how weights of so many rows share a vector. A lane is a group: four groups, or two in short rows."""
    width = 2 if short else 4
    together = min(rows, LANES // width)
    return Shares(width, together, LANES // (width * together))


@emits()
def quantise_group_probs(b, rows, s, s_at, scales_at, head_dim, begin, end, w_at, sums_at):
    """Multiply probabilities of some rows and a tile by the scales of tokens' groups, and round to 16-bit integers.

    In NumPy, with probabilities p (tokens, rows), scales and minima (tokens, groups), and 0 for tokens outside
    ``[begin, end)``, up to whole units::

        x = p[:, :, None] * scales[:, None];  sums = (p[:, :, None] * minima[:, None]).sum(0)
        unit = abs(x).max(0) / 32639;  w = rint(x / unit)

    All floats are in the array `s`: p[t, r] at ``s_at + t * rows + r``, scales and minima where `gather_groups` put
    them. Results start at `w_at`, by the rows that share a vector (see `shares`), then by span (128 elements).

    Where bytes are multiplied by fours, ``low, high = w.astype(int8), (w - low) / 256``. High bytes are stored
    `_HIGH` floats after low bytes. A lane has the bytes of four tokens for a group and a row; the rows of a group are
    neighbours. For one row and four groups, with 16 lanes and therefore n = 4 tokens in a vector of weights::

        lane      0    1    2    3  | 4    5    6    7  | ...
        group     g0   g1   g2   g3 | g0   g1   g2   g3 | ...
        tokens    0, n, 2n, 3n      | 1, n+1, 2n+1, 3n+1 | ...        in the order 0, 2, 1, 3 of `Words.bytes_of`

    Otherwise a lane has two tokens, as words. `sums_at` has, for each such block of weights, a vector of sums and a
    vector of units, by rows and groups.
    """
    probs = _GroupProbs(b, s, s_at, scales_at, head_dim, begin, end, w_at, sums_at)
    short = b.icmp_signed("<=", probs.head_dim, I64(SHORT))
    with b.if_else(short) as (of_short, of_others):
        for place, short in ((of_short, True), (of_others, False)):
            with place:
                for_rows(b, rows, lambda rows, short=short: probs.emit(rows, short))


class _GroupProbs:
    """Emit `quantise_group_probs`."""

    def __init__(self, b, data, s_at, scales_at, head_dim, begin, end, w_at, sums_at):
        self.b, self.v, self.data = b, Words(b), data
        self.s_at, self.scales_at, self.head_dim = s_at, scales_at, head_dim
        self.begin, self.end, self.w_at, self.sums_at = begin, end, w_at, sums_at
        self.spans = b.sdiv(b.add(head_dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
        self.minimum_at = b.mul(self.spans, I64(4 * KV_TILE))
        self.scratch = scratch_floats(b, self.v.float, KV_TILE * self.v.lanes)
        self.whole = whole_units(b, end)
        self.partial = b.or_(b.icmp_signed(">", begin, I64(0)), b.icmp_signed("<", end, self.whole))
        self.seen_only = scratch_floats(b, self.v.float, 2 * 4 * KV_TILE)

    def emit(self, rows, short):
        """The code for a number of query rows."""
        b = self.b
        self.rows = rows
        self.width, self.together, self.tokens = shares(rows, short)
        if short:
            self.add_span(I64(0))
        else:
            with steps(b, I64(0), self.spans, 1) as (span, _):
                self.add_span(span)

    def add_span(self, span):
        """Quantise the weights of a span, some rows at a time."""
        scales = self.scales_of(span)
        with steps(self.b, I64(0), I64(self.rows // self.together), 1) as (part, _):
            self.quantise(span, scales, part)

    def scales_of(self, span):
        """Return pointers to the scales and minima of a span, with zeros for masked tokens."""
        b, v, width = self.b, self.v, self.width
        at = b.add(self.scales_at, b.mul(span, I64(4 * KV_TILE)))
        places = [at, b.add(at, self.minimum_at)]
        with b.if_then(self.partial, likely=False):
            first, last = (b.mul(x, I64(width)) for x in (self.begin, self.end))
            for i, place in enumerate(places):
                with steps(b, I64(0), b.mul(self.whole, I64(width)), v.lanes) as (j, _):
                    below = v.lanes_below(b.sub(last, j))
                    seen = b.and_(below, b.not_(v.lanes_below(b.sub(first, j))))
                    value = v.load_floats(self.data, b.add(place, j))
                    value = b.select(seen, value, v.splat(0.0))
                    v.store(value, self.seen_only, b.add(j, I64(i * 4 * KV_TILE)))
        return [
            b.select(
                self.partial,
                v.pointer(self.seen_only, I64(i * 4 * KV_TILE), v.float),
                v.pointer(self.data, place, v.float),
            )
            for i, place in enumerate(places)
        ]

    def quantise(self, span, scales, part):
        """Quantise the weights of some rows."""
        b, v, width, together, tokens = self.b, self.v, self.width, self.together, self.tokens
        of_scales = [i // together for i in range(v.lanes)]
        of_rows = [i // (width * together) * together + i % together for i in range(v.lanes)]
        first = b.add(self.s_at, b.mul(part, I64(together)))
        totals = [cgutils.alloca_once_value(b, v.splat(0.0)) for _ in range(4)]
        peaks = [cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(4)]
        turns = b.sdiv(self.whole, I64(4 * tokens))
        with steps(b, I64(0), turns, 1) as (turn, _):
            for j in range(4):
                vector = b.add(b.mul(turn, I64(4)), I64(j))
                token = b.mul(vector, I64(tokens))
                at = b.add(first, b.mul(token, I64(self.rows)))
                p = v.load_part(self.data, at, tokens * together)
                p = v.shuffle(p, p, of_rows)
                found = []
                for base in scales:
                    x = v.load_part(base, b.mul(token, I64(width)), tokens * width)
                    found.append(v.shuffle(x, x, of_scales))
                weight = b.fmul(p, found[0])
                v.store(weight, self.scratch, b.mul(vector, I64(v.lanes)))
                b.store(v.larger_size(weight, b.load(peaks[j])), peaks[j])
                b.store(v.fma(p, found[1], b.load(totals[j])), totals[j])

        factor, scale = v.quantiser(self.merged(peaks, v.larger_int))
        place = b.add(b.mul(part, self.spans), span)
        at = b.add(self.sums_at, b.mul(place, I64(2 * v.lanes)))
        v.store(self.merged(totals, b.fadd), self.data, at)
        v.store(scale, self.data, b.add(at, I64(v.lanes)))
        w_here = b.add(self.w_at, b.mul(place, I64(_WEIGHTS * v.lanes)))
        with steps(b, I64(0), turns, 1) as (turn, _):
            at = b.mul(turn, I64(4 * v.lanes))
            weights = [v.load_floats(self.scratch, b.add(at, I64(j * v.lanes))) for j in range(4)]
            at = b.add(w_here, b.mul(turn, I64(4 // _PACKED * v.lanes)))
            made, step = (v.bytes_of, _HIGH) if _PACKED == 4 else (v.pairs_of, v.lanes)
            for j, x in enumerate(made(weights, factor)):
                v.store(b.bitcast(x, v.type), self.data, b.add(at, I64(step * j)))

    def merged(self, slots, combine):
        """Combine four vectors into one, then the tokens within it."""
        b, v = self.b, self.v
        x, y, z, w = map(b.load, slots)
        x = combine(combine(x, y), combine(z, w))
        lanes = self.width * self.together
        while lanes < v.lanes:
            x = combine(x, v.shuffle(x, x, [i ^ lanes for i in range(v.lanes)]))
            lanes *= 2
        return x


@functools.cache
def make_accumulate_int4(next_kind):
    """Make `accumulate_int4`; `next_kind` is the storage kind of the prefetched rows."""

    @emits()
    def accumulate_int4(b, rows, count, floats, weights, values, begin, end, outputs, extents):
        """Add INT4 rows weighted by integers: ``o[r, d] = rescale[r] * o[r, d] + sum over t of p[t, r] * v[t, d]``.

        In NumPy, for a quantisation group, with the results of `quantise_group_probs` at ``weights.at`` and
        ``weights.scales_at``::

            o = rescale * o + unit * (w @ codes) + sums

        Codes of four tokens are put side by side. Without fours of bytes, codes of two tokens are widened to words::

            bytes of tokens   t0: c0 c1 c2 ...   t1: c0 c1 c2 ...   t2: ...   t3: ...
            lanes             t0c0 t2c0 t1c0 t3c0 | t0c1 t2c1 t1c1 t3c1 | ...

        All floats are in one array. The first `count` of `rows` rows are written, to columns below the head dim.
        Meanwhile the memory in `extents` (the next tile's K rows) is prefetched.
        """
        taken = numbers_taken(rows, row_unroll("float32"))
        emitter = _SumsOfInt4(
            b, next_kind, count, taken, floats, weights, values, begin, end, outputs, extents
        )
        for_rows(b, rows, emitter.emit, row_unroll("float32"))

    return accumulate_int4


class _SumsOfInt4:
    """Emit `accumulate_int4`; `taken` are the numbers of rows that may be written."""

    def __init__(
        self, b, next_kind, count, taken, floats, weights, values, begin, end, outputs, extents
    ):  # fmt: skip
        self.b, self.v = b, Words(b)
        self.next_kind, self.extents = next_kind, extents
        self.count, self.taken, self.floats, self.weights = count, taken, floats, weights
        self.values, self.outputs, self.begin, self.end = values, outputs, begin, end
        self.pieces = _Pieces(self.v, values, b.ashr(values.dim, I64(1)), whole_units(b, end))
        self.spans = b.sdiv(b.add(values.dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))

    def emit(self, rows):
        """The code for a number of query rows."""
        b = self.b
        self.stream = PrefetchStream(b, self.next_kind, self.extents)
        short = b.icmp_signed("<=", self.values.dim, I64(SHORT))
        of_short, of_others = shares(rows, True), shares(rows, False)
        self.together = b.select(short, I64(of_short.together), I64(of_others.together))
        if of_short.tokens == of_others.tokens:
            self.add_groups(rows, of_short.tokens)
            return
        with b.if_else(short) as places:
            for place, of_these in zip(places, (of_short, of_others), strict=True):
                with place:
                    self.add_groups(rows, of_these.tokens)

    def add_groups(self, rows, tokens):
        """Compute all groups, with weights of so many tokens in a vector."""
        b = self.b
        self.tokens = tokens
        # The tokens of neighbouring turns interleave, so whole sets of turns are computed.
        in_set = I64(tokens * _PACKED)
        self.first_turn = b.mul(b.sdiv(self.begin, in_set), I64(tokens))
        turns = b.sdiv(b.add(self.end, b.sub(in_set, I64(1))), in_set)
        self.turns = b.mul(turns, I64(tokens))
        # Turns that read a cache line of codes; more than `_ROWS` rows read each line twice.
        self.in_line = (2 if rows > _ROWS else 1) * (4 // _PACKED)
        groups = b.sdiv(b.add(self.values.dim, I64(GROUP - 1)), I64(GROUP))
        numbers = {
            min(n - first, _ROWS) for n in self.taken if n <= rows for first in range(0, n, _ROWS)
        }
        with (
            steps(b, I64(0), groups, 1) as (group, _),
            steps(b, I64(0), self.count, _ROWS) as (first, _),
        ):
            left = b.sub(self.count, first)
            some = b.select(b.icmp_signed("<", left, I64(_ROWS)), left, I64(_ROWS))

            def add(rows, group=group, first=first):
                self.add_rows(group, first, rows)

            for_rows(b, some, add, _ROWS, sorted(numbers))

    def add_rows(self, group, first, rows):
        """Compute a group's columns for some rows."""
        b, v = self.b, self.v
        span, in_span = b.ashr(group, I64(2)), b.and_(group, I64(3))
        places, weights = [], []
        # Rows that share a vector are neighbours in it, so only the first one's address is computed.
        for start_row in range(0, rows, _SHARING):
            row = b.add(first, I64(start_row))
            place = b.add(b.mul(b.sdiv(row, self.together), self.spans), span)
            in_part = b.and_(row, b.sub(self.together, I64(1)))
            lane = b.add(b.mul(in_span, self.together), in_part)
            for to, start, step in (
                (weights, self.weights.at, _WEIGHTS), (places, self.weights.scales_at, 2)
            ):  # fmt: skip
                to.append(b.add(b.add(start, lane), b.mul(place, I64(step * v.lanes))))
        # Bytes of a token whose sums stay in registers.
        size = _BYTES if REGISTERS > 16 or rows <= _ROWS // 2 else _BYTES // 2
        base, offsets = self.pieces.place(group)
        with steps(b, I64(0), I64(_BYTES), size) as (byte, _):
            start = b.gep(base, [byte])
            for r, totals in enumerate(self.sums(start, offsets, size, weights, rows)):
                at = b.add(places[r // _SHARING], I64(r % _SHARING))
                self.finish(group, byte, b.add(first, I64(r)), totals, at)

    def sums(self, start, offsets, size, weights, rows):
        """Yield the sums of some columns of a group for each row, in the order of `codes`."""
        b, v = self.b, self.v
        add, halves = (v.add_fours, 2) if v.has_fours else (v.add_pairs, 1)
        # Keys are the row, the half of the weights (low or high bytes), and the vector of codes.
        number = 2 * size // v.lanes
        keys = itertools.product(range(rows), range(halves), range(number))
        sums = {key: cgutils.alloca_once_value(b, v.splat_int(0)) for key in keys}
        in_line = self.in_line * _BYTES // size
        with steps(b, self.first_turn, self.turns, 1) as (turn, _):
            first = b.icmp_signed("==", b.and_(turn, I64(in_line - 1)), I64(0))
            with b.if_then(first):
                self.stream.issue(INT4_SPAN)
            codes = [*self.codes(turn, start, offsets, size)]
            here = [b.add(x, b.mul(turn, I64(v.lanes // self.tokens))) for x in weights]
            for r, i in itertools.product(range(rows), range(halves)):
                at, further = here[r // _SHARING], _HIGH * i + r % _SHARING
                repeated = v.repeated_weights(self.floats, at, further)
                for k, x in enumerate(codes):
                    slot = sums[r, i, k]
                    b.store(add(b.load(slot), x, repeated), slot)
        for r in range(rows):
            parts = [[b.load(sums[r, i, k]) for i in range(halves)] for k in range(number)]
            if halves == 1:
                yield [part for (part,) in parts]
            else:
                yield [b.add(low, b.shl(high, v.splat_int(8))) for low, high in parts]

    def codes(self, turn, start, offsets, size):
        """Yield a turn's codes of `size` bytes of a group, from `start` on: low nibbles, then whole bytes, per vector.

        Whole bytes stand for high nibbles; `finish` subtracts the low ones.
        """
        b, v = self.b, self.v
        # The first of four tokens (or of two) is ``turn // tokens * 4 * tokens + turn % tokens``.
        whole_vectors = b.and_(turn, I64(-self.tokens))
        token = b.add(turn, b.mul(whole_vectors, I64(_PACKED - 1)))
        # LLVM would count up an address for each of them.
        first = b.gep(offsets, [opaque_number(b, token)])
        places = [b.gep(first, [I64(self.tokens * i)]) for i in range(_PACKED)]
        x = self.pieces.load(start, places, size)
        mixed = [v.mixed_fours(x)] if v.has_fours else v.mixed_pairs(x)
        low = v.splat_int(0x0F0F0F0F)
        for x in mixed:
            whole = b.bitcast(x, v.int_type)
            yield from (b.and_(whole, low), whole)

    def finish(self, group, byte, row, totals, at):
        """Add a group's sums, in the order of `codes`, to the output row."""
        b, v = self.b, self.v
        minimum, scale = (v.splat(v.load_one(self.floats, b.add(at, I64(i)))) for i in (0, v.lanes))
        column = b.mul(group, I64(GROUP))
        left = b.ashr(b.sub(self.values.dim, column), I64(1))
        half = b.select(b.icmp_signed("<", left, I64(_BYTES)), left, I64(_BYTES))
        for i, x in enumerate(totals):
            if i % 2:  # sums of whole bytes, where a high nibble counts 16 times
                x = b.ashr(b.sub(x, totals[i - 1]), v.splat_int(4))
            first = b.add(byte, I64(i // 2 * v.lanes))
            start = b.add(b.add(column, half) if i % 2 else column, first)
            value = v.fma(b.sitofp(x, v.type), scale, minimum)
            here = b.sub(half, first)
            # Masks are slow on AVX2, so whole vectors go without.
            masks = None, v.lanes_below(here)
            whole = b.icmp_signed(">=", here, I64(v.lanes))
            with b.if_else(whole, likely=True) as places:
                for place, mask in zip(places, masks, strict=True):
                    with place:
                        add_to_output(v, self.floats, self.outputs, row, value, start, mask)
