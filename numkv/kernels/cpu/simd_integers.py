"""Vector code for attention in integers: weighted sums of INT8 and INT4 rows, and scores of INT4 rows.

Codes meet integers of 16 bits, not floats: queries that `code_row` made, or the weights of a tile's tokens. What
belongs to a whole tile (the weights' common scale) is multiplied once, at its end. Weights take 15 bits of the largest
in the tile: what is lost beside codes of 7 or 4 bits does not count. Codes are widened to 16 bits, and one instruction
multiplies and adds as many pairs as a vector has 32-bit lanes. Weighted sums of INT4 do without widening: they take the
weights' low bytes and their high ones apart, and one instruction multiplies and adds fours of bytes.

=======================  ====================================================================================
`code_weights`           probabilities times the scales of INT8 rows, as 16-bit integers
`code_group_weights`     the same for the groups of INT4 rows, and what their lowest levels add up to
`weigh_integers`         add the tile's V rows, weighted by such integers, to the output rows
`fill_code_row`          a query row as it meets INT4 codes; `sum_code_groups` adds up groups
`score_integers`         dot products of such query rows with a tile of INT4 rows
=======================  ====================================================================================

How bytes become lanes. A vector of bytes is taken as words of 16 bits: INT8 gives the even bytes and the odd ones,
INT4 the low and the high nibbles of either. In sums over tokens of INT8, the words of two tokens are interleaved, so
that a lane holds a pair of tokens for one column; `Words.in_order` brings sums back into the order of columns. Every
128 bits of an INT4 row are one group. For scores, groups take turns lane by lane: few lanes then have all groups, and
one product with a vector of scales serves them all. In sums over tokens, a lane holds a column's bytes of four tokens,
and a vector those of one group. A byte is both of its nibbles at once: from sums of whole bytes, the sums of low
nibbles leave 16 times those of high ones.

Float64 goes the way of `simd`; so does INT4 where vectors of bytes have less than 512 bits.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from numkv.kernels.cpu.simd import (
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    INT4_INTEGERS,
    LANES,
    TILE,
    Ahead,
    Vectors,
    data_of,
    for_rows,
    literals,
    most_rows,
    scratch_floats,
    steps,
)
from numkv.rows.int4 import GROUP

__all__ = [
    "BLOCK",
    "INT4_INTEGERS",
    "code_group_weights",
    "code_weights",
    "fill_code_row",
    "score_integers",
    "sum_code_groups",
    "weigh_integers",
]

#: Elements of INT4 that are taken at once: four groups.
BLOCK = 128
# Rows of at most so many elements, two groups, share vectors by twos.
SHORT = 64
#: Rows whose sums fit into registers.
_ROWS = 4
_LARGEST = 32639.0


class Words(Vectors):
    """Vectors of 16-bit integers, twice as many as floats."""

    def __init__(self, builder):
        super().__init__(builder, "float32")
        self.word_type = ir.VectorType(I16, 2 * self.lanes)
        # Whether products of bytes are added by fours at once.
        self.has_fours = self.lanes == 16 and "avx512vnni" in FEATURES

    def splat_word(self, value):
        """A vector whose words are all a number."""
        return ir.Constant(self.word_type, [ir.Constant(I16, value)] * self.word_type.count)

    def words(self, vector):
        """The same bits as 16-bit integers."""
        return self.b.bitcast(vector, self.word_type)

    def load_int8(self, base, at, count):
        """Load `count` codes of INT8, at most ``4 * lanes``, as words: the even ones and the odd ones.

        Past `count` codes are 0, and memory is not touched.
        """
        words = self.words(self._load_bytes(base, at, count, 4 * self.lanes))
        eight = self.splat_word(8)
        return [self.b.ashr(self.b.shl(words, eight), eight), self.b.ashr(words, eight)]

    def load_int4(self, base, places, count):
        """Load `count` bytes of INT4 codes of a row, the others 0; or of two short rows, one in each half.

        They come as 32-bit lanes.
        """
        size = 4 * self.lanes // len(places)
        rows = [self._load_bytes(base, at, count, size) for at in places]
        row = rows[0] if len(rows) == 1 else self.shuffle(*rows, [*range(2 * size)])
        return self.b.bitcast(row, self.int_type)

    def _load_bytes(self, base, at, count, size):
        """Load `count` bytes into a vector of `size`; the others are 0."""
        type_ = ir.VectorType(I8, size)
        iota = ir.Constant(type_, [ir.Constant(I8, i) for i in range(size)])
        some = self.b.select(self.b.icmp_signed("<", count, I64(size)), count, I64(size))
        first = self.b.insert_element(
            ir.Constant(type_, ir.Undefined), self.b.trunc(some, I8), I32(0)
        )
        mask = self.b.icmp_unsigned("<", iota, self.shuffle(first, first, [0] * size))
        pointer = self._pointer(base, at, I8)
        if LANES == 16:
            return self._masked_load(pointer, type_, 1, mask)
        # Without masks in hardware, byte by byte: only where a row ends.
        value = cgutils.alloca_once(self.b, type_)
        whole = self.b.icmp_signed(">=", count, I64(size))
        with self.b.if_else(whole) as (of_whole, of_rest):
            with of_whole:
                wide = self.b.bitcast(pointer, type_.as_pointer())
                self.b.store(self.b.load(wide, align=1), value)
            with of_rest:
                self.b.store(self._masked_load(pointer, type_, 1, mask), value)
        return self.b.load(value)

    def nibbles(self, codes):
        """Bytes of two INT4 codes as words: of even and odd bytes the low nibbles, then of both the high ones."""
        words = self.words(codes)
        shifted = [self.b.lshr(words, self.splat_word(bits)) for bits in (8, 4, 12)]
        low = self.splat_word(15)
        return [self.b.and_(x, low) for x in (words, *shifted[:2])] + shifted[2:]

    def add_fours(self, total, codes, weights):
        """``total + codes * weights`` of bytes, without a sign and with one; four neighbouring products are added.

        Products of two neighbours stay below 2**15, unless there is an instruction for four (see `has_fours`).
        """
        codes, weights = (self.b.bitcast(x, total.type) for x in (codes, weights))
        if self.has_fours:
            signature = ir.FunctionType(total.type, [total.type] * 3)
            add = ir.InlineAsm(signature, "vpdpbusd $2, $1, $0", "=v,v,v,0")
            return self.b.call(add, [codes, weights, total])
        bytes_type = ir.VectorType(I8, 4 * self.lanes)
        signature = ir.FunctionType(self.word_type, [bytes_type] * 2)
        function = cgutils.get_or_insert_function(
            self.b.module, signature, "llvm.x86.avx512.pmaddubs.w.512"
        )
        pairs = self.b.call(function, [self.b.bitcast(x, bytes_type) for x in (codes, weights)])
        return self.add_pairs(total, pairs, self.splat_word(1))

    def interleave(self, a, b):
        """Elements of two vectors by turns, within each 128 bits: of their lower halves, and of their upper ones."""
        count = a.type.count
        each = 16 * count // (4 * self.lanes)
        found = []
        for half in (range(each // 2), range(each // 2, each)):
            lanes = [x for start in range(0, count, each) for i in half
                     for x in (start + i, count + start + i)]  # fmt: skip
            found.append(self.shuffle(a, b, lanes))
        return found

    def in_order(self, parts):
        """Four vectors, each with every fourth piece of 128 bits, as four with the pieces in order."""
        pieces = self.lanes // 4

        def piece(*numbers):
            return [4 * number + i for number in numbers for i in range(4)]

        if pieces == 1:
            return parts
        if pieces == 2:
            pairs = [(j, i) for j in range(2) for i in (0, 2)]
            return [self.shuffle(parts[i], parts[i + 1], piece(j, 2 + j)) for j, i in pairs]
        found = []
        for j in (0, 2):
            halves = [
                self.shuffle(parts[i], parts[i + 1], piece(j, 4 + j, j + 1, 5 + j)) for i in (0, 2)
            ]
            found += [
                self.shuffle(*halves, piece(0, 1, 4, 5)),
                self.shuffle(*halves, piece(2, 3, 6, 7)),
            ]
        return found

    def larger_size(self, x, peak):
        """The larger magnitude, lane by lane, as bits, which are in the order of magnitudes and end with NaN's."""
        bits = self.b.and_(self.b.bitcast(x, self.int_type), self.splat_int(0x7FFFFFFF))
        return self.larger_int(bits, peak)

    def larger_int(self, a, b):
        """Lane by lane the larger integer."""
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def quantiser(self, peak):
        """What makes integers of weights whose magnitudes are up to `peak`, and what undoes it, lane by lane.

        `peak` is what `larger_size` found; both are NaN where a weight is not finite.
        """
        finite = self.b.icmp_signed("<", peak, self.splat_int(0x7F800000))
        # Far below that a factor would overflow.
        least = self.splat_int(int(np.float32(1e-33).view(np.int32)))
        peak = self.b.bitcast(self.larger_int(peak, least), self.type)
        peak = self.b.select(finite, peak, self.splat(math.nan))
        factor = self.b.fdiv(self.splat(_LARGEST), peak)
        return factor, self.b.fmul(peak, self.splat(1 / _LARGEST))

    def pairs(self, low, high):
        """The low 16 bits of integers, side by side in 32-bit lanes."""
        return self.b.or_(
            self.b.and_(low, self.splat_int(0xFFFF)), self.b.shl(high, self.splat_int(16))
        )

    def nearest(self, x):
        """The nearest integers of floats whose magnitude is below 2**22, in the low bits of 32-bit lanes."""
        shifted = self.b.fadd(x, self.splat(12582912.0))  # 1.5 * 2**23
        return self.b.bitcast(shifted, self.int_type)

    def bytes_of(self, weights, factor):
        """Four vectors of weights, times a factor, as integers: two vectors of bytes with signs, low and high ones.

        The integer is ``low + 256 * high``. In each 32 bits the bytes are of vectors 0, 2, 1 and 3.
        """
        # With 128 more, high bytes are what they should be, and low ones those with the other sign bit.
        magic = self.splat(12582912.0 + 128)
        a, b, c, d = (self.b.bitcast(self.fma(x, factor, magic), self.int_type) for x in weights)
        first, last = self.pairs(a, b), self.pairs(c, d)
        even, odd, eight = (self.splat_int(x) for x in (0x00FF00FF, 0xFF00FF00 - 2**32, 8))
        low = self.b.or_(self.b.and_(first, even), self.b.and_(self.b.shl(last, eight), odd))
        high = self.b.or_(self.b.and_(self.b.lshr(first, eight), even), self.b.and_(last, odd))
        return self.b.xor(low, self.splat_int(0x80808080 - 2**32)), high

    def mixed_fours(self, a, b, c, d):
        """Bytes of four vectors side by side, in the order of `bytes_of`: those of every fourth lane."""
        pairs = zip(self.interleave(a, c), self.interleave(b, d), strict=True)
        return [x for pair in pairs for x in self.interleave(*map(self.words, pair))]


def settle(builder, pointer):
    """Have what was stored at a pointer read from memory: LLVM would take vectors apart to keep a part of it."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type])
    nothing = ir.InlineAsm(signature, "", "r,~{memory}", side_effect=True)
    builder.call(nothing, [pointer])


def shares(rows, short):
    """How weights of INT4 groups share a vector: lanes of a token and a row, rows, and tokens.

    Lanes are those of groups, of which short rows have two. Of several tokens, those of a vector follow each other.
    """
    width = 2 if short else 4
    together = min(rows, 16 // width)
    return width, together, 16 // (width * together)


@intrinsic
def code_weights(typing_context, rows, s, s_at, factors_at, begin, end, scales_at):
    """Replace probabilities of `rows` rows and a tile by 16-bit integers, each token's times its factor.

    All floats are in the array `s`: p[t, r] at ``s_at + t * rows + r``, and the factors of tokens at `factors_at`. 32
    bits with the integers of tokens 2i and 2i + 1 take the place of p[i, r]. The scales of rows go to `scales_at`,
    up to a whole vector. Tokens outside ``[begin, end)`` get 0, whatever their factors are.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[1], args[1])
        s_at, factors_at, begin, end, scales_at = args[2:]

        def emit(rows):
            v = Words(b)
            each = v.lanes // rows  # tokens in a vector
            first, last = (b.mul(x, I64(rows)) for x in (begin, end))
            peaks = [cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(2)]
            with steps(b, I64(0), I64(TILE * rows), 2 * v.lanes) as (i, _):
                for j, slot in enumerate(peaks):
                    here = b.add(i, I64(j * v.lanes))
                    at = b.add(s_at, here)
                    token = b.add(factors_at, b.sdiv(here, I64(rows)))
                    weight = b.fmul(v.load_floats(data, at), v.stretched(data, token, each))
                    below = v.lanes_below(b.sub(last, here))
                    seen = b.and_(below, b.not_(v.lanes_below(b.sub(first, here))))
                    weight = b.select(seen, weight, v.splat(0.0))
                    v.store(weight, data, at)
                    b.store(v.larger_size(weight, b.load(slot)), slot)
            peak = v.fold_by_row(v.larger_int(*map(b.load, peaks)), I64(rows), v.larger_int)
            factor, scale = v.quantiser(peak)
            v.store(scale, data, scales_at)
            even = [2 * turn * rows + r for turn in range(each) for r in range(rows)]
            odd = [i + rows for i in even]
            with steps(b, I64(0), I64(TILE * rows // 2), v.lanes) as (i, _):
                at = b.add(b.add(s_at, i), i)
                codes = []
                for j in range(2):
                    weight = v.load_floats(data, b.add(at, I64(j * v.lanes)))
                    codes.append(v.nearest(b.fmul(weight, factor)))
                pairs = v.pairs(v.shuffle(*codes, even), v.shuffle(*codes, odd))
                v.store(b.bitcast(pairs, v.type), data, b.add(s_at, i))

        for_rows(b, args[0], emit, most_rows("float32"))
        return context.get_dummy_value()

    return types.void(i8, s, i8, i8, i8, i8, i8), codegen


@intrinsic
def code_group_weights(
    typing_context, rows, s, s_at, scales_at, head_dim, begin, end, w_at, sums_at
):  # fmt: skip
    """Probabilities of `rows` rows and a tile times the scales of tokens' groups, as 16-bit integers.

    All floats are in the array `s`: p[t, r] at ``s_at + t * rows + r``, and at `scales_at` what `gather_groups` made
    for rows of `head_dim`. `shares` says how many rows are taken together. For each time that, and for each block,
    there are at `w_at` the low bytes of integers and, 256 floats on, the high ones: of four tokens those of a row and a
    group are side by side, and follow each other by groups, by rows, and by fours of tokens. If a vector has n tokens,
    four i has the tokens ``i % n`` of vectors ``i // n * 4`` and on. At `sums_at` are as often what the lowest levels
    add up to, ``sum of p[t] * lowest[t]``, and the scales of integers: of each a vector, by groups and by rows. Tokens
    outside ``[begin, end)`` get 0.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[1], args[1])
        rows, _, s_at, scales_at, head_dim, begin, end, w_at, sums_at = args
        v = Words(b)
        blocks = b.sdiv(b.add(head_dim, I64(BLOCK - 1)), I64(BLOCK))
        lowest_at = b.mul(blocks, I64(4 * TILE))
        scratch = scratch_floats(b, v.float, TILE * v.lanes)
        partial = b.or_(b.icmp_signed(">", begin, I64(0)), b.icmp_signed("<", end, I64(TILE)))
        seen_only = scratch_floats(b, v.float, 2 * 4 * TILE)

        def levels_of(block, width):
            """Where scales and lowest levels of a block are: zeros for tokens that are not seen."""
            at = b.add(scales_at, b.mul(block, I64(4 * TILE)))
            places = [at, b.add(at, lowest_at)]
            with b.if_then(partial, likely=False):
                first, last = (b.mul(x, I64(width)) for x in (begin, end))
                for i, place in enumerate(places):
                    with steps(b, I64(0), I64(width * TILE), v.lanes) as (j, _):
                        below = v.lanes_below(b.sub(last, j))
                        seen = b.and_(below, b.not_(v.lanes_below(b.sub(first, j))))
                        value = b.select(seen, v.load_floats(data, b.add(place, j)), v.splat(0.0))
                        v.store(value, seen_only, b.add(j, I64(i * 4 * TILE)))
            return [
                b.select(
                    partial,
                    v._pointer(seen_only, I64(i * 4 * TILE), v.float),
                    v._pointer(data, place, v.float),
                )
                for i, place in enumerate(places)
            ]

        def emit(rows, short):
            width, together, tokens = shares(rows, short)
            of_levels = [i // (width * together) * width + i % width for i in range(16)]

            def code(block, levels, part):
                """The weights of some rows."""
                first = b.add(s_at, b.mul(part, I64(together)))
                totals = [cgutils.alloca_once_value(b, v.splat(0.0)) for _ in range(4)]
                peaks = [cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(4)]
                turns = TILE // (4 * tokens)
                with steps(b, I64(0), I64(turns), 1) as (turn, _):
                    for j in range(4):
                        vector = b.add(b.mul(turn, I64(4)), I64(j))
                        token = b.mul(vector, I64(tokens))
                        at = b.add(first, b.mul(token, I64(rows)))
                        p = v.stretched(data, at, tokens * together)
                        found = []
                        for base in levels:
                            level = v.load_part(base, b.mul(token, I64(width)), tokens * width)
                            found.append(v.shuffle(level, level, of_levels))
                        weight = b.fmul(p, found[0])
                        v.store(weight, scratch, b.mul(vector, I64(v.lanes)))
                        b.store(v.larger_size(weight, b.load(peaks[j])), peaks[j])
                        b.store(v.fma(p, found[1], b.load(totals[j])), totals[j])

                def merged(slots, combine):
                    x, y, z, w = map(b.load, slots)
                    x = combine(combine(x, y), combine(z, w))
                    lanes = width * together
                    while lanes < v.lanes:
                        x = combine(x, v.shuffle(x, x, [i ^ lanes for i in range(v.lanes)]))
                        lanes *= 2
                    return x

                factor, scale = v.quantiser(merged(peaks, v.larger_int))
                place = b.add(b.mul(part, blocks), block)
                at = b.add(sums_at, b.mul(place, I64(32)))
                v.store(merged(totals, b.fadd), data, at)
                v.store(scale, data, b.add(at, I64(16)))
                w_here = b.add(w_at, b.mul(place, I64(512)))
                with steps(b, I64(0), I64(turns), 1) as (turn, _):
                    at = b.mul(turn, I64(4 * v.lanes))
                    weights = [
                        v.load_floats(scratch, b.add(at, I64(j * v.lanes))) for j in range(4)
                    ]
                    at = b.add(w_here, b.mul(turn, I64(v.lanes)))
                    for j, x in enumerate(v.bytes_of(weights, factor)):
                        v.store(b.bitcast(x, v.type), data, b.add(at, I64(256 * j)))

            def code_block(block):
                levels = levels_of(block, width)
                with steps(b, I64(0), I64(rows // together), 1) as (part, _):
                    code(block, levels, part)

            if short:
                code_block(I64(0))
            else:
                with steps(b, I64(0), blocks, 1) as (block, _):
                    code_block(block)

        with b.if_else(b.icmp_signed("<=", head_dim, I64(SHORT))) as (of_short, of_others):
            for place, short in ((of_short, True), (of_others, False)):
                with place:
                    for_rows(b, rows, lambda rows, short=short: emit(rows, short))
        return context.get_dummy_value()

    return types.void(i8, s, i8, i8, i8, i8, i8, i8, i8), codegen


@intrinsic(prefer_literal=True)
def weigh_integers(
    typing_context, KIND, rows, count, w, w_at, w_scales_at, v, v_offsets, begin, end, head_dim, sums_at,
    o_at, o_step, rescale_at, AHEAD_KIND, runs,
):  # fmt: skip
    """Add V rows weighted by integers: ``o[r, d] = rescale[r] * o[r, d] + sum over t of weight[t, r] * v[t, d]``.

    All floats are in the array `w`. The weights at `w_at` are those of `code_weights`, which put their scales at
    `w_scales_at`, or of `code_group_weights`, which put their scales and the sums of lowest levels at `sums_at`.
    Of the `rows` rows the first `count` are written, to columns below `head_dim`; up to 15 more get what does not
    matter. Meanwhile the memory in `runs` (the next tile's K rows, of `AHEAD_KIND`) is asked for.
    """
    if not literals(KIND, AHEAD_KIND):
        return None
    kind, ahead_kind = (a.literal_value for a in (KIND, AHEAD_KIND))
    i8 = types.int64
    signature = types.void(
        KIND, i8, i8, w, i8, i8, v, v_offsets, i8, i8, i8, i8, i8, i8, i8, AHEAD_KIND, runs,
    )  # fmt: skip

    def codegen(context, b, sig, args):
        rows, count, w_at, w_scales_at = (args[i] for i in (1, 2, 4, 5))
        begin, end, head_dim = args[8:11]
        sums_at, o_at, o_step, rescale_at = args[11:15]
        w_data, v_data, offsets, runs = (
            data_of(context, b, sig.args[i], args[i]) for i in (3, 6, 7, 16)
        )

        def add_to(v, row, value, column, mask=None):
            """Add a vector of columns to what is there of a row, rescaled."""
            rescale = v.splat(v.load_one(w_data, b.add(rescale_at, row)))
            place = b.add(b.add(o_at, b.mul(row, o_step)), column)
            value = v.fma(v.load_floats(w_data, place, mask), rescale, value)
            if mask is None:
                v.store(value, w_data, place)
            else:
                v.store_masked(value, w_data, place, mask)

        def emit_int8(rows):
            v = Words(b)
            ahead = Ahead(b, ahead_kind, runs)
            columns = 4 * v.lanes
            passes = (rows + _ROWS - 1) // _ROWS
            num_blocks = b.sdiv(b.add(head_dim, I64(columns - 1)), I64(columns))

            def one_pass(block, taken):
                """A block of columns, for some rows."""
                sums = {
                    row: [cgutils.alloca_once(b, v.int_type) for _ in range(4)] for row in taken
                }
                for slot in (slot for slots in sums.values() for slot in slots):
                    b.store(v.splat_int(0), slot)
                at = b.mul(block, I64(columns))
                left = b.sub(head_dim, at)
                turns = b.ashr(b.add(end, I64(1)), I64(1))
                with steps(b, b.ashr(begin, I64(1)), turns, 1) as (turn, _):
                    ahead.ask(2 * columns // passes, turn)
                    codes = []
                    for i in range(2):
                        token = b.add(b.mul(turn, I64(2)), I64(i))
                        place = b.add(b.load(b.gep(offsets, [token])), at)
                        codes.append(v.load_int8(v_data, place, left))
                    mixed = [x for pair in zip(*codes, strict=True) for x in v.interleave(*pair)]
                    for row in taken:
                        at_turn = b.add(w_at, b.add(b.mul(turn, I64(rows)), I64(row)))
                        weights = v.splat(v.load_one(w_data, at_turn))
                        for slot, x in zip(sums[row], mixed, strict=True):
                            b.store(v.add_pairs(b.load(slot), x, weights), slot)
                for row in taken:
                    with b.if_then(b.icmp_signed("<", I64(row), count)):
                        finish(block, row, [b.load(slot) for slot in sums[row]])

            def finish(block, row, totals):
                pairs = zip(totals[:2], totals[2:], strict=True)
                pieces = [x for pair in pairs for x in v.interleave(*pair)]
                scale = v.splat(v.load_one(w_data, b.add(w_scales_at, I64(row))))
                for j, total in enumerate(v.in_order(pieces)):
                    column = b.add(b.mul(block, I64(columns)), I64(j * v.lanes))
                    with b.if_then(b.icmp_signed("<", column, head_dim)):
                        value = b.fmul(b.sitofp(total, v.type), scale)
                        add_to(v, I64(row), value, column)

            with steps(b, I64(0), num_blocks, 1) as (block, _):
                for first in range(0, rows, _ROWS):
                    one_pass(block, range(first, min(rows, first + _ROWS)))

        def emit_int4(short):
            v = Words(b)
            ahead = Ahead(b, ahead_kind, runs)
            num_blocks = b.sdiv(b.add(head_dim, I64(BLOCK - 1)), I64(BLOCK))
            width = 2 if short else 4
            # What `shares` says, and lanes of four tokens.
            most = 16 // width
            few = b.icmp_signed("<", rows, I64(most))
            in_four = b.select(few, b.mul(rows, I64(width)), I64(16))
            tokens = b.sdiv(I64(16), in_four)
            fours = 2 if short else 1  # of tokens, in a turn
            # Turns whose tokens lie between each other's are all taken.
            span = b.select(b.icmp_signed(">", tokens, I64(fours)), tokens, I64(fours))
            in_span, of_span = b.mul(span, I64(4)), b.sdiv(span, I64(fours))
            first_turn = b.mul(b.sdiv(begin, in_span), of_span)
            turns = b.sdiv(b.add(end, b.sub(in_span, I64(1))), in_span)
            turns = b.mul(turns, of_span)
            # Of a turn eight vectors: of groups the low nibbles, then the bytes as they are.
            codes = scratch_floats(b, v.float, TILE // 4 * 8 * v.lanes)
            # A turn has the elements of four blocks, and they are asked for a block at a time: by many rows not in all
            # turns, and if there are few rows, more while codes are mixed.
            seldom = b.select(b.icmp_signed(">", rows, I64(4)), I64(1), I64(0))

            def ask(turn):
                with b.if_then(b.icmp_signed("==", b.and_(turn, seldom), I64(0))):
                    ahead.ask(BLOCK)

            bytes_type = ir.VectorType(I8, 4 * v.lanes)

            def code_at(turn, i, j):
                return b.mul(b.add(b.mul(turn, I64(8)), I64(4 * i + j)), I64(v.lanes))

            def mix(block):
                """Put codes of four tokens side by side, for all rows."""
                at = b.mul(block, I64(BLOCK // 2))
                left = b.sub(b.ashr(head_dim, I64(1)), at)
                with steps(b, first_turn, turns, 1) as (turn, _):
                    ask(turn)
                    for number in (2, 1):
                        with b.if_then(b.icmp_signed("<=", rows, I64(number))):
                            ahead.ask(BLOCK)
                    found = []
                    for j in range(4):
                        places = []
                        for i in range(fours):
                            four = b.add(b.mul(turn, I64(fours)), I64(i))
                            in_vector = b.and_(four, b.sub(tokens, I64(1)))
                            vector = b.add(b.mul(b.sub(four, in_vector), I64(4)), in_vector)
                            token = b.add(vector, b.mul(tokens, I64(j)))
                            places.append(b.add(b.load(b.gep(offsets, [token])), at))
                        row = v.load_int4(v_data, places, left)
                        # So that each of what is mixed is of one group.
                        lanes = [4 * k + i for i in range(4) for k in range(4)]
                        found.append(b.bitcast(v.shuffle(row, row, lanes), bytes_type))
                    for j, x in enumerate(v.mixed_fours(*found)):
                        x = b.bitcast(x, v.int_type)
                        low = b.and_(x, v.splat_int(0x0F0F0F0F))
                        if not v.has_fours:
                            x = b.and_(b.lshr(x, v.splat_int(4)), v.splat_int(0x0F0F0F0F))
                        for i, y in enumerate((low, x)):
                            v.store(b.bitcast(y, v.type), codes, code_at(turn, i, j))

            def weigh(block, row):
                """A block of columns, for one row."""
                part = b.ashr(row, I64(most.bit_length() - 1))
                place = b.add(b.mul(part, num_blocks), block)
                lane = b.mul(b.and_(row, I64(most - 1)), I64(width))
                w_here = b.add(b.add(w_at, b.mul(place, I64(512))), lane)
                # By low and high bytes of weights, what the codes are, and groups, of short rows twice.
                sums = {
                    key: cgutils.alloca_once(b, v.int_type)
                    for key in itertools.product(range(2), range(2), range(4))
                }
                for slot in sums.values():
                    b.store(v.splat_int(0), slot)
                with steps(b, first_turn, turns, 1) as (turn, _):
                    ask(turn)
                    for j in range(4):
                        four = b.add(b.mul(turn, I64(fours)), I64(j // width))
                        at = b.add(w_here, b.mul(four, in_four))
                        at = b.add(at, I64(j % width))
                        weights = [
                            v.splat(v.load_one(w_data, b.add(at, I64(256 * i)))) for i in range(2)
                        ]
                        for k in range(2):
                            x = v.load_floats(codes, code_at(turn, k, j))
                            for i in range(2):
                                slot = sums[i, k, j]
                                b.store(v.add_fours(b.load(slot), x, weights[i]), slot)
                at = b.add(b.add(sums_at, b.mul(place, I64(32))), lane)
                for j in range(width):
                    lowest, scale = (
                        v.splat(v.load_one(w_data, b.add(at, I64(i + j)))) for i in (0, 16)
                    )
                    totals = []
                    for k in range(2):
                        x, y = (
                            functools.reduce(
                                b.add, [b.load(sums[i, k, n]) for n in range(j, 4, width)]
                            )
                            for i in range(2)
                        )
                        totals.append(b.add(x, b.shl(y, v.splat_int(8))))
                    low, high = totals
                    if v.has_fours:  # of whole bytes: high nibbles count 16 times
                        high = b.ashr(b.sub(high, low), v.splat_int(4))
                    column = b.add(b.mul(block, I64(BLOCK)), I64(j * GROUP))
                    left = b.ashr(b.sub(head_dim, column), I64(1))
                    half = b.select(b.icmp_signed("<", left, I64(16)), left, I64(16))
                    with b.if_then(b.icmp_signed(">", left, I64(0))):
                        for x, start in ((low, column), (high, b.add(column, half))):
                            value = v.fma(b.sitofp(x, v.type), scale, lowest)
                            add_to(v, row, value, start, v.lanes_below(half))

            def add_block(block):
                mix(block)
                with steps(b, I64(0), count, 1) as (row, _):
                    weigh(block, row)

            if short:
                add_block(I64(0))
            else:
                with steps(b, I64(0), num_blocks, 1) as (block, _):
                    add_block(block)

        if kind == "int8":
            for_rows(b, rows, emit_int8, most_rows("float32"))
            return context.get_dummy_value()
        with b.if_else(b.icmp_signed("<=", head_dim, I64(SHORT))) as (of_short, of_others):
            for place, short in ((of_short, True), (of_others, False)):
                with place:
                    emit_int4(short)
        return context.get_dummy_value()

    return signature, codegen


@register_jitable
def fill_code_row(to, row, scale):
    """Put the elements of a query row, times a scale, where they meet those of INT4 codes: see `score_integers`."""
    dim = len(row)
    for first in range(0, dim, GROUP):
        half = min(GROUP, dim - first) >> 1
        for i in range(half):
            byte = (first >> 1) + i
            # Of a block: words of even bytes, of odd ones; first those of low nibbles, then of high ones. Of words in
            # a lane, groups take turns.
            lane, group = (byte & 15) >> 2, (byte & 63) >> 4
            lane = 2 * lane + group if dim <= SHORT else 4 * lane + group
            at = (byte >> 6) * BLOCK + 2 * lane + ((byte & 2) >> 1) + ((byte & 1) << 5)
            low, high = scale * row[first + i], scale * row[first + half + i]
            to[at], to[at + BLOCK // 2] = low, high


@intrinsic
def sum_code_groups(typing_context, q, q_at, head_dim, sums_at):
    """Put what the words of a query row add up to, group by group, to ``q[sums_at + 16 * block]`` and on.

    These are four numbers, of short rows two, and zeros.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        _, q_at, head_dim, sums_at = args
        v = Words(b)
        blocks = b.sdiv(b.add(head_dim, I64(BLOCK - 1)), I64(BLOCK))
        short = b.icmp_signed("<=", head_dim, I64(SHORT))
        groups = v.lanes_below(b.select(short, I64(2), I64(4)))
        with steps(b, I64(0), blocks, 1) as (block, _):
            total = v.splat_int(0)
            for i in range(4):
                at = b.add(b.add(q_at, b.mul(block, I64(BLOCK // 2))), I64(i * v.lanes))
                total = v.add_pairs(total, v.load_words(data, at), v.splat_word(1))
            for width in (8, 4, 2):
                other = v.shuffle(total, total, [i ^ width for i in range(16)])
                if width == 2:
                    other = b.select(short, other, v.splat_int(0))
                total = b.add(total, other)
            total = b.select(groups, total, v.splat_int(0))
            at = b.add(sums_at, b.mul(block, I64(16)))
            v.store(b.sitofp(total, v.type), data, at)
        return context.get_dummy_value()

    return types.void(q, i8, i8, i8), codegen


@intrinsic(prefer_literal=True)
def score_integers(
    typing_context, rows, q, q_at, q_scales_at, q_sums_at, k, k_offsets, count, head_dim, scales_at, s_at,
    AHEAD_KIND, runs,
):  # fmt: skip
    """Scores of `rows` query rows against `count` INT4 rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

    All floats are in the array `q`. Query rows are those that `code_row` made of elements in the order of
    `fill_code_row`, with zeros up to whole blocks, arranged by `arrange_rows`; `q_scales_at` is where their scales are,
    `q_sums_at` where the sums of `sum_code_groups` are, arranged too, and `scales_at` where `gather_groups` put the
    scales of K. For the rest see `score_tile` of `simd`.
    """
    if not literals(AHEAD_KIND):
        return None
    i8 = types.int64
    signature = types.void(
        i8, q, i8, i8, i8, k, k_offsets, i8, i8, i8, i8, AHEAD_KIND, runs
    )  # fmt: skip

    def codegen(context, b, sig, args):
        q_at, q_scales_at, q_sums_at, count, head_dim, scales_at, s_at = (
            args[i] for i in (2, 3, 4, 7, 8, 9, 10)
        )
        q_data, k_data, offsets, runs = (
            data_of(context, b, sig.args[i], args[i]) for i in (1, 5, 6, 12)
        )
        v = Words(b)
        ahead = Ahead(b, AHEAD_KIND.literal_value, runs)
        row_bytes = b.ashr(head_dim, I64(1))
        num_blocks = b.sdiv(b.add(head_dim, I64(BLOCK - 1)), I64(BLOCK))
        lowest_at = b.mul(num_blocks, I64(4 * TILE))
        step = BLOCK // 2  # lanes of a block
        tokens = 16  # at once, for as many chains of sums
        scratch = scratch_floats(b, v.float, tokens * step + v.lanes)

        def widen(block, t0, short):
            """A block of some tokens as words, in scratch memory; of short rows two tokens side by side."""
            each = 2 if short else 1
            for i in range(tokens // each):
                ahead.ask(BLOCK, i)
                token = b.add(t0, I64(i * each))
                places = []
                for j in range(each):
                    t = b.add(token, I64(j))
                    places.append(b.load(b.gep(offsets, [t])))
                at = b.mul(block, I64(64))
                places = [b.add(place, at) for place in places]
                lanes = v.load_int4(k_data, places, b.sub(row_bytes, at))
                # Groups take turns.
                turns = [i + 4 * j for i in range(4) for j in range(4 // each)]
                turns = [8 * i + turn for i in range(each) for turn in turns]
                codes = v.shuffle(lanes, lanes, turns)
                for j, x in enumerate(v.nibbles(codes)):
                    v.store(b.bitcast(x, v.type), scratch, I64(i * step + j * v.lanes))

        def emit(rows, short):
            each = v.lanes // rows
            groups = 2 if short else 4
            of_class = 8 if short else 16  # lanes for low or high nibbles of even or odd bytes
            together = min(each, groups)  # groups in the lanes of a row
            firsts = range(0, groups, together)
            sums = [cgutils.alloca_once(b, v.type) for _ in range(tokens)]
            row_scales = v.repeated(q_data, q_scales_at, rows)

            def levels_of(token, block, first):
                """Scales and lowest levels of some groups."""
                at = v.scale_place(token, b.mul(block, I64(4)), groups)
                at = b.add(b.add(scales_at, at), I64(first))
                return [v.repeated(q_data, x, together) for x in (at, b.add(at, lowest_at))]

            def k_at(t):
                return I64(t // 2 * step + t % 2 * 8 if short else t * step)

            def q_lanes(at, block, size, unit):
                at = b.add(at, b.mul(block, I64(size * rows)))
                return v.load_floats(q_data, b.add(at, b.mul(unit, I64(rows))))

            def add_block(block, t0):
                settle(b, scratch)
                for first in firsts:
                    products = [cgutils.alloca_once(b, v.int_type) for _ in sums]
                    for slot in products:
                        b.store(v.splat_int(0), slot)
                    with steps(b, I64(0), I64(step), v.lanes) as (unit, _):
                        for i in range(first, of_class, max(each, groups)):
                            here = b.add(unit, I64(i))
                            q_row = q_lanes(q_at, block, step, here)
                            for t, slot in enumerate(products):
                                k_row = v.repeated(scratch, b.add(k_at(t), here), each)
                                b.store(v.add_pairs(b.load(slot), q_row, k_row), slot)
                    q_sums = q_lanes(q_sums_at, block, 16, I64(first))
                    for t, slot in enumerate(sums):
                        scale, lowest = levels_of(b.add(t0, I64(t)), block, first)
                        total = v.fma(q_sums, lowest, b.load(slot))
                        b.store(v.fma(b.sitofp(b.load(products[t]), v.type), scale, total), slot)

            with steps(b, I64(0), count, tokens) as (t0, _):
                for slot in sums:
                    b.store(v.splat(0.0), slot)
                if short:
                    widen(I64(0), t0, True)
                    add_block(I64(0), t0)
                else:
                    with steps(b, I64(0), num_blocks, 1) as (block, _):
                        widen(block, t0, False)
                        add_block(block, t0)
                for i, scores in enumerate(v.sums_by_row([b.load(slot) for slot in sums], rows)):
                    at = b.add(b.mul(t0, I64(rows)), I64(i * v.lanes))
                    v.store(b.fmul(scores, row_scales), q_data, b.add(s_at, at))

        with b.if_else(b.icmp_signed("<=", head_dim, I64(SHORT))) as (of_short, of_others):
            with of_short:
                for_rows(b, args[0], lambda rows: emit(rows, True))
            with of_others:
                for_rows(b, args[0], lambda rows: emit(rows, False))
        return context.get_dummy_value()

    return signature, codegen
