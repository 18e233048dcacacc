"""Emit scores of query rows with a tile of K rows, and weighted sums of V rows.

Scores are computed in floats, in integers or in pairs of bf16. Sums are computed in floats.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.scales import load_group
from numkv.kernels.cpu.attention.records import PAIRS
from numkv.kernels.cpu.vectors.emit import (
    I16,
    I64,
    emits,
    for_rows,
    keep_in_memory,
    numbers_taken,
    scratch_floats,
    steps,
)
from numkv.kernels.cpu.vectors.features import ACCUMULATORS, LANES, REGISTERS, row_unroll
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.stored import LOOKED_UP, ON_LINE, in_words, loaded_words
from numkv.kernels.cpu.vectors.vectors import Vectors
from numkv.kinds import kind as kind_named
from numkv.rows.int4 import GROUP

# With one query row: vectors of a K row that are multiplied before the next row starts. They stay in registers.
_IN_ORDER = 8
# Bytes of a group of INT4 codes. Byte j stores element j in its low nibble, element j + _PAIRS in its high nibble.
_PAIRS = GROUP // 2


def rows_in_vector(kind, rows):
    """Return how many of some query rows, computed at once, have elements in a vector that K rows are multiplied with.

    K rows are widened in registers, once for all vectors. The fewer rows a vector has, the more lanes remain to be
    added, but the fewer vectors are widened. Widening takes long for codes that are looked up. For many query rows, and
    for INT4, it is done into scratch memory instead; then a vector has elements of all rows.
    """
    if kind == "int4" or (kind in LOOKED_UP and rows > 4):
        return rows
    return max(1, rows // 4)


@functools.cache
def make_interleave_queries(kind, compute):
    """Make `interleave_queries` for a storage kind of K and a float type, or `PAIRS`."""

    @emits()
    def interleave_queries(b, rows, q, q_at, q_step, size, to_at):
        """Interleave `rows` query rows: ``to = q.reshape(rows, -1, n).swapaxes(0, 1)``.

        n is the number of lanes by that of `rows_in_vector`. A vector then has n elements of each of these, as
        `qk_tile` reads them. For eight rows and 16 lanes::

            a0 ... a7 | b0 ... b7        first vector
            c0 ... c7 | d0 ... d7        second vector; the fifth begins with a8

        Row r is at ``q_at + r * q_step`` of the floats `q`. The result starts at ``q[to_at]``. `size` floats of each
        row are read, a multiple of n.
        """

        def emit(rows):
            v = Vectors(b, compute)
            each = v.lanes // rows_in_vector(kind, rows)
            with steps(b, I64(0), size, each) as (i, _):
                to = b.add(to_at, b.mul(i, I64(rows)))
                for r in range(rows):
                    at = b.add(b.add(q_at, b.mul(I64(r), q_step)), i)
                    v.store(v.load_part(q, at, each), q, b.add(to, I64(r * each)))

        for_rows(b, rows, emit, row_unroll(compute))

    return interleave_queries


@functools.cache
def make_qk_tile(kind, compute, next_kind, by_channel=False):
    """Make `qk_tile` for a storage kind of K and a float type, or `PAIRS`.

    `next_kind` is the storage kind of the prefetched rows. With `by_channel`, ``"int8"`` stands for INT8_CHANNEL.
    """

    @emits()
    def qk_tile(b, rows, floats, queries, keys, count, s_at, extents):
        """Compute scores of `rows` query rows and `count` K rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

        Query rows (`queries`) are those of `interleave_queries`, with zeros up to whole vectors. `count` is rounded up
        to whole groups of tokens, so the offsets of `keys` must be valid up to `KV_TILE`. Scores go to
        ``s_at + t * rows + r``.

        - INT8, CODE4 and CODE6: scores are multiplied by the tokens' scales. With scales by channel, a number of each
          query row is added to its scores instead. With float32, query rows are integers from `quantise_query`. Sums
          are then integers too, and scores are also multiplied by the scales of query rows.
        - `PAIRS`: query rows are those of `pair_row`. Scores are multiplied by their scales.
        - INT4: K rows are dequantised with the scales and minima that `gather_groups` recorded.

        A vector has parts of one or more query rows (`rows_in_vector`). A few elements of a K row are repeated in all
        parts. The vector then holds products of one token with these rows, and the lanes of each part remain to be
        added. For eight rows, of which two are in a vector::

            q, interleaved    a0 a1 a2 a3 a4 a5 a6 a7 | b0 b1 b2 b3 b4 b5 b6 b7
            k[t], repeated    k0 k1 k2 k3 k4 k5 k6 k7 | k0 k1 k2 k3 k4 k5 k6 k7
            sum of products   of row a                | of row b

        Some kinds are first widened into scratch memory; a vector then has parts of all rows. Meanwhile the memory in
        `extents` (the tile's V rows) is prefetched.
        """
        emitter = _Scores(
            b, (kind, compute, next_kind), by_channel, floats, queries, keys, count, s_at, extents
        )
        for_rows(b, rows, emitter.emit, row_unroll(compute))

    return qk_tile


class _Scores:
    """Emit `qk_tile`."""

    def __init__(self, b, kinds, by_channel, floats, queries, keys, count, s_at, extents):
        self.kind, compute, next_kind = kinds
        self.by_channel = by_channel
        self.b, self.v = b, Vectors(b, compute)
        self.stream = PrefetchStream(b, next_kind, extents)
        self.floats, self.queries, self.keys, self.count, self.s_at = (
            floats, queries, keys, count, s_at
        )  # fmt: skip
        self.by_row = kind_named(self.kind).scales_per in ("row", "channel")
        self.integers = self.by_row and compute == "float32"
        self.pairs = compute == PAIRS
        self.in_unit = 2 if self.integers or self.pairs else 1  # columns in a lane

    def emit(self, rows):
        """The code for a number of query rows."""
        b, v = self.b, self.v
        self.in_vector = rows_in_vector(self.kind, rows)
        directly = self.kind != "int4" and (rows == 1 or self.in_vector < rows)
        of_token = rows // self.in_vector  # sums of products
        each = v.lanes // rows  # tokens in a vector of scores
        type_ = v.int_type if self.integers else v.type
        taken = max(8, each) if rows == 1 else ACCUMULATORS // of_token
        sums = [cgutils.alloca_once(b, type_) for _ in range(taken * of_token)]
        row_scales = (
            v.repeated(self.floats, self.queries.scales_at, rows) if self.in_unit > 1 else None
        )

        def add(unit, values):
            """Add products of some lanes of each row, starting at lane `unit`."""
            values = functools.cache(values)
            for i in range(of_token):
                q_at = b.add(b.mul(unit, I64(rows)), I64(i * v.lanes))
                q_lanes = v.load_floats(self.floats, b.add(self.queries.at, q_at))
                for t, slot in enumerate(sums[i::of_token]):
                    total, k_lanes = b.load(slot), values(t)
                    if self.integers:
                        total = v.add_pairs(total, q_lanes, k_lanes)
                    elif self.pairs:
                        total = v.add_bf16_pairs(total, b.bitcast(q_lanes, v.int_type), k_lanes)
                    else:
                        total = v.fma_to(total, q_lanes, k_lanes)
                    b.store(total, slot)

        with steps(b, I64(0), self.count, taken) as (t0, _):
            for slot in sums:
                b.store(ir.Constant(type_, None), slot)
            if directly:
                self.add_directly(t0, rows, taken, sums, add)
            else:
                self.add_widened(t0, taken, add)
            scores_of = v.sums_by_row([b.load(slot) for slot in sums], self.in_vector)
            for i, scores in enumerate(scores_of):
                token = b.add(t0, I64(i * each))
                if self.integers:
                    scores = b.sitofp(scores, v.type)
                if row_scales is not None:
                    scores = b.fmul(scores, row_scales)
                if self.by_channel:
                    scores = b.fadd(scores, v.repeated(self.floats, self.queries.addends_at, rows))
                elif self.by_row:
                    factors = v.stretched(self.floats, b.add(self.keys.scales_at, token), each)
                    scores = b.fmul(scores, factors)
                v.store(scores, self.floats, b.add(self.s_at, b.mul(token, I64(rows))))

    def words_below(self, columns, most):
        """Return a mask of the words of the first `columns` of `most` columns; None for all."""
        if columns is None:
            return None
        count = in_words(self.b, self.kind, columns)
        return self.v.lanes_below(count, lanes=loaded_words(self.kind, most))

    # -- rows as they are

    def add_directly(self, t0, rows, tokens, sums, add):
        """Add products of elements that are read from K rows directly, without scratch memory."""
        b, v = self.b, self.v
        each = v.lanes // self.in_vector
        k_at = [b.load(b.gep(self.keys.offsets, [b.add(t0, I64(t))])) for t in range(tokens)]
        columns = each * self.in_unit

        def add_part(d, left=None):
            mask = self.words_below(left, columns)

            def values(t):
                at = b.add(k_at[t], in_words(b, self.kind, d))
                if self.integers:
                    return v.load_codes(self.keys.words, at, mask, self.kind, self.in_vector)
                if self.pairs:
                    return self.load_pairs(at, each, mask)
                return v.load(self.kind, self.keys.words, at, mask, d, self.in_vector)

            add(b.sdiv(d, I64(self.in_unit)), values)

        size, dim = max(columns, ON_LINE[self.kind]), self.keys.dim
        lines, whole = (b.and_(dim, I64(-x)) for x in (size, columns))

        start = I64(0)
        in_order = _IN_ORDER // self.in_unit * columns
        if rows == 1 and not self.integers and in_order % size == 0:
            start = b.and_(dim, I64(-in_order))
            with steps(b, I64(0), start, in_order) as (d, _):
                self.add_in_order(k_at, d, sums)
        with steps(b, start, lines, size) as (d, _):
            for i in range(0, size, columns):
                self.stream.issue(tokens * columns, i // columns)
                add_part(b.add(d, I64(i)))
        with b.if_then(b.icmp_signed("<", lines, dim)):
            self.stream.issue(tokens * columns)
            if size > columns:
                with steps(b, lines, whole, columns) as (d, _):
                    add_part(d)
            if columns > 1:
                with b.if_then(b.icmp_signed("<", whole, dim)):
                    add_part(whole, b.sub(dim, whole))

    def add_in_order(self, k_at, d, sums):
        """Add products of several vectors of one query row, token after token.

        Memory is then read sequentially, so the hardware prefetcher continues the stream. The terms of each sum and
        their order do not change.
        """
        b, v, in_unit = self.b, self.v, self.in_unit
        count = _IN_ORDER // in_unit
        columns = [b.add(d, I64(i * in_unit * v.lanes)) for i in range(count)]
        units = (b.ashr(column, I64(in_unit - 1)) for column in columns)
        q = [v.load_floats(self.floats, b.add(self.queries.at, unit)) for unit in units]
        for row_at, slot in zip(k_at, sums, strict=True):
            self.stream.issue(count * in_unit * v.lanes)
            total = b.load(slot)
            for column, lanes in zip(columns, q, strict=True):
                at = b.add(row_at, in_words(b, self.kind, column))
                if self.pairs:
                    total = v.add_bf16_pairs(
                        total, b.bitcast(lanes, v.int_type), self.load_pairs(at, v.lanes)
                    )
                else:
                    total = v.fma_to(total, lanes, v.load(self.kind, self.keys.words, at))
            b.store(total, slot)

    def load_pairs(self, at, count, mask=None):
        """Load `count` pairs of bf16, and repeat them; words outside `mask` are zero and never read."""
        b, v = self.b, self.v
        words = ir.VectorType(I16, 2 * count)
        pointer = v.pointer(self.keys.words, at, I16)
        if mask is None:
            value = b.load(b.bitcast(pointer, words.as_pointer()), align=2)
        else:
            value = v.masked_load(pointer, words, 2, mask)
        pairs = b.bitcast(value, ir.VectorType(v.int, count))
        return v.in_parts(pairs, v.lanes)

    # -- rows that are widened first

    def add_widened(self, t0, tokens, add):
        """Add products of some tokens' elements, a few columns at a time, through scratch memory."""
        b, v, dim = self.b, self.v, self.keys.dim
        widen, columns = self.widen_levels, self.in_unit * v.lanes
        if self.kind == "int4":
            widen, columns = self.widen_group, GROUP
        each, size = v.lanes // self.in_vector, columns // self.in_unit  # size: lanes of a token
        scratch = scratch_floats(b, v.float, tokens * size)
        with steps(b, I64(0), dim, columns) as (d, _):
            left = b.sub(dim, d)
            whole = b.icmp_signed(">=", left, I64(columns))
            with steps(b, I64(0), I64(tokens), 1) as (i, _):
                to = v.pointer(scratch, b.mul(i, I64(size)), v.float)
                with b.if_else(whole, likely=True) as (of_whole, of_rest):
                    with of_whole:
                        widen(b.add(t0, i), d, to)
                    with of_rest:
                        widen(b.add(t0, i), d, to, left)
            left = b.sdiv(b.add(left, I64(self.in_unit - 1)), I64(self.in_unit))
            first = b.sdiv(d, I64(self.in_unit))
            with steps(b, I64(0), b.select(whole, I64(size), left), each) as (i, _):
                self.stream.issue(tokens * each * self.in_unit, b.sdiv(i, I64(each)))
                add(
                    b.add(first, i),
                    lambda t: v.repeated(scratch, b.add(i, I64(t * size)), each),
                )

    def widen_levels(self, t, d, to, columns=None):
        """Put levels of token t's row, from column d on, at `to`; only `columns` of them at a row's end."""
        b, v = self.b, self.v
        at = b.add(b.load(b.gep(self.keys.offsets, [t])), in_words(b, self.kind, d))
        mask = self.words_below(columns, self.in_unit * v.lanes)
        if self.integers:
            values = b.bitcast(v.load_codes(self.keys.words, at, mask, self.kind), v.type)
        else:
            values = v.load(self.kind, self.keys.words, at, mask, d)
        v.store(values, to, I64(0))

    def widen_group(self, t, d, to, columns=None):
        """Put a group of token t's INT4 row, from column d on, at `to`; only `columns` of it at a row's end."""
        b, v = self.b, self.v
        half = I64(_PAIRS) if columns is None else b.ashr(columns, I64(1))
        group = b.ashr(d, I64(GROUP.bit_length() - 1))
        scale = load_group(v, self.floats, self.keys.scales_at, t, group, self.keys.groups)
        row_at = b.add(b.load(b.gep(self.keys.offsets, [t])), b.ashr(d, I64(1)))
        pairs = []
        for first in range(0, _PAIRS, v.lanes):
            mask = None if columns is None else v.lanes_below(half, first)
            at = b.add(row_at, I64(first))
            pairs.append((first, v.load_nibbles(self.keys.words, at, *scale, mask)))
        if columns is not None:  # lanes past a short group must be finite
            for first in range(0, GROUP, v.lanes):
                v.store(v.splat(0.0), to, I64(first))
        # In a short group, high nibbles overwrite the lanes past the low ones.
        for i, start in enumerate((I64(0), half)):
            for first, values in pairs:
                v.store(values[i], to, b.add(start, I64(first)))


@functools.cache
def make_accumulate_pv(kind, compute, next_kind):
    """Make `accumulate_pv` for a storage kind of V and a float type; `next_kind` is that of the prefetched rows."""

    @emits()
    def accumulate_pv(b, rows, count, floats, p_at, values, begin, end, outputs, extents):
        """Add weighted V rows: ``o[r, d] = rescale[r] * o[r, d] + sum over t in [begin, end) of p[t, r] * v[t, d]``.

        All floats are in one array: p[t, r] is at ``p_at + t * rows + r``, o[r, d] at
        ``outputs.at + r * outputs.step + d``. The first `count` of `rows` rows are computed. Output rows are padded to
        whole vectors; columns past the head dim get zeros. For quantised V, `values` has the place of the tokens'
        scales. They come from `gather_scales` (INT8, CODE4 and CODE6, with float64 only) or `gather_groups` (INT4).

        A vector holds columns of one row. Sums stay in registers over all tokens::

            o[r, 0:16]  += p[t, r] * v[t, 0:16]
            o[r, 16:32] += p[t, r] * v[t, 16:32]         for all rows, a few vectors of columns at a time

        Meanwhile the memory in `extents` (the next tile's K rows) is prefetched.
        """
        kinds = kind, compute, next_kind
        emitter = WeightedSums(
            b, kinds, rows, count, floats, p_at, values, begin, end, outputs, extents
        )
        most = row_unroll(compute)
        for_rows(b, count, emitter.emit, most, numbers_taken(rows, most))

    return accumulate_pv


class WeightedSums:
    """Emit `accumulate_pv`; a subclass may define its own turns and products."""

    #: Tokens of a turn of the innermost loop.
    tokens = 1

    def __init__(self, b, kinds, rows, count, floats, p_at, values, begin, end, outputs, extents):
        self.kind, self.compute, self.next_kind = kinds
        self.b, self.v = b, Vectors(b, self.compute)
        self.row_step, self.floats, self.p_at, self.values = rows, floats, p_at, values
        self.begin, self.end, self.outputs, self.extents = begin, end, outputs, extents

    def emit(self, rows):
        """The code for a number of query rows."""
        self.stream = PrefetchStream(self.b, self.next_kind, self.extents)
        # With 16 registers, more rows than four leave no room for the sums of two vectors of columns each.
        self.passes = -(-rows // 4) if REGISTERS == 16 else 1
        at_once = -(-rows // self.passes)
        for first in range(0, rows, at_once):
            self.taken = range(first, min(rows, first + at_once))
            self.one_pass()

    def one_pass(self):
        """The code for the rows of `taken`."""
        b, v, dim = self.b, self.v, self.values.dim
        self.factors = [
            v.load_one(self.floats, b.add(self.outputs.rescale_at, I64(r))) for r in self.taken
        ]
        # A power of 2, because head dims are multiples of large powers of 2.
        vectors = min(8, 1 << max(1, ACCUMULATORS * 3 // 2 // len(self.taken)).bit_length() - 1)
        wide, add, unit = self.units(vectors)
        in_wide = b.mul(b.sdiv(dim, I64(wide * unit)), I64(wide * unit))
        whole = b.and_(dim, I64(-unit))
        with steps(b, I64(0), in_wide, wide * unit) as (column, _):
            add(column, wide)
        if wide > 1:
            with steps(b, in_wide, whole, unit) as (column, _):
                add(column, 1)
        rest = b.sub(dim, whole)
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            add(whole, 1, rest)

    def units(self, vectors):
        """Return how many units of columns fit into `vectors` vectors, the method that adds them, and a unit's size."""
        if self.kind != "int4":
            return vectors, self.add_vectors, self.v.lanes
        self.pieces_at_once = max(1, vectors // 2)  # pairs of vectors
        return max(1, self.pieces_at_once * self.v.lanes // _PAIRS), self.add_groups, GROUP

    def turns(self):
        """Return the innermost loop's first turn and the end of its turns."""
        return self.begin, self.end

    def weights(self, t):
        """Return the weights of a turn's V rows: a vector for each query row."""
        b, v = self.b, self.v
        at = b.add(self.p_at, b.mul(t, self.row_step))
        weights = [v.load_one(self.floats, b.add(at, I64(r))) for r in self.taken]
        if kind_named(self.kind).scales_per == "row":
            scale = v.load_one(self.floats, b.add(self.values.scales_at, t))
            weights = [b.fmul(weight, scale) for weight in weights]
        return [v.splat(weight) for weight in weights]

    def add(self, total, weight, values):
        """Return a sum plus one more product."""
        return self.v.fma(weight, values, total)

    def add_rows(self, columns, mask, load, elements):
        """Emit one pass over the tokens for some vectors of columns, which stay in registers.

        `columns` has the first column of each vector. ``load(t)`` yields their values in a turn. `elements` counts
        those of each token. With a mask, only its lanes of the output are read and written.
        """
        b, v, outputs = self.b, self.v, self.outputs
        sums = [[cgutils.alloca_once(b, v.type) for _ in columns] for _ in self.taken]
        places = [
            [b.add(b.add(outputs.at, b.mul(I64(r), outputs.step)), column) for column in columns]
            for r in self.taken
        ]
        for r in range(len(self.taken)):
            factor = v.splat(self.factors[r])
            for place, slot in zip(places[r], sums[r], strict=True):
                before = v.load_floats(self.floats, place, mask)
                b.store(b.fmul(before, factor), slot)
        with steps(b, *self.turns(), 1) as (t, _):
            weights = self.weights(t)
            self.stream.issue(self.tokens * elements // self.passes, t)
            # With AVX-512, floats that need no conversion are operands of products, loaded anew for each query row. On
            # a Zen 4 shape A in fp32 then takes 0.90 of the time (`python -m perf against`). The CPU probably runs less
            # far ahead, so that fewer prefetches delay its loads.
            as_they_are = LANES == 16 and self.kind == ("fp64" if v.double else "fp32")
            at_once = 1 if as_they_are else len(self.taken)
            for first in range(0, len(self.taken), at_once):
                if first > 0:
                    keep_in_memory(b, self.values.words)
                for i, v_row in enumerate(load(t)):
                    for r in range(first, first + at_once):
                        b.store(self.add(b.load(sums[r][i]), weights[r], v_row), sums[r][i])
        for r in range(len(self.taken)):
            for place, slot in zip(places[r], sums[r], strict=True):
                if mask is None:
                    v.store(b.load(slot), self.floats, place)
                else:
                    v.store_masked(b.load(slot), self.floats, place, mask)

    def add_vectors(self, column, vectors, columns=None):
        """Add `vectors` vectors of columns, or one vector of the last `columns` of a row."""
        b, v = self.b, self.v
        mask, lanes = None, loaded_words(self.kind, v.lanes)
        if columns is not None:
            mask = v.lanes_below(in_words(b, self.kind, columns), lanes=lanes)
        starts = [b.add(column, I64(i * v.lanes)) for i in range(vectors)]

        def load(t):
            row_at = b.load(b.gep(self.values.offsets, [t]))
            for start in starts:
                at = b.add(row_at, in_words(b, self.kind, start))
                yield v.load(self.kind, self.values.words, at, mask, start)

        self.add_rows(starts, None, load, vectors * v.lanes)

    def add_groups(self, column, groups, columns=None):
        """Add `groups` groups of INT4 columns, or one group of the last `columns` of a row."""
        b, v = self.b, self.v
        half = I64(_PAIRS) if columns is None else b.ashr(columns, I64(1))
        group = b.ashr(column, I64(GROUP.bit_length() - 1))
        pieces = [(g, first) for g in range(groups) for first in range(0, _PAIRS, v.lanes)]
        # Each piece of a short group has its own mask.
        size = self.pieces_at_once if columns is None else 1
        for piece in range(0, len(pieces), size):
            taken = pieces[piece : piece + size]
            mask = None if columns is None else v.lanes_below(half, taken[0][1])
            starts = [
                b.add(b.add(column, I64(g * GROUP + first)), start)
                for g, first in taken
                for start in (I64(0), half)
            ]

            def load(t, taken=taken, mask=mask):
                row_at = b.add(b.load(b.gep(self.values.offsets, [t])), b.ashr(column, I64(1)))
                scales = {
                    g: load_group(
                        v, self.floats, self.values.scales_at, t, b.add(group, I64(g)),
                        self.values.groups,
                    )
                    for g in sorted({g for g, _ in taken})
                }  # fmt: skip
                for g, first in taken:
                    at = b.add(row_at, I64(g * _PAIRS + first))
                    yield from v.load_nibbles(self.values.words, at, *scales[g], mask)

            self.add_rows(starts, mask, load, 2 * len(taken) * v.lanes)
