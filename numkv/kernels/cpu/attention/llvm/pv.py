"""The weighted sum of a tile's V rows, in floats."""

from __future__ import annotations

import functools

from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.scales import load_group
from numkv.kernels.cpu.vectors.emit import I64, emits, for_rows, numbers_taken, steps
from numkv.kernels.cpu.vectors.features import ACCUMULATORS, row_unroll
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.stored import in_words, loaded_words
from numkv.kernels.cpu.vectors.vectors import Vectors
from numkv.kinds import kind as kind_named
from numkv.rows.int4 import GROUP

# Bytes of a group of INT4 codes.
_PAIRS = GROUP // 2


@functools.cache
def make_accumulate_pv(kind, compute, next_kind):
    """`accumulate_pv` for a storage kind of V and a float type; `next_kind` is that of the rows that are prefetched."""

    @emits()
    def accumulate_pv(b, rows, count, floats, p_at, values, begin, end, outputs, extents):
        """Add weighted V rows: ``o[r, d] = rescale[r] * o[r, d] + sum over t in [begin, end) of p[t, r] * v[t, d]``.

        All floats are in one array: p[t, r] is at ``p_at + t * rows + r``, o[r, d] at
        ``outputs.at + r * outputs.step + d``. Of the `rows` rows the first `count` are taken. Output rows are padded to
        whole vectors; columns past the head dim get zeros. Where V is quantised, `values` says where `gather_scales`
        (INT8, CODE4 and CODE6, with float64 only) or `gather_groups` (INT4) put the tokens' scales.

        A vector holds columns of one row, and sums stay in registers while all tokens pass::

            o[r, 0:16]  += p[t, r] * v[t, 0:16]
            o[r, 16:32] += p[t, r] * v[t, 16:32]         for all rows, a few vectors of columns at a time

        Meanwhile the memory in `extents` (the next tile's K rows) is prefetched.
        """
        emitter = WeightedSums(
            b,
            (kind, compute, next_kind),
            rows,
            count,
            floats,
            p_at,
            values,
            begin,
            end,
            outputs,
            extents,
        )
        count, most = count, row_unroll(compute)
        for_rows(b, count, emitter.emit, most, numbers_taken(rows, most))

    return accumulate_pv


class WeightedSums:
    """Emits `accumulate_pv`; what a turn is, and what is multiplied with what in it, is a subclass's own."""

    #: Tokens of a turn of the innermost loop.
    tokens = 1

    def __init__(self, b, kinds, rows, count, floats, p_at, values, begin, end, outputs, extents):
        self.kind, self.compute, self.next_kind = kinds
        self.b, self.v = b, Vectors(b, self.compute)
        self.row_step, self.floats, self.p_at, self.values = rows, floats, p_at, values
        self.begin, self.end, self.outputs, self.extents = begin, end, outputs, extents

    def emit(self, rows):
        """The code for a number of query rows."""
        b, v, dim = self.b, self.v, self.values.dim
        self.rows, self.stream = rows, PrefetchStream(b, self.next_kind, self.extents)
        self.factors = [
            v.load_one(self.floats, b.add(self.outputs.rescale_at, I64(r))) for r in range(rows)
        ]
        # A power of 2, as head dims have many of them.
        vectors = min(8, 1 << max(1, ACCUMULATORS * 3 // 2 // rows).bit_length() - 1)
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
        """How many units of columns are taken at once where so many vectors may be, what adds them, and their size."""
        if self.kind != "int4":
            return vectors, self.add_vectors, self.v.lanes
        self.pieces_at_once = max(1, vectors // 2)  # pairs of vectors
        return max(1, self.pieces_at_once * self.v.lanes // _PAIRS), self.add_groups, GROUP

    def turns(self):
        """The innermost loop's first turn and the one after its last."""
        return self.begin, self.end

    def weights(self, t):
        """What V rows of a turn are multiplied with: a vector for each query row."""
        b, v = self.b, self.v
        at = b.add(self.p_at, b.mul(t, self.row_step))
        weights = [v.load_one(self.floats, b.add(at, I64(r))) for r in range(self.rows)]
        if kind_named(self.kind).scales_per == "row":
            scale = v.load_one(self.floats, b.add(self.values.scales_at, t))
            weights = [b.fmul(weight, scale) for weight in weights]
        return [v.splat(weight) for weight in weights]

    def add(self, total, weight, values):
        """A sum and one more product."""
        return self.v.fma(weight, values, total)

    def add_rows(self, columns, mask, load, elements):
        """One pass over the tokens for some vectors of columns, kept in registers.

        `columns` are where they start; ``load(t)`` gives their values in a turn, `elements` of each token. With a
        mask, only its lanes of the output are read and written.
        """
        b, v, outputs = self.b, self.v, self.outputs
        sums = [[cgutils.alloca_once(b, v.type) for _ in columns] for _ in range(self.rows)]
        places = [
            [b.add(b.add(outputs.at, b.mul(I64(r), outputs.step)), column) for column in columns]
            for r in range(self.rows)
        ]
        for r in range(self.rows):
            factor = v.splat(self.factors[r])
            for place, slot in zip(places[r], sums[r], strict=True):
                before = v.load_floats(self.floats, place, mask)
                b.store(b.fmul(before, factor), slot)
        with steps(b, *self.turns(), 1) as (t, _):
            weights = self.weights(t)
            self.stream.issue(self.tokens * elements, t)
            for i, v_row in enumerate(load(t)):
                for r in range(self.rows):
                    b.store(self.add(b.load(sums[r][i]), weights[r], v_row), sums[r][i])
        for r in range(self.rows):
            for place, slot in zip(places[r], sums[r], strict=True):
                if mask is None:
                    v.store(b.load(slot), self.floats, place)
                else:
                    v.store_masked(b.load(slot), self.floats, place, mask)

    def add_vectors(self, column, vectors, columns=None):
        """Add `vectors` vectors of columns, or one with so many columns as a row's end has left."""
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
        """Add `groups` groups of INT4 columns, or one with so many columns as a row's end has left."""
        b, v = self.b, self.v
        half = I64(_PAIRS) if columns is None else b.ashr(columns, I64(1))
        group = b.ashr(column, I64(GROUP.bit_length() - 1))
        pieces = [(g, first) for g in range(groups) for first in range(0, _PAIRS, v.lanes)]
        # Pieces of a short group have masks of their own.
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
