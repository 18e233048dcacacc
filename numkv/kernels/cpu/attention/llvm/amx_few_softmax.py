"""The online softmax of few query rows between products of the matrix unit: scores turned, weights in two parts.

Scores come with a token's rows side by side; few of them would leave most lanes of a vector empty. So sixteen tokens
are turned at a time, and a vector has the scores of sixteen tokens with one query row.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.amx_few_qk import EARLY, prefetch_row, takes_turns
from numkv.kernels.cpu.attention.llvm.amx_softmax import GROWTH
from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.amx import AmxWords
from numkv.kernels.cpu.vectors.emit import I64, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.math import tanh

# V rows of sixteen tokens that are prefetched here.
_LATE = AMX_ROWS - EARLY


@emits(types.int64, soft_cap=types.float32)
def amx_few_softmax(b, f, few, count, start, soft_cap, partly, bounds_at, state, values):
    """Turn the scores of some rows and a block of tokens into weights; return whether earlier sums have to be rescaled.

    The block begins with token `start` of the tile. Scores are those of `amx_few_qk`, in base 2, or with `soft_cap`
    above 0 still to be capped. If `partly` is not 0, row r sees tokens from ``f[bounds_at + r]`` on that are below
    ``f[bounds_at + 16 + r]``, counted from the tile's start. Maxima and sums of the first `count` rows are brought up
    to date as by `online_softmax_step`, but that maxima grow seldom, and to integers; what rescales earlier sums goes
    to ``f[state.rescale_at:]``, 16 floats, 1 for rows past `count`.

    Weights go to ``f[few.weights_at:]``: a row has those of 64 tokens in bf16, high parts of all rows (with those that
    fill up) come before low ones. Of the tokens' V rows, `values`, those are prefetched that `amx_few_qk` has left.
    """
    return _Softmax(b, f, few, count, start, soft_cap, partly, bounds_at, state, values).emit()


class _Softmax:
    """Emits `amx_few_softmax`."""

    def __init__(self, b, data, few, count, start, soft_cap, partly, bounds_at, state, values):
        self.b, self.v, self.data, self.few = b, AmxWords(b), data, few
        self.count, self.start, self.end = count, start, b.add(start, few.block)
        self.soft_cap, self.partly, self.bounds_at = soft_cap, partly, bounds_at
        self.state, self.values = state, values
        self.there = self.v.lanes_below(count)

    def emit(self):
        """The code; its value says whether sums have to be rescaled."""
        b, v, state = self.b, self.v, self.state
        self.turn()
        with b.if_then(b.fcmp_ordered(">", self.soft_cap, v.float(0.0)), likely=False):
            self.for_scores(self.capped)
        with b.if_then(b.icmp_signed("!=", self.partly, I64(0)), likely=False):
            self.for_scores(self.masked)
        self.find_peaks()
        old = v.load_floats(self.data, state.maxima_at, self.there)
        peak = v.load_floats(self.data, self.few.spare_at, self.there)
        grown = b.fcmp_ordered(">", peak, b.fadd(old, v.splat(GROWTH)))
        new = b.select(grown, v.ceil(peak), old)
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        # What `AmxWords.power` takes.
        base = b.fsub(v.splat(0.5), b.select(nothing, v.splat(0.0), new))
        v.store(base, self.data, b.add(self.few.spare_at, I64(16)))
        rescale = v.power(b.fadd(b.fsub(old, new), v.splat(0.5)))
        rescale = b.select(grown, rescale, v.splat(1.0))
        v.store(rescale, self.data, state.rescale_at)
        v.store_masked(new, self.data, state.maxima_at, self.there)
        self.weigh()
        before = v.load_floats(self.data, state.sums_at, self.there)
        added = v.load_floats(self.data, b.add(self.few.spare_at, I64(32)), self.there)
        total = v.fma(before, rescale, added)
        v.store_masked(total, self.data, state.sums_at, self.there)
        return b.zext(b.bitcast(grown, ir.IntType(AMX_ROWS)), I64)

    def score_at(self, r, t):
        """Where the score of a row with a token is, and those of the tokens after it."""
        b = self.b
        return b.add(b.add(self.few.turned_at, b.mul(r, I64(KV_TILE))), t)

    def turn(self):
        """Scores of rows side by side, both parts added."""
        b, v, few = self.b, self.v, self.few
        narrow = b.icmp_signed("==", few.tile_rows, I64(8))

        def load(count, t):
            at = b.add(few.scores_at, b.mul(t, few.tile_rows))
            return [v.load_floats(self.data, b.add(at, I64(16 * i))) for i in range(count)]

        def store(columns, t):
            for r, column in enumerate(columns):
                v.store(column, self.data, self.score_at(I64(r), t))

        def added(columns):
            half = len(columns) // 2
            return [b.fadd(columns[r], columns[half + r]) for r in range(half)]

        with steps(b, self.start, self.end, 16) as (t, _), b.if_else(narrow) as (four, more):
            with four:
                store(added(v.turned(load(8, t))), t)
            with more:
                columns = v.transposed(load(16, t))
                with b.if_else(takes_turns(b, few)) as (sixteen, eight):
                    with sixteen:
                        store(columns, t)
                    with eight:
                        store(added(columns), t)

    def for_scores(self, change):
        """Change all scores in place."""
        b, v = self.b, self.v
        with (
            steps(b, I64(0), self.count, 1) as (r, _),
            steps(b, self.start, self.end, 16) as (t, _),
        ):
            at = self.score_at(r, t)
            v.store(change(v.load_floats(self.data, at), r, t), self.data, at)

    def capped(self, score, r, t):
        """``cap * tanh(score / cap) * log2(e)``."""
        b, v = self.b, self.v
        cap = v.splat(self.soft_cap)
        score = b.fmul(tanh(v, b.fdiv(score, cap)), cap)
        return b.fmul(score, v.splat(math.log2(math.e)))

    def masked(self, score, r, t):
        """-inf for tokens that the row does not see."""
        b, v = self.b, self.v
        low, high = (
            b.sub(b.fptosi(v.load_one(self.data, b.add(b.add(self.bounds_at, I64(i)), r)), I64), t)
            for i in (0, AMX_ROWS)
        )
        seen = b.and_(v.lanes_below(high), b.not_(v.lanes_below(low)))
        return b.select(seen, score, v.splat(-math.inf))

    def find_peaks(self):
        """The largest score of each row."""
        b, v = self.b, self.v
        slot = cgutils.alloca_once(b, v.type)
        with steps(b, I64(0), self.count, 1) as (r, _):
            b.store(v.splat(-math.inf), slot)
            with steps(b, self.start, self.end, 16) as (t, _):
                score = v.load_floats(self.data, self.score_at(r, t))
                b.store(v.larger(score, b.load(slot)), slot)
            peak = v.fold(b.load(slot), v.larger)
            v.store(peak, self.data, b.add(self.few.spare_at, r))

    def weigh(self):
        """Weights of each row in two parts, and their sums; what is left of V rows is prefetched meanwhile."""
        b, v, few = self.b, self.v, self.few
        slot, turn = cgutils.alloca_once(b, v.type), cgutils.alloca_once_value(b, I64(0))
        late = b.mul(b.lshr(few.block, I64(4)), I64(_LATE))
        turns = b.mul(self.count, b.lshr(few.block, I64(5)))
        each = b.sdiv(b.add(late, b.sub(turns, I64(1))), turns)
        with steps(b, I64(0), self.count, 1) as (r, _):
            base = v.splat(v.load_one(self.data, b.add(b.add(few.spare_at, I64(16)), r)))
            b.store(v.splat(0.0), slot)
            with steps(b, self.start, self.end, 32) as (t, _):
                weights = []
                for i in (0, 16):
                    score = v.load_floats(self.data, self.score_at(r, b.add(t, I64(i))))
                    weights.append(v.power(b.fadd(score, base)))
                b.store(b.fadd(b.load(slot), b.fadd(*weights)), slot)
                column = b.add(few.weights_at, b.lshr(t, I64(1)))
                for row, part in zip((r, b.add(r, few.rows)), v.two_parts(*weights), strict=True):
                    at = b.add(column, b.mul(row, I64(KV_TILE // 2)))
                    v.store_lanes(part, self.data, at)
                first = b.load(turn)
                until = b.add(first, each)
                b.store(until, turn)
                until = b.select(b.icmp_signed("<", until, late), until, late)
                with steps(b, first, until, 1) as (i, _):
                    group = b.mul(b.sdiv(i, I64(_LATE)), I64(AMX_ROWS))
                    token = b.add(group, b.add(b.srem(i, I64(_LATE)), I64(EARLY)))
                    prefetch_row(b, self.values, b.add(self.start, token), few.v_lines)
            total = v.fold(b.load(slot), b.fadd)
            v.store(total, self.data, b.add(b.add(few.spare_at, I64(32)), r))
