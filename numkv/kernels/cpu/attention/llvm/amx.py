"""Attention on Intel's matrix unit: scores of K rows in place, the online softmax, sums of packed V rows.

A product of AMX tiles multiplies sixteen K rows by sixteen columns, which are query rows. It takes equally long for one
query row. So prompts and decode steps of large groups use this engine where K and V are bf16 or INT8. Few query rows do
not; `FEW_ROWS` is the limit.

How numbers are split. A float32 has 24 significant bits, a bf16 number 8. Three parts therefore give a query exactly:
the upper half of a float's bits, the upper half of the remainder, and the rest. Parts that are zero in all rows of a
block are left out, as for queries that are bf16. Probabilities have two parts, 16 bits, and each is off by at most 1e-5
of itself. If queries, K and V are bf16, they have one part, as in FlashAttention. With INT8, queries and weights are
integers of 15 bits, as in `integers`: an upper byte and a lower one, both signed.

How they are stored. For scores, A is 16 rows of K in the cache, and B the queries, packed once. A vector then has the
scores of 16 query rows with one token, so maxima, exponentials and sums never cross lanes. Two or four such vectors of
weights make rows of B for the sums. There, A is V, transposed and packed once for all query rows. Output rows are
columns until an item is done::

    scores    A: K rows (tokens x d)       B: queries (d x query rows)    C: tokens x query rows
    sums      A: V columns (d x tokens)    B: weights (tokens x rows)     C: d x query rows

How work is ordered. For a while after a product, vector instructions seem to have one port instead of two (on Emerald
Rapids). Where both are mixed, all vector instructions run at that rate. So each kind of work is done for all query rows
of an item before the next begins.

Products of bf16 treat denormal numbers as zero, and an infinity times a part of zero is NaN.
"""

from __future__ import annotations

import functools
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import TILE_UNIT
from numkv.kernels.cpu.vectors.amx import AMX_TILE, Amx, AmxWords
from numkv.kernels.cpu.vectors.emit import I8, I32, I64, as_bytes, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.prefetch import prefetch_column
from numkv.kernels.cpu.vectors.stored import ON_LINE
from numkv.kernels.cpu.vectors.vectors import tanh

#: Elements in a row of A.
ELEMENTS = {"bf16": 32, "int8": 64}
#: The product of two tiles.
PRODUCT = {"bf16": "bf16ps", "int8": "bssd"}
# The most parts of a query.
_PARTS = {"bf16": 3, "int8": 2}


@functools.cache
def make_amx_pack_queries(kind):
    """`amx_pack_queries` for a storage kind of K."""

    @emits(types.int64)
    def amx_pack_queries(b, f, q_at, q_step, count, head_dim, to_at, spare_at):
        """Pack up to 16 query rows for products with K rows; return the number of parts.

        Row r is at ``f[q_at + r * q_step]``, with zeros up to a multiple of 64 elements. If K is bf16, it is float32;
        if K is INT8, it has the words of `quantise_query`. In NumPy, for bf16::

            high = upper_half(q);  middle = upper_half(q - high);  low = q - high - middle

        They go to ``f[to_at:]``, with room for three parts (two for INT8) of 256 floats for each 64 bytes of a K row.
        ``f[spare_at:]`` has room for 768 floats. Each 64 bytes of a part are transposed. Lane n of row i then has the
        i-th pair of elements of query row n, or four elements for INT8.
        """
        return _QueryPacking(b, kind, f, q_at, q_step, count, head_dim, to_at, spare_at).emit()

    return amx_pack_queries


class _QueryPacking:
    """Emits `amx_pack_queries`."""

    def __init__(self, b, kind, data, q_at, q_step, count, head_dim, to_at, spare_at):
        self.b, self.v, self.kind, self.data = b, AmxWords(b), kind, data
        self.q_at, self.q_step, self.count, self.head_dim = q_at, q_step, count, head_dim
        self.to_at, self.spare_at = to_at, spare_at
        self.nothing = self.v.splat_int(0)
        # Bits of the remainders after the first part and after the second.
        self.left = [cgutils.alloca_once_value(b, self.nothing) for _ in range(2)]

    def emit(self):
        """Emit the code; its value is the number of parts."""
        b, v = self.b, self.v
        blocks = b.sdiv(
            b.add(self.head_dim, I64(ELEMENTS[self.kind] - 1)), I64(ELEMENTS[self.kind])
        )
        most = self.most_parts()
        with steps(b, I64(0), blocks, 1) as (block, _):
            # Columns are written as rows first, then transposed.
            with steps(b, I64(0), I64(AMX_ROWS), 1) as (r, _):
                for part, lanes in enumerate(self.parts_of(r, block)):
                    at = b.add(self.spare_at, b.add(I64(part * AMX_TILE), b.mul(r, I64(16))))
                    v.store_lanes(lanes, self.data, at)
            with steps(b, I64(0), most, 1) as (part, _):
                from_at = b.add(self.spare_at, b.mul(part, I64(AMX_TILE)))
                rows = [
                    v.load_lanes(self.data, b.add(from_at, I64(16 * i))) for i in range(AMX_ROWS)
                ]
                number = b.add(b.mul(block, I64(_PARTS[self.kind])), part)
                at = b.add(self.to_at, b.mul(number, I64(AMX_TILE)))
                for i, lanes in enumerate(v.transposed(rows)):
                    v.store_lanes(lanes, self.data, b.add(at, I64(16 * i)))
        if self.kind == "int8":
            return I64(2)
        needed = I64(1)
        for part, bits in enumerate(self.left):
            some = b.icmp_signed("!=", v.fold(b.load(bits), b.or_), I32(0))
            needed = b.select(some, I64(part + 2), needed)
        return needed

    def most_parts(self):
        """Return the most parts: for bf16, one if no number has bits in its lower half."""
        b, v = self.b, self.v
        most = I64(_PARTS[self.kind])
        if self.kind == "int8":
            return most
        lower = cgutils.alloca_once_value(b, self.nothing)
        with (
            steps(b, I64(0), self.count, 1) as (r, _),
            steps(b, I64(0), self.head_dim, 16) as (i, _),
        ):
            at = b.add(b.add(self.q_at, b.mul(r, self.q_step)), i)
            b.store(b.or_(b.load(lower), v.load_lanes(self.data, at)), lower)
        some = b.and_(v.fold(b.load(lower), b.or_), I32(0xFFFF))
        return b.select(b.icmp_signed("==", some, I32(0)), I64(1), most)

    def parts_of(self, r, block):
        """Return the parts of 64 bytes of a row, as 16 lanes each."""
        b, v = self.b, self.v
        there = b.icmp_signed("<", r, self.count)
        row_at = b.add(self.q_at, b.select(there, b.mul(r, self.q_step), I64(0)))
        at = b.add(row_at, b.mul(block, I64(32)))
        pair = [v.load_lanes(self.data, b.add(at, I64(i))) for i in (0, 16)]
        pair = [b.select(there, x, self.nothing) for x in pair]
        if self.kind == "int8":
            return v.bytes_of_words(*(v.words(x) for x in pair))
        lanes = [b.bitcast(x, v.type) for x in pair]
        evens, odds = (v.shuffle(*lanes, [*range(i, 32, 2)]) for i in (0, 1))
        parts = []
        for part in range(3):
            even, odd = (b.bitcast(x, v.int_type) for x in (evens, odds))
            if part:
                left = self.left[part - 1]
                b.store(b.or_(b.load(left), b.or_(even, odd)), left)
            upper = b.and_(odd, v.splat_int(-65536))
            parts.append(b.or_(upper, b.lshr(even, v.splat_int(16))))
            evens, odds = (b.fsub(x, v.upper_half(x)) for x in (evens, odds))
        return parts


@functools.cache
def make_amx_locate_keys(kind):
    """`amx_locate_keys` for a storage kind of K."""

    @emits()
    def amx_locate_keys(b, places, f, spare_at, keys, k_step):
        """Locate the K rows of a tile for the matrix unit: for each 16 tokens, an address and the step in bytes.

        Writes ``places[0:4]`` and ``places[4:8]``. Rows at even steps whose length is a multiple of 64 bytes are used
        in place. Others are copied to ``f[spare_at:]``. `k_step` is the distance of a block's rows in elements.
        """
        offsets, head_dim = keys.offsets, keys.dim
        v = AmxWords(b)
        size = I64(64 // ELEMENTS[kind])
        eight = ir.VectorType(I64, 8)
        whole = b.icmp_signed("==", b.and_(head_dim, I64(ELEMENTS[kind] - 1)), I64(0))
        row_bytes = b.mul(head_dim, size)
        lines = b.sdiv(b.add(row_bytes, I64(63)), I64(64))
        k_bytes, spare = as_bytes(b, keys.words), v.floats_at(f, spare_at)

        def splat(x):
            first = b.insert_element(ir.Constant(eight, ir.Undefined), x, I32(0))
            return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, 8), None))

        iota = ir.Constant(eight, [ir.Constant(I64, i) for i in range(8)])
        with steps(b, I64(0), I64(TILE_UNIT), AMX_ROWS) as (t0, _):
            first = b.load(b.gep(offsets, [t0]))
            uneven = ir.Constant(I8, 0)
            for i in (0, 8):
                pointer = b.gep(offsets, [b.add(t0, I64(i))])
                have = b.load(b.bitcast(pointer, eight.as_pointer()), align=8)
                steps_up = b.mul(b.add(iota, splat(I64(i))), splat(k_step))
                wrong = b.icmp_signed("!=", have, b.add(splat(first), steps_up))
                uneven = b.or_(uneven, b.bitcast(wrong, I8))
            even = b.icmp_signed("==", uneven, ir.Constant(I8, 0))
            place = b.gep(places, [b.lshr(t0, I64(4))])
            with b.if_else(b.and_(even, whole)) as (in_place, copied):
                with in_place:
                    b.store(b.ptrtoint(b.gep(k_bytes, [b.mul(first, size)]), I64), place)
                    b.store(b.mul(k_step, size), b.gep(place, [I64(4)]))
                with copied:
                    row_step = b.mul(lines, I64(64))
                    to = b.gep(spare, [b.mul(t0, row_step)])
                    b.store(b.ptrtoint(to, I64), place)
                    b.store(row_step, b.gep(place, [I64(4)]))
                    with steps(b, I64(0), I64(AMX_ROWS), 1) as (t, _):
                        at = b.mul(b.load(b.gep(offsets, [b.add(t0, t)])), size)
                        with steps(b, I64(0), row_bytes, 64) as (i, _):
                            line = v.load_bytes(k_bytes, b.add(at, i), b.sub(row_bytes, i), 64)
                            row = b.gep(to, [b.add(b.mul(t, row_step), i)])
                            b.store(line, b.bitcast(row, line.type.as_pointer()), align=4)

    return amx_locate_keys


@functools.cache
def make_amx_qk(kind, next_kind):
    """`amx_qk` for a storage kind of K; `next_kind` is that of the rows that are prefetched."""

    @emits()
    def amx_qk(b, f, packed_at, parts, places, head_dim, s_at, next_rows, prefetches):
        """Scores of up to 16 packed query rows and a tile's K rows, for `amx_softmax`: ``s[t, r] = k[t] @ q[r]``.

        `parts` is what `amx_pack_queries` returned, `places` what `amx_locate_keys` has found. ``f[s_at:]`` has room
        for 2,048 floats: 64 tokens of 16 scores, for INT8 of both parts. If `prefetches` is not 0, `next_rows` (the
        tile's V rows) are prefetched.
        """
        _AmxProducts(
            b, (kind, next_kind), f, packed_at, parts, places, head_dim, s_at, next_rows, prefetches
        ).emit()

    return amx_qk


class _AmxProducts:
    """Emits `amx_qk`.

    A product's sums are ready after three times as long as it keeps the unit busy. Four independent sums hide that:
    tiles 0 to 3, one for each 16 K rows. Tile 4 has query rows, tiles 5 and 6 K rows.
    """

    def __init__(self, b, kinds, data, packed_at, parts, places, head_dim, s_at, next_rows, asked):
        self.kind, self.next_kind = kinds
        self.b, self.v, self.amx, self.data = b, AmxWords(b), Amx(b), data
        self.packed_at, self.parts, self.places, self.s_at = packed_at, parts, places, s_at
        self.next_rows, self.asked = next_rows, b.icmp_signed("!=", asked, I64(0))
        self.blocks = b.sdiv(
            b.add(head_dim, I64(ELEMENTS[self.kind] - 1)), I64(ELEMENTS[self.kind])
        )
        self.step = [b.load(b.gep(places, [I64(4 + i)])) for i in range(4)]

    def emit(self):
        """Emit the code: parts are added up in bf16, and stay separate in INT8."""
        b = self.b
        if self.kind == "bf16":
            self.clear()
            with steps(b, I64(0), self.blocks, 1) as (block, _):
                with steps(b, I64(0), self.parts, 1) as (part, _):
                    self.multiply(block, part)
                self.prefetch(block)
            self.store(I64(0))
            return
        with steps(b, I64(0), self.parts, 1) as (part, _):
            self.clear()
            with steps(b, I64(0), self.blocks, 1) as (block, _):
                self.multiply(block, part)
                with b.if_then(b.icmp_signed("==", part, I64(0))):
                    self.prefetch(block)
            self.store(part)

    def clear(self):
        for i in range(4):
            self.amx.clear(i)

    def multiply(self, block, part):
        """Multiply all K rows by a part of the queries, for 64 bytes."""
        b, v = self.b, self.v
        at = b.add(b.mul(block, I64(_PARTS[self.kind])), part)
        at = b.add(self.packed_at, b.mul(at, I64(AMX_TILE)))
        self.amx.load(4, v.floats_at(self.data, at), I64(64))
        for i in range(4):
            key = b.add(b.load(b.gep(self.places, [I64(i)])), b.mul(block, I64(64)))
            self.amx.load(5 + i % 2, b.inttoptr(key, I8.as_pointer()), self.step[i])
            self.amx.multiply(PRODUCT[self.kind], i, 5 + i % 2, 4)

    def store(self, part):
        b, v = self.b, self.v
        for i in range(4):
            at = b.add(b.add(self.s_at, I64(i * AMX_TILE)), b.mul(part, I64(4 * AMX_TILE)))
            self.amx.store(i, v.floats_at(self.data, at), I64(64))

    def prefetch(self, block):
        """Prefetch 64 bytes' worth of columns."""
        b = self.b
        with b.if_then(self.asked), steps(b, I64(0), I64(TILE_UNIT), 1) as (t, _):
            at = b.load(b.gep(self.next_rows.offsets, [t]))
            for i in range(0, ELEMENTS[self.kind], ON_LINE[self.next_kind]):
                column = b.add(b.mul(block, I64(ELEMENTS[self.kind])), I64(i))
                prefetch_column(b, self.next_kind, self.next_rows.words, at, column)


#: How far scores may exceed the subtracted maximum: weights are at most two to this power.
GROWTH = 8.0
# Tokens that are computed at once; one by one, each would wait for the one before.
_AT_ONCE = 4


@functools.cache
def make_amx_softmax(k_kind, v_kind, weight_parts):
    """`amx_softmax` for storage kinds of K and of V, and so many parts of a weight, which is 2 if V is INT8."""

    @emits(soft_cap=types.float32)
    def amx_softmax(b, f, s_at, count, scales, soft_cap, partly, bounds_at, state):
        """Turn scores of up to 16 rows and a tile into weights, all rows at once: see `online_softmax_step`.

        Scores are those of `amx_qk`, times the scales of rows at ``f[scales.queries_at:]``. If K is INT8, they are also
        multiplied by the scales of tokens at ``f[scales.keys_at:]``. They are capped if `soft_cap` is above 0. If
        `partly` is not 0, row r sees tokens from ``f[bounds_at + r]`` on that are below ``f[bounds_at + 16 + r]``.
        Maxima (integers close to them: `GROWTH`) and sums of rows are updated. The factors that rescale earlier sums go
        to ``f[state.rescale_at:]``, 16 floats.

        Weights replace scores, in two parts, as `amx_accumulate` reads them. If V is bf16, they are probabilities. If V
        is INT8, they are 16-bit integers of probabilities times the scales of tokens at ``f[scales.values_at:]``. The
        scales of these integers go to ``f[scales.weights_at:]``, 16 floats. Lanes are query rows; for bf16, each lane
        has two tokens::

            scores    t0: r0 | r1 | ... | r15          high parts   (t0 t1) of r0 | of r1 | ... | of r15
                      t1: r0 | r1 | ... | r15    ->    low parts    (t0 t1) of r0 | of r1 | ... | of r15
        """
        _AmxSoftmax(
            b,
            (k_kind, v_kind, weight_parts),
            f,
            s_at,
            count,
            scales,
            soft_cap,
            partly,
            bounds_at,
            state,
        ).emit()

    return amx_softmax


class _AmxSoftmax:
    """Emits `amx_softmax`."""

    def __init__(self, b, kinds, data, s_at, count, scales, soft_cap, partly, bounds_at, state):
        self.kind, self.v_kind, self.parts = kinds
        self.b, self.v, self.data, self.s_at = b, AmxWords(b), data, s_at
        self.places, self.soft_cap, self.state = scales, soft_cap, state
        v = self.v
        self.there = v.lanes_below(count)
        self.scales = v.load_floats(data, scales.queries_at)
        self.zero = v.splat(0.0)
        self.in_part = b.icmp_signed("!=", partly, I64(0))
        self.peaks, self.totals = (
            [cgutils.alloca_once_value(b, x) for _ in range(_AT_ONCE)]
            for x in (v.splat(-math.inf), self.zero)
        )
        # The factors that scores have yet to be multiplied by.
        first = self.scales if self.kind == "bf16" else v.splat(1.0)
        self.factor = cgutils.alloca_once_value(b, first)
        # The token's index, counted as a float: conversions are slow.
        self.number = cgutils.alloca_once_value(b, self.zero)
        low, high = (v.load_floats(data, b.add(bounds_at, I64(i))) for i in (0, 16))
        self.low = b.select(self.in_part, low, self.zero)
        self.high = b.select(self.in_part, high, v.splat(TILE_UNIT))

    def emit(self):
        """Emit the code."""
        b, v, state = self.b, self.v, self.state
        self.scan_scores()
        old = v.load_floats(self.data, state.maxima_at, self.there)
        peak = b.fmul(self.merged(self.peaks, v.larger), b.load(self.factor))
        # A new maximum is used only where weights would grow large, so output rows are seldom rescaled. It is rounded
        # to an integer, which makes the subtraction and the rescaling exact.
        grown = b.fcmp_ordered(">", peak, b.fadd(old, v.splat(GROWTH)))
        new = b.select(grown, v.ceil(peak), old)
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        # The argument of `AmxWords.power`.
        self.base = b.fsub(v.splat(0.5), b.select(nothing, self.zero, new))
        # Lanes of 32 bits, with two or four tokens, replace scores: one vector for each part.
        if self.v_kind == "bf16":
            self.put_floats()
        else:
            self.put_integers()
        rescale = b.select(grown, self.power_of(b.fsub(old, new)), v.splat(1.0))
        v.store(rescale, self.data, state.rescale_at)
        v.store_masked(new, self.data, state.maxima_at, self.there)
        before = v.load_floats(self.data, state.sums_at, self.there)
        total = v.fma(before, rescale, self.merged(self.totals, b.fadd))
        v.store_masked(total, self.data, state.sums_at, self.there)

    def power_of(self, x):
        """Return 2 to the power of `x`: exact for integers, as maxima are, except those of vector code."""
        v = self.v
        whole = self.b.fcmp_ordered("==", v.ceil(x), x)
        other = v.power(self.b.fadd(x, v.splat(0.5)))
        return self.b.select(whole, v.scale(v.splat(1.0), x), other)

    def at_token(self, t):
        """Return where a token's scores are."""
        return self.b.add(self.s_at, self.b.mul(t, I64(16)))

    def merged(self, slots, combine):
        """Combine the four vectors of tokens that are computed by turns."""
        first, second, third, fourth = (self.b.load(x) for x in slots)
        return combine(combine(first, second), combine(third, fourth))

    # -- scores

    def scan_scores(self):
        """Find the largest scores; scale, cap and mask them where `weight_of` cannot do it later."""
        b, v = self.b, self.v
        capped = b.fcmp_ordered(">", self.soft_cap, v.float(0.0))
        plain = b.and_(b.not_(self.in_part), b.not_(capped))
        if (
            self.kind == "bf16"
        ):  # scores are multiplied later on, which must not turn their order around
            above = b.bitcast(b.fcmp_ordered(">", self.scales, self.zero), ir.IntType(16))
            plain = b.and_(plain, b.icmp_signed("==", above, ir.Constant(above.type, -1)))
        with b.if_else(plain) as (simple, otherwise):
            with simple, steps(b, I64(0), I64(TILE_UNIT), _AT_ONCE) as (t, _):
                self.find_peaks(t, self.as_it_is if self.kind == "bf16" else self.converted)
            with otherwise:
                if self.kind == "int8":
                    with steps(b, I64(0), I64(TILE_UNIT), 1) as (t, _):
                        v.store(self.converted(t), self.data, self.at_token(t))
                with b.if_then(capped):
                    self.cap_scores()
                with steps(b, I64(0), I64(TILE_UNIT), _AT_ONCE) as (t, _):
                    self.find_peaks(t, self.masked)
                    b.store(b.fadd(b.load(self.number), v.splat(4)), self.number)
                b.store(v.splat(1.0), self.factor)

    def find_peaks(self, t, score_of):
        """Update the largest scores with four tokens; store scores that have changed."""
        b, v = self.b, self.v
        for i, peak in enumerate(self.peaks):
            token = b.add(t, I64(i))
            score = score_of(token, i)
            b.store(v.larger(score, b.load(peak)), peak)
            if score_of != self.as_it_is:
                v.store(score, self.data, self.at_token(token))

    def as_it_is(self, token, i=0):
        """Return the scores of a token, the i-th in turn."""
        return self.v.load_floats(self.data, self.at_token(token))

    def converted(self, token, i=0):
        """Return the scores of a token as floats, times all scales."""
        b, v = self.b, self.v
        at = self.at_token(token)
        upper, lower = (
            b.sitofp(v.load_lanes(self.data, b.add(at, I64(i))), v.type) for i in (0, 4 * AMX_TILE)
        )
        scale = v.load_one(self.data, b.add(self.places.keys_at, token))
        scale = b.fmul(self.scales, v.splat(scale))
        return b.fmul(v.fma(upper, v.splat(256.0), lower), scale)

    def masked(self, token, i):
        """Return the scores of a token, -inf for rows that do not see it."""
        b, v = self.b, self.v
        count = b.fadd(b.load(self.number), v.splat(i))
        seen = b.fcmp_ordered(">=", count, self.low)
        seen = b.and_(seen, b.fcmp_ordered("<", count, self.high))
        score = b.fmul(self.as_it_is(token), b.load(self.factor))
        return b.select(seen, score, v.splat(-math.inf))

    def cap_scores(self):
        """Cap scores: ``s = cap * tanh(factor * s / cap) * log2(e)``, after which the factor is 1."""
        b, v = self.b, self.v
        cap = v.splat(self.soft_cap)
        with steps(b, I64(0), I64(TILE_UNIT), 1) as (t, _):
            score = b.fmul(self.as_it_is(t), b.load(self.factor))
            score = b.fmul(tanh(v, b.fdiv(score, cap)), cap)
            v.store(b.fmul(score, v.splat(math.log2(math.e))), self.data, self.at_token(t))
        b.store(v.splat(1.0), self.factor)

    # -- weights

    def weight_of(self, token, i):
        """Return the weights of a token, the i-th in turn."""
        b, v = self.b, self.v
        weight = v.power(v.fma(self.as_it_is(token), b.load(self.factor), self.base))
        total = self.totals[i % _AT_ONCE]
        b.store(b.fadd(b.load(total), weight), total)
        return weight

    def put_floats(self):
        """Store weights as one or two bf16 numbers, with two tokens in each lane."""
        b, v = self.b, self.v
        with steps(b, I64(0), I64(TILE_UNIT), _AT_ONCE) as (t, _):
            tokens = [b.add(t, I64(i)) for i in range(_AT_ONCE)]
            weights = [self.weight_of(token, i) for i, token in enumerate(tokens)]
            for part in range(self.parts):
                # Rounded to the nearest.
                bits = [b.add(b.bitcast(x, v.int_type), v.splat_int(0x8000)) for x in weights]
                for i in range(0, _AT_ONCE, 2):
                    packed = v.pack(bits[i : i + 2], 16)
                    v.store_lanes(packed, self.data, self.at_token(tokens[i + part]))
                rounded = [v.upper_half(b.bitcast(x, v.type)) for x in bits]
                weights = [b.fsub(x, y) for x, y in zip(weights, rounded, strict=True)]

    def put_integers(self):
        """Store weights times the scales of V rows as 16-bit integers: two bytes, with four tokens in each lane."""
        b, v = self.b, self.v
        largest = cgutils.alloca_once_value(b, v.splat_int(0))
        with steps(b, I64(0), I64(TILE_UNIT), _AT_ONCE) as (t, _):
            for i in range(_AT_ONCE):
                token = b.add(t, I64(i))
                weight = self.weight_of(token, i)
                # Masked tokens count 0, whatever their scales are.
                counts = b.fcmp_unordered("une", weight, self.zero)
                scale = v.splat(v.load_one(self.data, b.add(self.places.values_at, token)))
                weight = b.select(counts, b.fmul(weight, scale), self.zero)
                v.store(weight, self.data, self.at_token(token))
                b.store(v.larger_size(weight, b.load(largest)), largest)
        multiplier, scale = v.quantiser(b.load(largest))
        v.store(scale, self.data, self.places.weights_at)
        with steps(b, I64(0), I64(TILE_UNIT), _AT_ONCE) as (t, _):
            tokens = [b.add(t, I64(i)) for i in range(_AT_ONCE)]
            codes = [v.nearest(b.fmul(self.as_it_is(x), multiplier)) for x in tokens]
            # A word is 256 times its upper byte plus the lower one, both signed.
            upper = [b.add(x, v.splat_int(128)) for x in codes]
            v.store_lanes(v.pack(upper, 8), self.data, self.at_token(tokens[0]))
            v.store_lanes(v.pack(codes, 0), self.data, self.at_token(tokens[1]))


#: Columns of V that are packed and summed together: four AMX tiles.
SEGMENT = 64
# Tiles of weights of one part: 64 tokens take two rows of bf16, or one of INT8.
_HALVES = {"bf16": 2, "int8": 1}


@functools.cache
def make_all_finite(kind):
    """`all_finite` for a storage kind of V."""

    @emits(types.boolean)
    def all_finite(b, values, begin, end):
        """Return ``isfinite(v[begin:end]).all()`` for a tile's V rows; codes are always finite."""
        if kind == "int8":
            return cgutils.true_bit
        v = AmxWords(b)
        largest = cgutils.alloca_once_value(b, v.splat_int(0))
        rows = as_bytes(b, values.words)
        row_bytes = b.mul(values.dim, I64(2))
        with steps(b, begin, end, 1) as (t, _):
            at = b.mul(b.load(b.gep(values.offsets, [t])), I64(2))
            with steps(b, I64(0), row_bytes, 64) as (i, _):
                line = v.load_bytes(rows, b.add(at, i), b.sub(row_bytes, i), 64)
                words = v.words(line)
                # Signs are shifted out: only the exponent matters.
                wide = b.bitcast(b.shl(words, v.splat_word(1)), v.int_type)
                for half in (b.and_(wide, v.splat_int(0xFFFF)), b.lshr(wide, v.splat_int(16))):
                    b.store(v.larger_int(half, b.load(largest)), largest)
        return b.icmp_signed("<", v.fold(b.load(largest), v.larger_int), I32(0xFF00))

    return all_finite


@functools.cache
def make_amx_pack_values(kind, next_kind):
    """`amx_pack_values` for a storage kind of V; `next_kind` is that of the rows that are prefetched."""

    @emits()
    def amx_pack_values(b, f, to_at, values, begin, end, column, next_rows):
        """Pack 64 columns of a tile's V rows for the unit, from `column` on, in ``f[to_at:]``.

        In NumPy, for bf16: ``v[:, column : column + 64].reshape(2, 16, 2, 4, 16).transpose(0, 3, 4, 1, 2)``. Each half
        of the tokens makes four tiles of 16 columns and 16 pairs of tokens. Rows outside ``[begin, end)`` and columns
        past the head dim become zeros. 2,048 floats are written, 1,024 for INT8. Meanwhile the same rows of `next_rows`
        (K rows of a later tile) are prefetched.

        Rows of two tokens (four for INT8) are interleaved first, which makes pairs (fours) in lanes of 32 bits. Then
        squares of 16 lanes are transposed::

            t0: c0 c1 c2 ...         t0c0 t1c0 | t0c1 t1c1 | ...  turn 0         t0c0 t1c0 | t2c0 t3c0 | ...
            t1: c0 c1 c2 ...   ->    t2c0 t3c0 | t2c1 t3c1 | ...  turn 1   ->    t0c1 t1c1 | t2c1 t3c1 | ...
        """
        _ValuePacking(b, (kind, next_kind), f, to_at, values, begin, end, column, next_rows).emit()

    return amx_pack_values


class _ValuePacking:
    """Emits `amx_pack_values`."""

    def __init__(self, b, kinds, data, to_at, values, begin, end, column, next_rows):
        self.kind, self.next_kind = kinds
        self.b, self.v, self.data, self.to_at = b, AmxWords(b), data, to_at
        self.values, self.begin, self.end, self.column = values, begin, end, column
        self.next_rows = next_rows
        self.size = 2 if self.kind == "bf16" else 1
        self.each = 4 // self.size  # tokens that share a lane
        self.bytes_type = ir.VectorType(I8, 64)
        self.row_bytes = b.mul(values.dim, I64(self.size))
        self.rows = as_bytes(b, values.words)

    def emit(self):
        """Emit the code: a fast path for whole tiles, and a general one."""
        b, v = self.b, self.v
        whole = b.icmp_signed("<=", b.add(self.column, I64(SEGMENT)), self.values.dim)
        full = b.and_(
            b.icmp_signed("==", self.begin, I64(0)), b.icmp_signed("==", self.end, I64(TILE_UNIT))
        )
        with b.if_else(b.and_(full, whole)) as (all_of_it, some):
            with all_of_it:
                self.pack(False)
            with some:
                self.pack(True)
        # So far, rows are tokens and lanes are columns.
        with steps(b, I64(0), I64(4 * _HALVES[self.kind] * AMX_TILE), AMX_TILE) as (tile, _):
            at = [b.add(b.add(self.to_at, tile), I64(16 * i)) for i in range(16)]
            lanes = [v.load_lanes(self.data, x) for x in at]
            for x, row in zip(at, v.transposed(lanes), strict=True):
                v.store_lanes(row, self.data, x)

    def pack(self, partly):
        """Interleave the rows of two or four tokens at a time."""
        b, v = self.b, self.v
        with steps(b, I64(0), I64(TILE_UNIT // self.each), 1) as (turn, _):
            tokens = [b.add(b.mul(turn, I64(self.each)), I64(i)) for i in range(self.each)]
            places = [
                b.mul(b.load(b.gep(self.values.offsets, [t])), I64(self.size)) for t in tokens
            ]
            next_places = [b.load(b.gep(self.next_rows.offsets, [t])) for t in tokens]
            left = [self.row_bytes] * self.each
            if partly:
                left = []
                for t in tokens:
                    seen = b.icmp_signed("<", t, self.end)
                    seen = b.and_(b.icmp_signed(">=", t, self.begin), seen)
                    left.append(b.select(seen, self.row_bytes, I64(0)))
            at = b.mul(self.column, I64(self.size))
            for next_at in next_places:
                for i in range(0, SEGMENT, ON_LINE[self.next_kind]):
                    column = b.add(self.column, I64(i))
                    prefetch_column(b, self.next_kind, self.next_rows.words, next_at, column)

            def line_of(i, line):
                """Return 64 bytes of a token's row, spread for `interleave`."""
                start = b.add(at, I64(64 * line))
                if partly:
                    return self.spread(self.load_some(places[i], start, left[i]))
                pointer = b.gep(self.rows, [b.add(places[i], start)])
                whole = b.load(b.bitcast(pointer, self.bytes_type.as_pointer()), align=1)
                return self.spread(whole)

            if self.kind == "bf16":
                mixed = []
                for line in range(2):
                    pair = [v.words(line_of(i, line)) for i in range(2)]
                    mixed += v.interleave(*pair)
            else:
                codes = [b.bitcast(line_of(i, 0), self.bytes_type) for i in range(4)]
                halves = zip(v.interleave(*codes[:2]), v.interleave(*codes[2:]), strict=True)
                mixed = [x for pair in halves for x in v.interleave(*(v.words(y) for y in pair))]
            # Four tiles for every 64 bytes of weights, one row of each.
            tile, row = b.lshr(turn, I64(4)), b.and_(turn, I64(15))
            first = b.add(b.add(self.to_at, b.mul(tile, I64(4 * AMX_TILE))), b.mul(row, I64(16)))
            for j, x in enumerate(mixed):
                v.store_lanes(x, self.data, b.add(first, I64(j * AMX_TILE)))

    def load_some(self, place, start, left):
        """Load 64 bytes of a row from `start` on, of which `left` remain; bytes past its end are 0."""
        b = self.b
        count = b.sub(left, start)
        count = b.select(b.icmp_signed(">", count, I64(0)), count, I64(0))
        return self.v.load_bytes(self.rows, b.add(place, start), count, 64)

    def spread(self, x):
        """Move pieces of 8 or 4 bytes to where `interleave` puts columns in order."""
        b, v = self.b, self.v
        type_ = ir.VectorType(ir.IntType(128 // self.each), 4 * self.each)
        order = [4 * piece + i for i in range(4) for piece in range(self.each)]
        x = b.bitcast(x, type_)
        return b.bitcast(v.shuffle(x, x, order), v.int_type)


@functools.cache
def make_amx_accumulate(kind, weight_parts):
    """`amx_accumulate` for a storage kind of V and so many parts of a weight."""

    @emits()
    def amx_accumulate(b, f, weights_at, scales_at, packed_at, columns, spare_at, outputs):
        """Add packed V rows: ``o[d, r] = rescale[r] * o[d, r] + sum over t of p[r, t] * v[t, d]``, for 16 query rows.

        V rows have `columns` columns, a multiple of 64. `amx_pack_values` has packed them, each 64 in 2,048 floats.
        Weights are those of `amx_softmax`; for INT8, the scale of row r's weights is at ``f[scales_at + r]``. Sums are
        transposed output rows: the 16 floats of column d are at ``f[outputs.at + 16 * d]``. ``f[spare_at:]`` has room
        for 512 floats.
        """
        _AmxSums(
            b, (kind, weight_parts), f, weights_at, scales_at, packed_at, columns, spare_at, outputs
        ).emit()

    return amx_accumulate


class _AmxSums:
    """Emits `amx_accumulate`. Weights are in tiles 4 to 7, V in 2 and 3, sums in 0 and 1."""

    def __init__(
        self, b, kinds, data, weights_at, scales_at, packed_at, columns, spare_at, outputs
    ):  # fmt: skip
        self.kind, self.parts = kinds
        self.b, self.v, self.amx, self.data = b, AmxWords(b), Amx(b), data
        self.weights_at, self.scales_at, self.packed_at = weights_at, scales_at, packed_at
        self.columns, self.spare_at, self.outputs = columns, spare_at, outputs
        self.rescale = self.v.load_floats(data, outputs.rescale_at)

    def emit(self):
        """Emit the code."""
        for part in range(self.parts):
            for half in range(_HALVES[self.kind]):
                self.load_weights(part, half)
        if self.kind == "bf16":
            self.rescale_sums()
            self.add_floats()
        else:
            self.add_integers()

    def sum_at(self, column):
        """Return where the sums of a column are."""
        return self.b.add(self.outputs.at, self.b.mul(column, I64(16)))

    def pointer(self, at):
        """Return the address of a float of scratch memory."""
        return self.v.floats_at(self.data, at)

    def load_weights(self, part, half):
        """Load the weights of a part, for half of the tokens."""
        halves, each = _HALVES[self.kind], ELEMENTS[self.kind] // AMX_ROWS
        at = self.b.add(self.weights_at, I64(16 * (AMX_ROWS * each * half + part)))
        self.amx.load(4 + halves * part + half, self.pointer(at), I64(64 * each))

    def load_values(self, tile, half, column):
        """Load V of sixteen columns; 64 columns make four tiles for each half of the tokens."""
        b = self.b
        segment, rest = b.sdiv(column, I64(SEGMENT)), b.srem(column, I64(SEGMENT))
        at = b.add(b.mul(segment, I64(8 * AMX_TILE)), b.mul(rest, I64(16)))
        at = b.add(b.add(self.packed_at, at), I64(4 * half * AMX_TILE))
        self.amx.load(tile, self.pointer(at), I64(64))

    def rescale_sums(self):
        """Rescale the sums, which is seldom needed: products are added to the sums in place."""
        b, v = self.b, self.v
        moved = b.bitcast(b.fcmp_unordered("une", self.rescale, v.splat(1.0)), ir.IntType(16))
        with (
            b.if_then(b.icmp_signed("!=", moved, ir.Constant(moved.type, 0))),
            steps(b, I64(0), self.columns, 1) as (column, _),
        ):
            at = self.sum_at(column)
            v.store(b.fmul(v.load_floats(self.data, at), self.rescale), self.data, at)

    def add_floats(self):
        """Add products to two sums by turns, as each waits for the product before."""
        b, amx, product = self.b, self.amx, PRODUCT[self.kind]
        with steps(b, I64(0), self.columns, 32) as (column, _):
            two = [column, b.add(column, I64(16))]
            for i in range(2):
                amx.load(i, self.pointer(self.sum_at(two[i])), I64(64))
            for half in range(_HALVES[self.kind]):
                for part in range(self.parts):
                    for i in range(2):
                        if part == 0:
                            self.load_values(2 + i, half, two[i])
                        amx.multiply(product, i, 2 + i, 4 + _HALVES[self.kind] * part + half)
            for i in range(2):
                amx.store(i, self.pointer(self.sum_at(two[i])), I64(64))

    def add_integers(self):
        """Multiply upper and lower bytes; add their combined values as floats."""
        b, v, amx = self.b, self.v, self.amx
        scale = v.load_floats(self.data, self.scales_at)
        spares = (self.spare_at, b.add(self.spare_at, I64(AMX_TILE)))
        with steps(b, I64(0), self.columns, 16) as (column, _):
            self.load_values(2, 0, column)
            for part, spare in enumerate(spares):
                amx.clear(part)
                amx.multiply(PRODUCT[self.kind], part, 2, 4 + part)
                amx.store(part, self.pointer(spare), I64(64))
            with steps(b, I64(0), I64(AMX_TILE), 16) as (i, _):
                upper, lower = (
                    b.sitofp(v.load_lanes(self.data, b.add(at, i)), v.type) for at in spares
                )
                total = b.fmul(v.fma(upper, v.splat(256.0), lower), scale)
                at = b.add(self.sum_at(column), i)
                before = v.load_floats(self.data, at)
                v.store(v.fma(before, self.rescale, total), self.data, at)


@emits()
def transpose_blocks(b, f, blocks, count, source, target):
    """Transpose blocks of 16 rows of 16 floats: ``target[i] = source[i].T`` for `blocks` blocks.

    `source` and `target` are tuples (at, step, block): row r of block i is at ``f[at + i * block + r * step]``. The
    first `count` rows of the result are written.
    """
    from_at, from_step, from_block = cgutils.unpack_tuple(b, source, 3)
    to_at, to_step, to_block = cgutils.unpack_tuple(b, target, 3)
    v = AmxWords(b)
    with steps(b, I64(0), blocks, 1) as (block, _):
        at = b.add(from_at, b.mul(block, from_block))
        rows = [v.load_floats(f, b.add(at, b.mul(from_step, I64(r)))) for r in range(AMX_ROWS)]
        at = b.add(to_at, b.mul(block, to_block))
        for r, row in enumerate(v.transposed(rows)):
            with b.if_then(b.icmp_signed("<", I64(r), count)):
                v.store(row, f, b.add(at, b.mul(to_step, I64(r))))
