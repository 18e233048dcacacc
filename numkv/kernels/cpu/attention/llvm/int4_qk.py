"""Scores of query rows against INT4 rows, in integers. Vectors have 512 bits here: 16 lanes of 32 bits.

A lane is a token: 16 bytes of each of 16 tokens, one quantisation group, are transposed, so that no sums across lanes
are left and a group's scales are vectors too. Low nibbles make vectors of bytes, high ones others, and a query's
integers are taken apart into low and high bytes, as `int8_qk` has it, four of which are repeated in all lanes::

    rows          t0: b0 b1 b2 b3 | b4 ... b7 | b8 ... b11 | b12 ... b15        t1: ...
    transposed    t0: b0 b1 b2 b3 | t1: b0 b1 b2 b3 | t2: b0 b1 b2 b3 | ...     b4 ... b7: a second vector, and so on
    products      s[t0] += b0 * q0 + ... + b3 * q3 | s[t1] ...                  for each query row
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import cgutils
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.records import INT4_SPAN, KV_TILE
from numkv.kernels.cpu.vectors.emit import I8, I64, emits, for_rows, steps
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.words import Words
from numkv.rows.int4 import GROUP

#: Rows of at most so many elements have two groups at most.
SHORT = 64
# Query rows whose sums, of low and of high bytes, stay in registers beside the codes of a group.
_ROWS = 4
_BYTES = GROUP // 2


@register_jitable
def spread_query(to, row, scale):
    """Put the elements of a query row, times a scale, where they meet those of INT4 codes.

    Of each group first those of low nibbles, then those of high ones; a short group has zeros behind each.
    """
    dim = len(row)
    for first in range(0, dim, GROUP):
        half = min(GROUP, dim - first) >> 1
        for i in range(half):
            to[first + i] = scale * row[first + i]
            to[first + _BYTES + i] = scale * row[first + half + i]


@emits()
def sum_query_groups(b, q, q_at, head_dim, sums_at):
    """Sums of a query row's integers, group by group: ``sums = q.reshape(-1, 32).sum(1)``.

    Of each span of 128 elements there are four numbers and zeros, 16 in all, at ``q[sums_at + 16 * span]``.
    """
    v = Words(b)
    spans = b.sdiv(b.add(head_dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
    with steps(b, I64(0), spans, 1) as (span, _):
        sums = v.splat_int(0)
        for i in range(4):
            at = b.add(b.add(q_at, b.mul(span, I64(INT4_SPAN // 2))), I64(i * v.lanes))
            group = v.add_pairs(v.splat_int(0), v.load_words(q, at), v.splat_word(1))
            for width in (8, 4, 2, 1):
                other = v.shuffle(group, group, [lane ^ width for lane in range(16)])
                group = b.add(group, other)
            sums = v.shuffle(sums, group, [16 if lane == i else lane for lane in range(16)])
        at = b.add(sums_at, b.mul(span, I64(16)))
        v.store(b.sitofp(sums, v.type), q, at)


def load_groups(v, base, places, count):
    """Four groups of `count` bytes, at most 16, side by side in a vector of bytes; the others are 0."""
    b = v.b
    type_ = ir.VectorType(I8, _BYTES)
    slots = [cgutils.alloca_once(b, type_) for _ in places]
    whole = b.icmp_signed(">=", count, I64(_BYTES))
    with b.if_else(whole, likely=True) as (of_whole, of_rest):
        with of_whole:
            for slot, at in zip(slots, places, strict=True):
                pointer = b.bitcast(v.pointer(base, at, I8), type_.as_pointer())
                b.store(b.load(pointer, align=1), slot)
        with of_rest:
            for slot, at in zip(slots, places, strict=True):
                b.store(v.load_bytes(base, at, count, _BYTES), slot)
    parts = [b.load(slot) for slot in slots]
    while len(parts) > 1:
        both = [*range(2 * parts[0].type.count)]
        parts = [v.shuffle(*parts[i : i + 2], both) for i in range(0, len(parts), 2)]
    return parts[0]


@functools.cache
def make_qk_int4(next_kind):
    """`qk_int4`; `next_kind` is the storage kind of the rows that are prefetched."""

    @emits()
    def qk_int4(b, rows, floats, queries, keys, count, s_at, extents):
        """Scores of `rows` query rows and `count` INT4 rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

        In NumPy, of integers q of `quantise_query`, codes and their groups' scales and minima::

            products = (q * codes).reshape(-1, 32).sum(1);  s = q_scale * sum(scale * products + minimum * q_sums)

        Query rows lie as `spread_query` puts them, with zeros up to whole spans; each is that of `interleave_bytes` for
        one row, and has the sums of `sum_query_groups`. `keys` says where `gather_groups` put scales and minima, by
        group. For the rest see `qk_tile`.
        """
        emitter = _Int4(b, next_kind, floats, queries, keys, count, s_at, extents)
        for_rows(b, rows, emitter.emit)

    return qk_int4


class _Int4:
    """Emits `qk_int4`."""

    def __init__(self, b, next_kind, floats, queries, keys, count, s_at, extents):
        self.b, self.v = b, Words(b)
        self.stream = PrefetchStream(b, next_kind, extents)
        self.floats, self.queries, self.keys, self.count, self.s_at = (
            floats, queries, keys, count, s_at
        )  # fmt: skip
        self.row_bytes = b.ashr(keys.dim, I64(1))
        spans = b.sdiv(b.add(keys.dim, I64(INT4_SPAN - 1)), I64(INT4_SPAN))
        self.minimum_at = b.mul(spans, I64(4 * KV_TILE))
        # Floats of a query row, and of its sums.
        self.row_step, self.sums_step = (b.mul(spans, I64(n)) for n in (INT4_SPAN // 2, 16))

    def emit(self, rows):
        """The code for a number of query rows."""
        b, v = self.b, self.v
        sums = [cgutils.alloca_once(b, v.type) for _ in range(rows)]
        groups = b.sdiv(b.add(self.keys.dim, I64(GROUP - 1)), I64(GROUP))
        with steps(b, I64(0), self.count, v.lanes) as (t0, _):
            for slot in sums:
                b.store(v.splat(0.0), slot)
            with steps(b, I64(0), groups, 1) as (group, _):
                self.add_group(t0, group, sums)
            scores = []
            for r, slot in enumerate(sums):
                at = b.add(self.queries.scales_at, I64(r))
                scores.append(b.fmul(b.load(slot), v.splat(v.load_one(self.floats, at))))
            at = b.add(self.s_at, b.mul(t0, I64(rows)))
            for i, x in enumerate(v.by_turns(scores)):
                v.store(x, self.floats, b.add(at, I64(i * v.lanes)))

    def add_group(self, t0, group, sums):
        """Add what a group of some tokens gives to their scores."""
        b, v = self.b, self.v
        vectors = self.codes(t0, group)
        at = b.add(b.add(self.keys.scales_at, b.mul(group, I64(KV_TILE))), t0)
        scale = v.load_floats(self.floats, at)
        minimum = v.load_floats(self.floats, b.add(at, self.minimum_at))
        # Two groups make a unit of `interleave_bytes`.
        odd = b.and_(group, I64(1))
        q_at = b.add(b.mul(b.sub(group, odd), I64(v.lanes)), b.mul(odd, I64(GROUP // 4)))
        q_at = b.add(self.queries.at, q_at)
        four = b.and_(group, I64(3))
        sum_at = b.add(b.mul(b.sub(group, four), I64(4)), four)
        sum_at = b.add(self.queries.sums_at, sum_at)
        for first in range(0, len(sums), _ROWS):
            some = range(first, min(len(sums), first + _ROWS))
            totals = {(r, half): v.splat_int(0) for r in some for half in range(2)}
            for i, x in enumerate(vectors):
                if i % 2 == 0 and first == 0:
                    self.stream.issue(v.lanes * GROUP // 4)
                for r, half in totals:
                    at = b.add(q_at, b.mul(self.row_step, I64(r)))
                    at = b.add(at, I64(half * v.lanes + i))
                    q = v.splat(v.load_one(self.floats, at))
                    totals[r, half] = v.add_fours(totals[r, half], x, q)
            for r in some:
                q_sum = b.add(sum_at, b.mul(self.sums_step, I64(r)))
                q_sum = v.splat(v.load_one(self.floats, q_sum))
                total = b.add(b.shl(totals[r, 0], v.splat_int(8)), totals[r, 1])
                value = v.fma(q_sum, minimum, b.load(sums[r]))
                b.store(v.fma(b.sitofp(total, v.type), scale, value), sums[r])

    def codes(self, t0, group):
        """A group of 16 tokens, four bytes of each in a vector: low nibbles, then high ones."""
        b, v = self.b, self.v
        at = b.mul(group, I64(_BYTES))
        left = b.sub(self.row_bytes, at)
        some = []
        for i in range(4):
            tokens = [b.add(t0, I64(i + j)) for j in range(0, 16, 4)]
            places = [b.add(b.load(b.gep(self.keys.offsets, [t])), at) for t in tokens]
            some.append(b.bitcast(load_groups(v, self.keys.words, places, left), v.int_type))
        # The square of four tokens and four lanes in each 128 bits, exchanged.
        wide = ir.VectorType(I64, v.lanes // 2)
        halves = [
            [b.bitcast(x, wide) for x in v.interleave(*some[i : i + 2])] for i in range(0, 4, 2)
        ]
        turned = [x for pair in zip(*halves, strict=True) for x in v.interleave(*pair)]
        turned = [b.bitcast(x, v.int_type) for x in turned]
        low = v.splat_int(0x0F0F0F0F)
        shifted = [b.lshr(x, v.splat_int(4)) for x in turned]
        return [b.and_(x, low) for x in turned + shifted]
