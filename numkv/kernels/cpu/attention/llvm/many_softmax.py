"""The online softmax between products of many query rows, a lane for each: nothing is added across lanes."""

from __future__ import annotations

import math

from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import PANEL
from numkv.kernels.cpu.vectors.emit import I64, emits, steps
from numkv.kernels.cpu.vectors.math import exp2, tanh
from numkv.kernels.cpu.vectors.vectors import Vectors

# Tokens at a time: one after another, each would wait for the one before.
_AT_ONCE = 4


@emits(soft_cap=types.float32)
def many_softmax(b, f, s_at, count, tokens, soft_cap, partly, bounds_at, state):
    """Turn scores of a panel of query rows into probabilities relative to the running maxima.

    As `online_softmax_step`, of `tokens` tokens (a multiple of four) and `count` rows: score s[t, r] is at ``s_at + t *
    PANEL + r``, and capped first if `soft_cap` is above 0. If `partly` is not 0, row r sees tokens from ``f[bounds_at +
    r]`` on that are below ``f[bounds_at + PANEL + r]``; else all. Maxima and sums are brought up to date, and what
    rescales earlier sums goes to ``f[state.rescale_at:]``, up to a whole vector.
    """
    emitter = _Softmax(b, f, s_at, count, tokens, soft_cap, partly, bounds_at, state)
    with steps(b, I64(0), emitter.count, emitter.v.lanes) as (row, _):
        emitter.emit(row)


class _Softmax:
    """Emits `many_softmax`."""

    def __init__(self, b, data, s_at, count, tokens, soft_cap, partly, bounds_at, state):
        self.b, self.v, self.data, self.s_at = b, Vectors(b, "float32"), data, s_at
        self.count, self.tokens, self.soft_cap, self.partly = count, tokens, soft_cap, partly
        self.bounds_at, self.state = bounds_at, state

    def emit(self, row):
        """The code for the rows of a vector, from `row` on."""
        b, v, state = self.b, self.v, self.state
        first = b.add(self.s_at, row)

        def at_token(t, i=0):
            return b.add(first, b.mul(b.add(t, I64(i)), I64(PANEL)))

        with b.if_then(b.fcmp_ordered(">", self.soft_cap, v.float(0.0)), likely=False):
            cap = v.splat(self.soft_cap)
            with steps(b, I64(0), self.tokens, 1) as (t, _):
                score = b.fdiv(v.load_floats(self.data, at_token(t)), cap)
                score = b.fmul(b.fmul(tanh(v, score), cap), v.splat(math.log2(math.e)))
                v.store(score, self.data, at_token(t))
        with b.if_then(b.icmp_signed("!=", self.partly, I64(0)), likely=False):
            low, high = (
                v.load_floats(self.data, b.add(b.add(self.bounds_at, row), I64(i)))
                for i in (0, PANEL)
            )
            # Which token it is, counted as a float: conversions are slow.
            number = cgutils.alloca_once_value(b, v.splat(0.0))
            with steps(b, I64(0), self.tokens, 1) as (t, _):
                here = b.load(number)
                seen = b.and_(b.fcmp_ordered(">=", here, low), b.fcmp_ordered("<", here, high))
                score = v.load_floats(self.data, at_token(t))
                v.store(b.select(seen, score, v.splat(-math.inf)), self.data, at_token(t))
                b.store(b.fadd(here, v.splat(1.0)), number)

        def merged(slots, combine):
            one, two, three, four = (b.load(slot) for slot in slots)
            return combine(combine(one, two), combine(three, four))

        peaks, totals = (
            [cgutils.alloca_once(b, v.type) for _ in range(_AT_ONCE)] for _ in range(2)
        )
        for peak, sum_ in zip(peaks, totals, strict=True):
            b.store(v.splat(-math.inf), peak)
            b.store(v.splat(0.0), sum_)
        with steps(b, I64(0), self.tokens, _AT_ONCE) as (t, _):
            for i, slot in enumerate(peaks):
                score = v.load_floats(self.data, at_token(t, i))
                b.store(v.larger(score, b.load(slot)), slot)
        there = v.lanes_below(b.sub(self.count, row))
        maxima_at, sums_at = b.add(state.maxima_at, row), b.add(state.sums_at, row)
        old = v.load_floats(self.data, maxima_at, there)
        new = v.larger(merged(peaks, v.larger), old)
        # Where nothing has been seen, subtracting 0 avoids inf - inf.
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        base = b.select(nothing, v.splat(0.0), new)
        with steps(b, I64(0), self.tokens, _AT_ONCE) as (t, _):
            for i, slot in enumerate(totals):
                score = v.load_floats(self.data, at_token(t, i))
                p = exp2(v, b.fsub(score, base))
                v.store(p, self.data, at_token(t, i))
                b.store(b.fadd(b.load(slot), p), slot)
        rescale = exp2(v, b.fsub(old, base))
        before = v.load_floats(self.data, sums_at, there)
        v.store_masked(v.fma(before, rescale, merged(totals, b.fadd)), self.data, sums_at, there)
        v.store_masked(new, self.data, maxima_at, there)
        v.store(rescale, self.data, b.add(state.rescale_at, row))
