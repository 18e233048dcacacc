"""Vector code for attention in integers: weighted sums of INT8 and INT4 rows, and scores of INT4 rows.

Codes are widened to 16 bits, not to floats, and meet other 16-bit integers: queries that `code_row` made, or the
weights of a tile's tokens. One instruction then multiplies and adds as many pairs as a vector has 32-bit lanes, and
what belongs to a whole tile (the weights' common scale) is multiplied once, at its end. Weights take 15 bits of the
largest in the tile: what is lost beside codes of 7 or 4 bits does not count.

=======================  ====================================================================================
`code_weights`           probabilities times the scales of INT8 rows, as 16-bit integers
`code_group_weights`     the same for the groups of INT4 rows, and what their lowest levels add up to
`weigh_integers`         add the tile's V rows, weighted by such integers, to the output rows
`fill_code_row`          a query row as it meets INT4 codes; `sum_code_groups` adds up groups
`score_integers`         dot products of such query rows with a tile of INT4 rows
=======================  ====================================================================================

How bytes become lanes. A vector of bytes is taken as words of 16 bits: INT8 gives the even bytes and the odd ones,
INT4 the low and the high nibbles of either. In sums over tokens, the words of two tokens are interleaved, so that a
lane holds a pair of tokens for one column; `_Words.in_order` brings sums back into the order of columns. Every 128 bits
of an INT4 vector are one group, of which all lanes share a scale.

Float64 goes the way of `simd`; so does INT4 where vectors have less than 512 bits.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from numkv.kernels.cpu.simd import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    ON_LINE,
    TILE,
    Vectors,
    data_of,
    for_rows,
    literals,
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

#: Whether INT4 rows are taken as integers.
INT4_INTEGERS = LANES == 16
#: Elements of INT4 that are taken at once: four groups.
BLOCK = 128
# Rows of at most so many elements, two groups, share vectors by twos.
SHORT = 64
# Of two tokens with four groups each, the first two groups, in four lanes each.
_TWO_GROUPS_EACH = [4 * (i // 8) + i // 4 % 2 for i in range(16)]
#: Rows whose sums fit into registers.
_ROWS = 4
_LARGEST = 32639.0


class _Words(Vectors):
    """Vectors of 16-bit integers, twice as many as floats."""

    def __init__(self, builder):
        super().__init__(builder, "float32")
        self.word_type = ir.VectorType(I16, 2 * self.lanes)

    def splat_word(self, value):
        """A vector whose words are all a number."""
        return ir.Constant(self.word_type, [ir.Constant(I16, value)] * self.word_type.count)

    def words(self, vector):
        """The same bits as 16-bit integers."""
        return self.b.bitcast(vector, self.word_type)

    def load_words_of(self, kind, base, at, count):
        """Load the codes in `count` bytes, at most ``4 * lanes``: even and odd bytes; of INT4 low nibbles, then high.

        Past `count` codes are 0, and memory is not touched.
        """
        words = self.words(self._load_bytes(base, at, count, 4 * self.lanes))
        if kind == "int8":
            eight = self.splat_word(8)
            return [self.b.ashr(self.b.shl(words, eight), eight), self.b.ashr(words, eight)]
        return self._nibbles(words)

    def load_two_rows(self, base, places, count):
        """The same for two short INT4 rows of `count` bytes: one in the lower half of vectors, one in the upper."""
        size = 2 * self.lanes
        rows = [self._load_bytes(base, at, count, size) for at in places]
        return self._nibbles(self.words(self.shuffle(*rows, [*range(2 * size)])))

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

    def _nibbles(self, words):
        shifted = [self.b.lshr(words, self.splat_word(bits)) for bits in (8, 4, 12)]
        low = self.splat_word(15)
        return [self.b.and_(x, low) for x in (words, *shifted[:2])] + shifted[2:]

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

    def load_by_group(self, base, at, tokens=1):
        """Load four floats, one for each group of a block, each into all lanes of its group.

        Of two tokens, one after the other: the first two groups of each.
        """
        type_ = ir.VectorType(self.float, 4 * tokens)
        pointer = self.b.bitcast(self._pointer(base, at, self.float), type_.as_pointer())
        floats = self.b.load(pointer, align=4)
        lanes = [i // 4 for i in range(16)] if tokens == 1 else _TWO_GROUPS_EACH
        return self.shuffle(floats, floats, lanes)

    def larger_size(self, x, peak):
        """The larger magnitude, lane by lane, as bits, which are in the order of magnitudes and end with NaN's."""
        bits = self.b.and_(self.b.bitcast(x, self.int_type), self.splat_int(0x7FFFFFFF))
        return self.larger_int(bits, peak)

    def larger_int(self, a, b):
        """Lane by lane the larger integer."""
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def store_pairs(self, vectors, each, base, at, step, t0):
        """`store_scores` where a vector's lower half belongs to one token and its upper half to the next one.

        There are `each` vectors of a row.
        """
        eight = self.lanes // 2
        for start in range(0, len(vectors), eight):
            sums = self.sums(vectors[start : start + eight])
            run = min(each, eight)
            for first in range(start, start + eight, run):
                lanes = [
                    x for i in range(first - start, first - start + run) for x in (i, eight + i)
                ]
                row, pair = divmod(first, each)
                place = self.b.add(self.b.add(at, self.b.mul(I64(row), step)), t0)
                place = self.b.add(place, I64(2 * pair))
                self.store(self.shuffle(sums, sums, lanes), base, place)

    def quantiser(self, peak):
        """What makes integers of weights whose magnitudes are up to `peak`, and what undoes it.

        `peak` is what `larger_size` found; both are NaN where a weight is not finite.
        """
        bits = self.fold(peak, self.larger_int)
        finite = self.b.icmp_signed("<", bits, I32(0x7F800000))
        # Far below that a factor would overflow.
        least = I32(int(np.float32(1e-33).view(np.int32)))
        peak = self.b.bitcast(self.larger_int(bits, least), self.float)
        peak = self.b.select(finite, peak, self.float(math.nan))
        factor = self.b.fdiv(self.float(_LARGEST), peak)
        return self.splat(factor), self.b.fmul(peak, self.float(1 / _LARGEST))

    def nearest(self, x):
        """The nearest integers of floats whose magnitude is below 2**22, in the low bits of 32-bit lanes."""
        shifted = self.b.fadd(x, self.splat(12582912.0))  # 1.5 * 2**23
        return self.b.bitcast(shifted, self.int_type)


def _seen(v, begin, end, start):
    return v.b.and_(v.lanes_below(end, start), v.b.not_(v.lanes_below(begin, start)))


@intrinsic
def code_weights(typing_context, s, s_at, factors, factors_at, begin, end):
    """Replace one row's probabilities of a tile by 16-bit integers, each token's times its factor; return their scale.

    Tokens outside ``[begin, end)`` get 0, whatever their factors are.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data, factors = (data_of(context, b, sig.args[i], args[i]) for i in (0, 2))
        _, s_at, _, factors_at, begin, end = args
        v = _Words(b)
        peak = v.splat_int(0)
        weights = []
        for i in range(0, TILE, v.lanes):
            p = v.load_floats(data, b.add(s_at, I64(i)))
            weight = b.fmul(p, v.load_floats(factors, b.add(factors_at, I64(i))))
            weight = b.select(_seen(v, begin, end, i), weight, v.splat(0.0))
            peak = v.larger_size(weight, peak)
            weights.append(weight)
        factor, scale = v.quantiser(peak)
        halves = ir.VectorType(I16, v.lanes)
        pointer = b.bitcast(v._pointer(data, s_at, v.float), halves.as_pointer())
        for i, weight in enumerate(weights):
            codes = b.trunc(v.nearest(b.fmul(weight, factor)), halves)
            b.store(codes, b.gep(pointer, [I64(i)]), align=2)
        return scale

    return types.float32(s, i8, factors, i8, i8, i8), codegen


@intrinsic
def code_group_weights(
    typing_context, s, s_at, scales, scales_at, head_dim, begin, end, w, w_at, sums, sums_at
):  # fmt: skip
    """One row's probabilities of a tile times the scales of tokens' groups, as 16-bit integers; return their scale.

    `scales` are what `gather_groups` made for rows of `head_dim`. The integers of tokens 2i and 2i + 1 for block j are
    the halves of the 16 lanes of `w` from ``w_at + 16 * (j * TILE / 2 + i)`` on; of rows of up to 64 elements, tokens
    4i and 4i + 1 are in the lower lanes from ``w_at + 16 * i`` on, the two after them in the upper ones.
    ``sums[sums_at + g]`` is what the lowest levels of group g add up to: the sum of ``p[t] * lowest[t, g]``. Tokens
    outside ``[begin, end)`` get 0.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        s_data, scales_data, w_data, sums_data = (
            data_of(context, b, sig.args[i], args[i]) for i in (0, 2, 7, 9)
        )
        s_at, scales_at, head_dim, begin, end, w_at, sums_at = (
            args[i] for i in (1, 3, 4, 5, 6, 8, 10)
        )
        v = _Words(b)
        blocks = b.sdiv(b.add(head_dim, I64(BLOCK - 1)), I64(BLOCK))
        short = b.icmp_signed("<=", head_dim, I64(SHORT))
        lowest_at = b.mul(blocks, I64(4 * TILE))
        four = ir.VectorType(v.float, 4)
        zero = v.splat(0.0)
        peak = cgutils.alloca_once_value(b, v.splat_int(0))

        def by_token(t, j, further=None):
            """Four floats each of tokens t to t + 3, for block j."""
            at = b.add(scales_at, v.scale_place(I64(t), b.mul(j, I64(4))))
            return v.load_floats(scales_data, at if further is None else b.add(at, further))

        def probabilities(t):
            """Those of tokens t to t + 3, and which of them are seen, four lanes each."""
            each = v.load_by_group(s_data, b.add(s_at, I64(t)))
            token = ir.Constant(v.int_type, [ir.Constant(I32, t + i // 4) for i in range(16)])
            low, high = (
                b.bitcast(v.splat(b.bitcast(b.trunc(x, I32), v.float)), v.int_type)
                for x in (begin, end)
            )
            return each, b.and_(b.icmp_signed(">=", token, low), b.icmp_signed("<", token, high))

        rows = [(t, *probabilities(t)) for t in range(0, TILE, 4)]
        with steps(b, I64(0), blocks, 1) as (j, _):
            total = zero
            for t, p, seen in rows:
                weight = b.select(seen, b.fmul(p, by_token(t, j)), zero)
                b.store(v.larger_size(weight, b.load(peak)), peak)
                lowest = b.select(seen, by_token(t, j, lowest_at), zero)
                total = v.fma(p, lowest, total)
            for width in (8, 4):
                halves = [v.shuffle(total, total, [*range(i, i + width)]) for i in (0, width)]
                total = b.fadd(*halves)
            at = b.add(sums_at, b.mul(j, I64(4)))
            b.store(
                total, b.bitcast(v._pointer(sums_data, at, v.float), four.as_pointer()), align=4
            )
        factor, scale = v.quantiser(b.load(peak))
        with steps(b, I64(0), blocks, 1) as (j, _):
            for t, p, seen in rows:
                weight = b.select(seen, b.fmul(p, by_token(t, j)), zero)
                codes = v.nearest(b.fmul(weight, factor))
                # Of neighbouring tokens, one's code goes into the lower half of a lane, the other's into the upper.
                other = v.shuffle(codes, codes, [i + 4 if i % 8 < 4 else i for i in range(16)])
                pairs = b.or_(b.and_(codes, v.splat_int(0xFFFF)), b.shl(other, v.splat_int(16)))

                def put(lanes, place, pairs=pairs):
                    at = b.add(w_at, b.mul(place, I64(16)))
                    pointer = b.bitcast(v._pointer(w_data, at, v.float), v.int_type.as_pointer())
                    b.store(v.shuffle(pairs, pairs, lanes), pointer, align=4)

                with b.if_else(short) as (of_short, of_others):
                    with of_short:
                        put([8 * (i // 8) + i // 4 % 2 for i in range(16)], I64(t // 4))
                    with of_others:
                        for pair in range(2):
                            place = b.add(b.mul(j, I64(TILE // 2)), I64(t // 2 + pair))
                            put([8 * pair + i // 4 for i in range(16)], place)
        return scale

    signature = types.float32(s, i8, scales, i8, i8, i8, i8, w, i8, sums, i8)
    return signature, codegen


@intrinsic(prefer_literal=True)
def weigh_integers(
    typing_context, KIND, rows, count, w, w_at, w_step, w_scales_at, v, v_offsets, begin, end, head_dim,
    sums_at, sums_step, o_at, o_step, rescale_at, AHEAD_KIND, ahead, ahead_offsets,
):  # fmt: skip
    """Add V rows weighted by integers: ``o[r, d] = rescale[r] * o[r, d] + sum over t of weight[r, t] * v[t, d]``.

    All floats are in the array `w`. The weights of row r are those that `code_weights` or `code_group_weights` put at
    ``w_at + r * w_step``, their scale is at ``w_scales_at + r``, and `sums_at` is where the sums of lowest levels are.
    Of the `rows` rows the first `count` are written, to columns below `head_dim`; up to 15 more get what does not
    matter. While V rows are read, the same rows of `ahead` (the next tile's K rows) are asked for.
    """
    if not literals(KIND, AHEAD_KIND):
        return None
    kind, ahead_kind = (a.literal_value for a in (KIND, AHEAD_KIND))
    i8 = types.int64
    signature = types.void(
        KIND, i8, i8, w, i8, i8, i8, v, v_offsets, i8, i8, i8, i8, i8, i8, i8, i8, AHEAD_KIND, ahead,
        ahead_offsets,
    )  # fmt: skip

    def codegen(context, b, sig, args):
        count, w_at, w_step, w_scales_at, begin, end, head_dim = (
            args[i] for i in (2, 4, 5, 6, 9, 10, 11)
        )
        sums_at, sums_step, o_at, o_step, rescale_at = (args[i] for i in (12, 13, 14, 15, 16))
        w_data, v_data, offsets, ahead_data, ahead_offsets = (
            data_of(context, b, sig.args[i], args[i]) for i in (3, 7, 8, 18, 19)
        )

        def emit(rows):
            v = _Words(b)
            packed = kind == "int4"
            size = 4 * v.lanes  # bytes of a block
            columns = 2 * size if packed else size
            row_bytes = b.ashr(head_dim, I64(1)) if packed else head_dim
            num_blocks = b.sdiv(b.add(head_dim, I64(columns - 1)), I64(columns))

            def weights_of(row, block, turn):
                at = b.add(w_at, b.mul(I64(row), w_step))
                if packed:
                    at = b.add(at, b.mul(b.add(b.mul(block, I64(TILE // 2)), turn), I64(16)))
                    pointer = b.bitcast(v._pointer(w_data, at, v.float), v.int_type.as_pointer())
                    return b.load(pointer, align=4)
                return b.bitcast(v.splat(v.load_one(w_data, b.add(at, turn))), v.int_type)

            def codes_of(block, turn, short, ask):
                """Words of a pair of tokens; of short rows, of two pairs."""
                each = 4 if short else 2
                at = b.mul(block, I64(size))
                places = []
                for i in range(each):
                    token = b.add(b.mul(turn, I64(each)), I64(i))
                    places.append(b.add(b.load(b.gep(offsets, [token])), at))
                    if ask:
                        ahead_at = b.load(b.gep(ahead_offsets, [token]))
                        for column in range(0, columns // (each // 2), ON_LINE[ahead_kind]):
                            column = b.add(b.mul(block, I64(columns)), I64(column))
                            v.prefetch(ahead_kind, ahead_data, ahead_at, column)
                if short:
                    return [v.load_two_rows(v_data, places[i::2], row_bytes) for i in range(2)]
                left = b.sub(row_bytes, at)
                return [v.load_words_of(kind, v_data, place, left) for place in places]

            def one_pass(block, taken, which, ask, short=False):
                """The words `which` of a block, for some rows."""
                sums = {
                    row: [cgutils.alloca_once(b, v.int_type) for _ in range(4)] for row in taken
                }
                for slot in (slot for slots in sums.values() for slot in slots):
                    b.store(v.splat_int(0), slot)
                shift = 2 if short else 1
                first_turn = b.ashr(begin, I64(shift))
                turns = b.ashr(b.add(end, I64((1 << shift) - 1)), I64(shift))
                with steps(b, first_turn, turns, 1) as (turn, _):
                    codes = codes_of(block, turn, short, ask)
                    mixed = [x for i in which for x in v.interleave(codes[0][i], codes[1][i])]
                    for row in taken:
                        weights = v.words(weights_of(row, block, turn))
                        for slot, x in zip(sums[row], mixed, strict=True):
                            b.store(v.add_pairs(b.load(slot), x, weights), slot)
                for row in taken:
                    with b.if_then(b.icmp_signed("<", I64(row), count)):
                        totals = [b.load(slot) for slot in sums[row]]
                        if short:
                            upper = [*range(8, 16), *range(8)]
                            totals = [b.add(x, v.shuffle(x, x, upper)) for x in totals]
                        finish(block, row, which[0] // 2, totals)

            def finish(block, row, nibble, totals):
                even, odd = totals[:2], totals[2:]
                pieces = [x for pair in zip(even, odd, strict=True) for x in v.interleave(*pair)]
                scale = v.splat(v.load_one(w_data, b.add(w_scales_at, I64(row))))
                rescale = v.splat(v.load_one(w_data, b.add(rescale_at, I64(row))))
                row_at = b.add(o_at, b.mul(I64(row), o_step))
                for j, total in enumerate(v.in_order(pieces)):
                    value = b.fmul(b.sitofp(total, v.type), scale)
                    if not packed:
                        column = b.add(b.mul(block, I64(columns)), I64(j * v.lanes))
                        with b.if_then(b.icmp_signed("<", column, head_dim)):
                            place = b.add(row_at, column)
                            v.store(
                                v.fma(v.load_floats(w_data, place), rescale, value), w_data, place
                            )
                        continue
                    group = b.add(b.mul(block, I64(4)), I64(j))
                    column = b.mul(group, I64(GROUP))
                    left = b.ashr(b.sub(head_dim, column), I64(1))
                    half = b.select(b.icmp_signed("<", left, I64(16)), left, I64(16))
                    with b.if_then(b.icmp_signed(">", left, I64(0))):
                        at = b.add(b.add(sums_at, b.mul(I64(row), sums_step)), group)
                        value = b.fadd(value, v.splat(v.load_one(w_data, at)))
                        place = b.add(b.add(row_at, column), b.mul(half, I64(nibble)))
                        mask = v.lanes_below(half)
                        value = v.fma(v.load_floats(w_data, place, mask), rescale, value)
                        v.store_masked(value, w_data, place, mask)

            def all_passes(block, short=False):
                for first in range(0, rows, _ROWS):
                    taken = range(first, min(rows, first + _ROWS))
                    one_pass(block, taken, (0, 1), first == 0, short)
                    if packed:
                        one_pass(block, taken, (2, 3), False, short)

            def all_blocks():
                with steps(b, I64(0), num_blocks, 1) as (block, _):
                    all_passes(block)

            if not packed:
                all_blocks()
                return
            with b.if_else(b.icmp_signed("<=", head_dim, I64(SHORT))) as (of_short, of_others):
                with of_short:
                    all_passes(I64(0), short=True)
                with of_others:
                    all_blocks()

        for_rows(b, args[1], emit)
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
            # Of a block: words of even bytes, of odd ones; first those of low nibbles, then of high ones.
            at = (byte >> 6) * BLOCK + ((byte & 63) >> 1) + ((byte & 1) << 5)
            low, high = scale * row[first + i], scale * row[first + half + i]
            to[at], to[at + BLOCK // 2] = low, high
            if dim <= SHORT:  # for the row in the upper half
                to[at + 16], to[at + 16 + BLOCK // 2] = low, high


@intrinsic
def sum_code_groups(typing_context, q, q_at, blocks, sums_at):
    """Put what the words of a query row add up to, lane by lane of a block, to ``q[sums_at + 16 * block]`` and on."""
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        _, q_at, blocks, sums_at = args
        v = _Words(b)
        with steps(b, I64(0), blocks, 1) as (block, _):
            total = v.splat_int(0)
            for i in range(4):
                at = b.add(b.add(q_at, b.mul(block, I64(BLOCK // 2))), I64(i * v.lanes))
                total = v.add_pairs(total, v.load_words(data, at), v.splat_word(1))
            at = b.add(sums_at, b.mul(block, I64(16)))
            v.store(b.sitofp(total, v.type), data, at)
        return context.get_dummy_value()

    return types.void(q, i8, i8, i8), codegen


@intrinsic(prefer_literal=True)
def score_integers(
    typing_context, rows, q, q_at, q_step, q_sums_at, q_sums_step, k, k_offsets, count, head_dim, scales_at,
    s_at, s_step, AHEAD_KIND, ahead, ahead_offsets,
):  # fmt: skip
    """Scores of `rows` query rows against `count` INT4 rows: ``s[r, t] = sum over d of q[r, d] * k[t, d]``.

    All floats are in the array `q`. Query rows are those that `code_row` made of elements in the order of
    `fill_code_row`, with zeros up to whole blocks; the scores are to be multiplied by their scales. ``q_sums_at + r *
    q_sums_step`` is where `sum_code_groups` put the sums of row r, and `scales_at` where `gather_groups` put the scales
    of K. For the rest see `score_tile` of `simd`.
    """
    if not literals(AHEAD_KIND):
        return None
    ahead_kind = AHEAD_KIND.literal_value
    i8 = types.int64
    signature = types.void(
        i8,
        q,
        i8,
        i8,
        i8,
        i8,
        k,
        k_offsets,
        i8,
        i8,
        i8,
        i8,
        i8,
        AHEAD_KIND,
        ahead,
        ahead_offsets,
    )

    def codegen(context, b, sig, args):
        (
            q_at,
            q_step,
            q_sums_at,
            q_sums_step,
            count,
            head_dim,
            scales_at,
            s_at,
            s_step,
        ) = (args[i] for i in (2, 3, 4, 5, 8, 9, 10, 11, 12))
        q_data, k_data, offsets, ahead_data, ahead_offsets = (
            data_of(context, b, sig.args[i], args[i]) for i in (1, 6, 7, 14, 15)
        )

        def emit(rows):
            v = _Words(b)
            vectors = max(
                1, v.lanes // rows
            )  # for each row, of one token each, or of two short ones
            sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in range(rows)]
            row_bytes = b.ashr(head_dim, I64(1))
            num_blocks = b.sdiv(b.add(head_dim, I64(BLOCK - 1)), I64(BLOCK))
            lowest_at = b.mul(num_blocks, I64(4 * TILE))

            def of_row(at, step, r, block, each):
                return b.add(b.add(at, b.mul(I64(r), step)), b.mul(block, I64(each)))

            def add_block(block, t0, k_at, tokens):
                q_rows = []
                for r in range(rows):
                    place = of_row(q_at, q_step, r, block, BLOCK // 2)
                    q_rows.append(
                        [v.load_words(q_data, b.add(place, I64(i * v.lanes))) for i in range(4)]
                    )
                q_sums = [
                    v.load_floats(q_data, of_row(q_sums_at, q_sums_step, r, block, 16))
                    for r in range(rows)
                ]
                at = b.mul(block, I64(64))
                for i in range(vectors):
                    if tokens == 2:
                        words = v.load_two_rows(k_data, k_at[2 * i : 2 * i + 2], row_bytes)
                    else:
                        left = b.sub(row_bytes, at)
                        words = v.load_words_of("int4", k_data, b.add(k_at[i], at), left)
                    scale_at = v.scale_place(b.add(t0, I64(tokens * i)), b.mul(block, I64(4)))
                    scale_at = b.add(scales_at, scale_at)
                    scale = v.load_by_group(q_data, scale_at, tokens)
                    lowest = v.load_by_group(q_data, b.add(scale_at, lowest_at), tokens)
                    for r in range(rows):
                        product = v.splat_int(0)
                        for q_words, k_words in zip(q_rows[r], words, strict=True):
                            product = v.add_pairs(product, k_words, q_words)
                        total = v.fma(q_sums[r], lowest, b.load(sums[r][i]))
                        total = v.fma(b.sitofp(product, v.type), scale, total)
                        b.store(total, sums[r][i])

            def all_tokens(tokens):
                """Scores, with so many tokens in a vector."""
                each = vectors * tokens
                with steps(b, I64(0), count, each) as (t0, _):
                    k_at, ahead_at = (
                        [b.load(b.gep(table, [b.add(t0, I64(t))])) for t in range(each)]
                        for table in (offsets, ahead_offsets)
                    )
                    for slot in (slot for row in sums for slot in row):
                        b.store(v.splat(0.0), slot)

                    def one_block(block):
                        for t in range(each):
                            for column in range(0, BLOCK // tokens, ON_LINE[ahead_kind]):
                                column = b.add(b.mul(block, I64(BLOCK)), I64(column))
                                v.prefetch(ahead_kind, ahead_data, ahead_at[t], column)
                        add_block(block, t0, k_at, tokens)

                    if tokens == 2:
                        one_block(I64(0))
                    else:
                        with steps(b, I64(0), num_blocks, 1) as (block, _):
                            one_block(block)
                    totals = [b.load(slot) for row in sums for slot in row]
                    if tokens == 2:
                        v.store_pairs(totals, vectors, q_data, s_at, s_step, t0)
                    else:
                        v.store_scores(totals, vectors, q_data, s_at, s_step, t0)

            with b.if_else(b.icmp_signed("<=", head_dim, I64(SHORT))) as (of_short, of_others):
                with of_short:
                    all_tokens(2)
                with of_others:
                    all_tokens(1)

        for_rows(b, args[0], emit)
        return context.get_dummy_value()

    return signature, codegen
