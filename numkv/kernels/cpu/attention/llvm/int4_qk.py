"""Scores of query rows against INT4 rows, in integers. Vectors have 512 bits here: 16 lanes of 32 bits.

Low nibbles make a vector of bytes, high ones another, and a query's integers are taken apart into low and high bytes,
as `int8_qk` has it. Every 128 bits of a row are one quantisation group, of which groups take turns lane by lane: few
lanes then have all groups, and one product with a vector of scales serves them all. A span of 128 elements::

    bytes of a row    g0: 16 bytes | g1: 16 bytes | g2: 16 bytes | g3: 16 bytes
    lanes, by turns   g0 g1 g2 g3 | g0 g1 g2 g3 | g0 g1 g2 g3 | g0 g1 g2 g3         4 bytes each

Rows of at most 64 elements, two groups, share vectors by twos.
"""

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from numkv.kernels.cpu.attention.llvm.int8_qk import TOKENS, add_queries
from numkv.kernels.cpu.attention.llvm.scales import scale_place
from numkv.kernels.cpu.attention.records import INT4_SPAN, KV_TILE
from numkv.kernels.cpu.vectors.emit import (
    I64,
    for_rows,
    keep_in_memory,
    scratch_floats,
    steps,
    unpack,
)
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.words import Words
from numkv.rows.int4 import GROUP

__all__ = ["SHORT", "make_qk_int4", "spread_query", "sum_query_groups"]

#: Rows of at most so many elements, two groups, share vectors by twos.
SHORT = 64


@register_jitable
def spread_query(to, row, scale):
    """Put the elements of a query row, times a scale, where they meet those of INT4 codes: see `qk_int4`."""
    dim = len(row)
    for first in range(0, dim, GROUP):
        half = min(GROUP, dim - first) >> 1
        for i in range(half):
            byte = (first >> 1) + i
            # Of a span first the low nibbles, then the high ones; groups take turns by lanes of four bytes.
            lane, group = (byte & 15) >> 2, (byte & 63) >> 4
            lane = 2 * lane + group if dim <= SHORT else 4 * lane + group
            at = (byte >> 6) * INT4_SPAN + 4 * lane + (byte & 3)
            low, high = scale * row[first + i], scale * row[first + half + i]
            to[at], to[at + INT4_SPAN // 2] = low, high


@intrinsic
def sum_query_groups(typing_context, q, q_at, head_dim, sums_at):
    """Sums of a query row's integers, group by group: ``sums = q.reshape(-1, 32).sum(1)``.

    Of each span of 128 elements there are four numbers (of short rows two) and zeros, 16 in all, at
    ``q[sums_at + 16 * span]``.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data, q_at, head_dim, sums_at = unpack(context, b, sig.args, args)
        v = Words(b)
        spans = b.sdiv(b.add(head_dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
        short = b.icmp_signed("<=", head_dim, I64(SHORT))
        groups = v.lanes_below(b.select(short, I64(2), I64(4)))
        with steps(b, I64(0), spans, 1) as (span, _):
            total = v.splat_int(0)
            for i in range(4):
                at = b.add(b.add(q_at, b.mul(span, I64(INT4_SPAN // 2))), I64(i * v.lanes))
                total = v.add_pairs(total, v.load_words(data, at), v.splat_word(1))
            # Two lanes have the words of four bytes.
            for width in (1, 8, 4):
                other = v.shuffle(total, total, [i ^ width for i in range(16)])
                if width == 4:
                    other = b.select(short, other, v.splat_int(0))
                total = b.add(total, other)
            total = v.shuffle(total, total, [2 * i % 16 for i in range(16)])
            total = b.select(groups, total, v.splat_int(0))
            at = b.add(sums_at, b.mul(span, I64(16)))
            v.store(b.sitofp(total, v.type), data, at)
        return context.get_dummy_value()

    return types.void(q, i8, i8, i8), codegen


@functools.cache
def make_qk_int4(next_kind):
    """`qk_int4`; `next_kind` is the storage kind of the rows that are prefetched."""

    @intrinsic
    def qk_int4(typing_context, rows, floats, queries, keys, count, s_at, extents):
        """Scores of `rows` query rows and `count` INT4 rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

        In NumPy, of integers q of `quantise_query`, codes and their groups' scales and minima::

            products = (q * codes).reshape(-1, 32).sum(1);  s = q_scale * sum(scale * products + minimum * q_sums)

        Query rows lie as `spread_query` puts them, with zeros up to whole spans, and are those of `interleave_bytes`;
        the sums of `sum_query_groups` are interleaved too; `keys` says where `gather_groups` put scales and minima. For
        the rest see `qk_tile`.
        """
        i8 = types.int64

        def codegen(context, b, sig, args):
            emitter = _Int4(b, next_kind, *unpack(context, b, sig.args[1:], args[1:]))
            short = b.icmp_signed("<=", emitter.keys.dim, I64(SHORT))
            with b.if_else(short) as (of_short, of_others):
                with of_short:
                    for_rows(b, args[0], lambda rows: emitter.emit(rows, True))
                with of_others:
                    for_rows(b, args[0], lambda rows: emitter.emit(rows, False))
            return context.get_dummy_value()

        return types.void(i8, floats, queries, keys, i8, i8, extents), codegen

    return qk_int4


class _Int4:
    """Emits `qk_int4`."""

    step = INT4_SPAN // 4  # lanes of a span
    tokens = 16  # whose codes are taken apart at once

    def __init__(self, b, next_kind, floats, queries, keys, count, s_at, extents):
        self.b, self.v = b, Words(b)
        self.stream = PrefetchStream(b, next_kind, extents)
        self.floats, self.queries, self.keys, self.count, self.s_at = (
            floats, queries, keys, count, s_at
        )  # fmt: skip
        self.row_bytes = b.ashr(keys.dim, I64(1))
        self.spans = b.sdiv(b.add(keys.dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
        self.minimum_at = b.mul(self.spans, I64(4 * KV_TILE))
        self.scratch = scratch_floats(b, self.v.float, self.tokens * self.step + self.v.lanes)

    def emit(self, rows, short):
        """The code for a number of query rows."""
        b, v = self.b, self.v
        self.rows, self.short = rows, short
        sums = [cgutils.alloca_once(b, v.type) for _ in range(self.tokens)]
        row_scales = v.repeated(self.floats, self.queries.scales_at, rows)
        with steps(b, I64(0), self.count, self.tokens) as (t0, _):
            for slot in sums:
                b.store(v.splat(0.0), slot)
            if short:
                self.widen(I64(0), t0)
                self.add_span(I64(0), t0, sums)
            else:
                with steps(b, I64(0), self.spans, 1) as (span, _):
                    self.widen(span, t0)
                    self.add_span(span, t0, sums)
            for i, scores in enumerate(v.sums_by_row([b.load(slot) for slot in sums], rows)):
                at = b.add(b.mul(t0, I64(rows)), I64(i * v.lanes))
                v.store(b.fmul(scores, row_scales), self.floats, b.add(self.s_at, at))

    def widen(self, span, t0):
        """A span of some tokens as bytes, in scratch memory; of short rows two tokens side by side."""
        b, v = self.b, self.v
        each = 2 if self.short else 1
        for i in range(self.tokens // each):
            self.stream.issue(INT4_SPAN, i)
            token = b.add(t0, I64(i * each))
            places = []
            for j in range(each):
                t = b.add(token, I64(j))
                places.append(b.load(b.gep(self.keys.offsets, [t])))
            at = b.mul(span, I64(64))
            places = [b.add(place, at) for place in places]
            lanes = v.load_int4(self.keys.words, places, b.sub(self.row_bytes, at))
            # Groups take turns.
            turns = [i + 4 * j for i in range(4) for j in range(4 // each)]
            turns = [8 * i + turn for i in range(each) for turn in turns]
            codes = v.shuffle(lanes, lanes, turns)
            low = v.splat_int(0x0F0F0F0F)
            for j, x in enumerate((codes, b.lshr(codes, v.splat_int(4)))):
                at = I64(i * self.step + j * v.lanes)
                v.store(b.bitcast(b.and_(x, low), v.type), self.scratch, at)

    def add_span(self, span, t0, sums):
        """Add the products of a span to the tokens' sums: by lanes, integers times the scales of their groups."""
        b, v = self.b, self.v
        each = v.lanes // self.rows
        groups = 2 if self.short else 4
        of_class = 8 if self.short else 16  # lanes of low or of high nibbles
        together = min(each, groups)  # groups in the lanes of a row
        keep_in_memory(b, self.scratch)
        for first in range(0, groups, together):
            q_sums = b.add(self.queries.sums_at, b.mul(span, I64(16 * self.rows)))
            q_sums = v.load_floats(self.floats, b.add(q_sums, I64(first * self.rows)))
            turns = range(first, of_class, max(each, groups))
            for start in range(0, self.tokens, TOKENS):
                totals = self.products(span, range(start, start + TOKENS), turns)
                for i, total in enumerate(totals):
                    slot = sums[start + i]
                    token = b.add(t0, I64(start + i))
                    scale, minimum = self.scales_of(token, span, first, together)
                    value = v.fma(q_sums, minimum, b.load(slot))
                    b.store(v.fma(b.sitofp(total, v.type), scale, value), slot)

    def products(self, span, tokens, turns):
        """Products of a span of some tokens with query rows, by lanes; `turns` are the lanes of K rows that count."""
        b, v = self.b, self.v
        each = v.lanes // self.rows
        sums = [[cgutils.alloca_once(b, v.int_type) for _ in range(2)] for _ in tokens]
        for slot in (slot for pair in sums for slot in pair):
            b.store(v.splat_int(0), slot)
        with steps(b, I64(0), I64(self.step), v.lanes) as (nibbles, _):
            for i in turns:
                here = b.add(nibbles, I64(i))
                at = b.add(b.mul(span, I64(self.step)), here)
                at = b.add(self.queries.at, b.mul(at, I64(2 * self.rows)))

                def codes(t, here=here):
                    place = b.add(self.k_at(tokens[t]), here)
                    return v.repeated(self.scratch, place, each)

                add_queries(v, self.floats, at, sums, codes)
        eight = v.splat_int(8)
        return [b.add(b.shl(b.load(high), eight), b.load(low)) for high, low in sums]

    def scales_of(self, token, span, first, together):
        """Scales and minima of some groups."""
        b, v = self.b, self.v
        at = scale_place(b, token, b.mul(span, I64(4)), 2 if self.short else 4)
        at = b.add(b.add(self.keys.scales_at, at), I64(first))
        return [v.repeated(self.floats, x, together) for x in (at, b.add(at, self.minimum_at))]

    def k_at(self, t):
        """Where a token's bytes are in scratch memory."""
        return I64(t // 2 * self.step + t % 2 * 8 if self.short else t * self.step)
