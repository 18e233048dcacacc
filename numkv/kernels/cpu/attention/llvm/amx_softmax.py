"""The online softmax between products of the matrix unit: scores become weights in two parts, 16 query rows at once."""

from __future__ import annotations

import functools
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.amx import AMX_TILE, AmxWords
from numkv.kernels.cpu.vectors.emit import I64, emits, steps
from numkv.kernels.cpu.vectors.math import tanh

#: How far above the maximum that is subtracted scores may be: weights are up to two to the power of it.
GROWTH = 8.0
# Tokens at a time: one after another, each would wait for the one before.
_AT_ONCE = 4


@functools.cache
def make_amx_softmax(k_kind, v_kind):
    """`amx_softmax` for storage kinds of K and of V."""

    @emits(soft_cap=types.float32)
    def amx_softmax(b, f, s_at, count, scales, soft_cap, partly, bounds_at, state):
        """Turn scores of up to 16 rows and a tile into weights, all rows at once: see `online_softmax_step`.

        Scores are those of `amx_qk`, times the scales of rows at ``f[scales.queries_at:]`` and, where K is INT8, of
        tokens at ``f[scales.keys_at:]``; they are capped if `soft_cap` is above 0. If `partly` is not 0, row r sees
        tokens from ``f[bounds_at + r]`` on that are below ``f[bounds_at + 16 + r]``. Maxima (integers close to them:
        `GROWTH`) and sums of rows are brought up to date, and what rescales earlier sums goes to
        ``f[state.rescale_at:]``, 16 floats.

        Weights take the place of scores, in two parts, as `amx_accumulate` takes them: probabilities where V is bf16;
        where it is INT8, 16-bit integers of probabilities times the scales of tokens at ``f[scales.values_at:]``, and
        the scales of these integers go to ``f[scales.weights_at:]``, 16 floats. Lanes are query rows; of bf16, for each
        two tokens::

            scores    t0: r0 | r1 | ... | r15          high parts   (t0 t1) of r0 | of r1 | ... | of r15
                      t1: r0 | r1 | ... | r15    ->    low parts    (t0 t1) of r0 | of r1 | ... | of r15
        """
        _Softmax(
            b, (k_kind, v_kind), f, s_at, count, scales, soft_cap, partly, bounds_at, state
        ).emit()

    return amx_softmax


class _Softmax:
    """Emits `amx_softmax`."""

    def __init__(self, b, kinds, data, s_at, count, scales, soft_cap, partly, bounds_at, state):
        self.kind, self.v_kind = kinds
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
        # What scores are still to be multiplied with.
        first = self.scales if self.kind == "bf16" else v.splat(1.0)
        self.factor = cgutils.alloca_once_value(b, first)
        # Which token it is, counted as a float: conversions are slow.
        self.number = cgutils.alloca_once_value(b, self.zero)
        low, high = (v.load_floats(data, b.add(bounds_at, I64(i))) for i in (0, 16))
        self.low = b.select(self.in_part, low, self.zero)
        self.high = b.select(self.in_part, high, v.splat(KV_TILE))

    def emit(self):
        """The code."""
        b, v, state = self.b, self.v, self.state
        self.scan_scores()
        old = v.load_floats(self.data, state.maxima_at, self.there)
        peak = b.fmul(self.merged(self.peaks, v.larger), b.load(self.factor))
        # A larger maximum counts where weights would grow large: output rows are then seldom rescaled. It is made an
        # integer: what it takes from scores, and what it rescales by, is then exact.
        grown = b.fcmp_ordered(">", peak, b.fadd(old, v.splat(GROWTH)))
        new = b.select(grown, v.ceil(peak), old)
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        # What `AmxWords.power` takes, and no more.
        self.base = b.fsub(v.splat(0.5), b.select(nothing, self.zero, new))
        # Lanes of 32 bits, of two or four tokens, are put in place of scores: one vector for each part.
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
        """2 to the power of `x`: exact where it is an integer, as maxima are, but for those that vector code left."""
        v = self.v
        whole = self.b.fcmp_ordered("==", v.ceil(x), x)
        other = v.power(self.b.fadd(x, v.splat(0.5)))
        return self.b.select(whole, v.scale(v.splat(1.0), x), other)

    def at_token(self, t):
        """Where a token's scores are."""
        return self.b.add(self.s_at, self.b.mul(t, I64(16)))

    def merged(self, slots, combine):
        """The four vectors of tokens by turns, combined."""
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
            with simple, steps(b, I64(0), I64(KV_TILE), _AT_ONCE) as (t, _):
                self.find_peaks(t, self.as_it_is if self.kind == "bf16" else self.converted)
            with otherwise:
                if self.kind == "int8":
                    with steps(b, I64(0), I64(KV_TILE), 1) as (t, _):
                        v.store(self.converted(t), self.data, self.at_token(t))
                with b.if_then(capped):
                    self.cap_scores()
                with steps(b, I64(0), I64(KV_TILE), _AT_ONCE) as (t, _):
                    self.find_peaks(t, self.masked)
                    b.store(b.fadd(b.load(self.number), v.splat(4)), self.number)
                b.store(v.splat(1.0), self.factor)

    def find_peaks(self, t, score_of):
        """Keep the largest scores of four tokens, and the scores where they are not what they were."""
        b, v = self.b, self.v
        for i, peak in enumerate(self.peaks):
            token = b.add(t, I64(i))
            score = score_of(token, i)
            b.store(v.larger(score, b.load(peak)), peak)
            if score_of != self.as_it_is:
                v.store(score, self.data, self.at_token(token))

    def as_it_is(self, token, i=0):
        """Scores of a token, the i-th in turn."""
        return self.v.load_floats(self.data, self.at_token(token))

    def converted(self, token, i=0):
        """Scores of a token as floats, times all scales."""
        b, v = self.b, self.v
        at = self.at_token(token)
        upper, lower = (
            b.sitofp(v.load_lanes(self.data, b.add(at, I64(i))), v.type) for i in (0, 4 * AMX_TILE)
        )
        scale = v.load_one(self.data, b.add(self.places.keys_at, token))
        scale = b.fmul(self.scales, v.splat(scale))
        return b.fmul(v.fma(upper, v.splat(256.0), lower), scale)

    def masked(self, token, i):
        """Scores of a token, -inf for rows that do not see it."""
        b, v = self.b, self.v
        count = b.fadd(b.load(self.number), v.splat(i))
        seen = b.fcmp_ordered(">=", count, self.low)
        seen = b.and_(seen, b.fcmp_ordered("<", count, self.high))
        score = b.fmul(self.as_it_is(token), b.load(self.factor))
        return b.select(seen, score, v.splat(-math.inf))

    def cap_scores(self):
        """``s = cap * tanh(factor * s / cap) * log2(e)``; then no factor is left."""
        b, v = self.b, self.v
        cap = v.splat(self.soft_cap)
        with steps(b, I64(0), I64(KV_TILE), 1) as (t, _):
            score = b.fmul(self.as_it_is(t), b.load(self.factor))
            score = b.fmul(tanh(v, b.fdiv(score, cap)), cap)
            v.store(b.fmul(score, v.splat(math.log2(math.e))), self.data, self.at_token(t))
        b.store(v.splat(1.0), self.factor)

    # -- weights

    def weight_of(self, token, i):
        """The weights of a token, the i-th in turn."""
        b, v = self.b, self.v
        weight = v.power(v.fma(self.as_it_is(token), b.load(self.factor), self.base))
        total = self.totals[i % _AT_ONCE]
        b.store(b.fadd(b.load(total), weight), total)
        return weight

    def put_floats(self):
        """Weights as two numbers of bf16, of two tokens in each lane."""
        b, v = self.b, self.v
        with steps(b, I64(0), I64(KV_TILE), _AT_ONCE) as (t, _):
            tokens = [b.add(t, I64(i)) for i in range(_AT_ONCE)]
            weights = [self.weight_of(token, i) for i, token in enumerate(tokens)]
            for part in range(2):
                # Rounded to the nearest.
                bits = [b.add(b.bitcast(x, v.int_type), v.splat_int(0x8000)) for x in weights]
                for i in range(0, _AT_ONCE, 2):
                    packed = v.pack(bits[i : i + 2], 16)
                    v.store_lanes(packed, self.data, self.at_token(tokens[i + part]))
                rounded = [v.upper_half(b.bitcast(x, v.type)) for x in bits]
                weights = [b.fsub(x, y) for x, y in zip(weights, rounded, strict=True)]

    def put_integers(self):
        """Weights times the scales of V rows as 16-bit integers: two bytes, of four tokens in each lane."""
        b, v = self.b, self.v
        largest = cgutils.alloca_once_value(b, v.splat_int(0))
        with steps(b, I64(0), I64(KV_TILE), _AT_ONCE) as (t, _):
            for i in range(_AT_ONCE):
                token = b.add(t, I64(i))
                weight = self.weight_of(token, i)
                # What is not seen counts for nothing, whatever its scale is.
                counts = b.fcmp_unordered("une", weight, self.zero)
                scale = v.splat(v.load_one(self.data, b.add(self.places.values_at, token)))
                weight = b.select(counts, b.fmul(weight, scale), self.zero)
                v.store(weight, self.data, self.at_token(token))
                b.store(v.larger_size(weight, b.load(largest)), largest)
        multiplier, scale = v.quantiser(b.load(largest))
        v.store(scale, self.data, self.places.weights_at)
        with steps(b, I64(0), I64(KV_TILE), _AT_ONCE) as (t, _):
            tokens = [b.add(t, I64(i)) for i in range(_AT_ONCE)]
            codes = [v.nearest(b.fmul(self.as_it_is(x), multiplier)) for x in tokens]
            # A word is 256 times its upper byte plus the lower one, both with a sign.
            upper = [b.add(x, v.splat_int(128)) for x in codes]
            v.store_lanes(v.pack(upper, 8), self.data, self.at_token(tokens[0]))
            v.store_lanes(v.pack(codes, 0), self.data, self.at_token(tokens[1]))
