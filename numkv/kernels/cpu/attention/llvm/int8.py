"""Attention in integers where rows are INT8: queries and probabilities as 16-bit integers, and the sum of V rows.

Codes meet integers of 16 bits, not floats. Probabilities take 15 bits of the largest in the tile: what is lost beside
codes of 7 or 4 bits does not count. What belongs to a whole tile (the integers' common scale) is multiplied once, at
its end. Codes are widened to 16 bits, and one instruction multiplies and adds as many pairs as a vector has 32-bit
lanes. Scores are those of `qk`, which takes integers too.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.emit import I16, I64, emits, for_rows, steps
from numkv.kernels.cpu.vectors.features import FEATURES, row_unroll
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.stored import in_words
from numkv.kernels.cpu.vectors.vectors import Vectors
from numkv.kernels.cpu.vectors.words import Words

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
        emitter = _Int8(
            b, (kind, next_kind), count, floats, weights, values, begin, end, outputs, extents
        )
        for_rows(b, rows, emitter.emit, row_unroll("float32"))

    return accumulate_int8


class _Int8:
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
