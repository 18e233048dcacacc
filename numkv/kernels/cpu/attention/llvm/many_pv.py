"""Weighted sums of V rows for many query rows: products of blocks in registers."""

from __future__ import annotations

import functools

from numba.core import cgutils

from numkv.kernels.cpu.attention.records import PANEL
from numkv.kernels.cpu.vectors.emit import I64, emits, steps
from numkv.kernels.cpu.vectors.features import MANY_ROWS, MANY_VECTORS
from numkv.kernels.cpu.vectors.vectors import Vectors


@functools.cache
def make_many_pv(in_pairs):
    """`many_pv`; if `in_pairs`, a weight is a lane of `pair_panel_weights`, a V row one of `pair_rows`."""

    @emits()
    def many_pv(b, f, count, p_at, values_at, step, begin, end, outputs):
        """Add weighted V rows: ``o[r, d] = rescale[r] * o[r, d] + sum over t in [begin, end) of p[t, r] * v[t, d]``.

        Weight p[t, r] of `count` query rows is at ``p_at + t * PANEL + r``, V row t at ``values_at + t * step`` as
        `widen_rows` puts it, output row r at ``outputs.at + r * outputs.step``; output rows have whole vectors. All
        floats are in one array. Up to `MANY_ROWS` rows are read past the last one, but not written.

        A vector holds columns, and a weight is repeated in all lanes. Sums of a block of rows and columns stay in
        registers while all tokens pass.
        """
        _PV(b, in_pairs, f, count, p_at, values_at, step, begin, end, outputs).emit()

    return many_pv


class _PV:
    """Emits `many_pv`."""

    def __init__(self, b, in_pairs, data, count, p_at, values_at, step, begin, end, outputs):
        self.b, self.v, self.data, self.count, self.p_at = (
            b,
            Vectors(b, "float32"),
            data,
            count,
            p_at,
        )
        self.in_pairs = in_pairs
        self.values_at, self.step, self.begin, self.end = values_at, step, begin, end
        self.outputs = outputs

    def emit(self):
        """The code: blocks of several vectors of columns, then of one."""
        b, v = self.b, self.v
        wide = MANY_VECTORS * v.lanes
        whole = b.and_(self.outputs.step, I64(-wide))
        with (
            steps(b, I64(0), whole, wide) as (column, _),
            steps(b, I64(0), self.count, MANY_ROWS) as (r, _),
        ):
            self.add_block(r, column, MANY_VECTORS)
        rest = b.icmp_signed("<", whole, self.outputs.step)
        with b.if_then(rest), steps(b, I64(0), self.count, MANY_ROWS) as (r, _):
            self.add_block(r, whole, 1)

    def add_block(self, first_row, column, vectors):
        """Sums of a block of rows and of some vectors of columns."""
        b, v, outputs = self.b, self.v, self.outputs
        sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in range(MANY_ROWS)]
        left = b.sub(self.count, first_row)
        places = []
        for i, slots in enumerate(sums):
            row = b.add(first_row, I64(i))
            place = b.add(b.add(outputs.at, b.mul(row, outputs.step)), column)
            places.append(place)
            factor = v.splat(v.load_one(self.data, b.add(outputs.rescale_at, row)))
            for j, slot in enumerate(slots):
                before = v.load_floats(self.data, b.add(place, I64(j * v.lanes)))
                b.store(b.fmul(before, factor), slot)
        with steps(b, self.begin, self.end, 1) as (t, _):
            v_at = b.add(b.add(self.values_at, b.mul(t, self.step)), column)
            values = [
                v.load_floats(self.data, b.add(v_at, I64(j * v.lanes))) for j in range(vectors)
            ]
            p_at = b.add(b.add(self.p_at, b.mul(t, I64(PANEL))), first_row)
            for i, slots in enumerate(sums):
                weight = v.splat(v.load_one(self.data, b.add(p_at, I64(i))))
                for slot, value in zip(slots, values, strict=True):
                    b.store(self.add(b.load(slot), weight, value), slot)
        for i, (place, slots) in enumerate(zip(places, sums, strict=True)):
            there = v.splat_bit(b.icmp_signed(">", left, I64(i)))
            for j, slot in enumerate(slots):
                v.store_masked(b.load(slot), self.data, b.add(place, I64(j * v.lanes)), there)

    def add(self, total, weight, value):
        """A sum and one more product."""
        b, v = self.b, self.v
        if not self.in_pairs:
            return v.fma(weight, value, total)
        return v.add_bf16_pairs(total, *(b.bitcast(x, v.int_type) for x in (weight, value)))
