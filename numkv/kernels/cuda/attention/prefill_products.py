"""The products of attention's kernel for many query rows on tensor cores, and how their operands are made.

Steps are closures over sizes and kinds; see `numkv.kernels.cuda.attention.prefill`.

**Codes and 8-bit floats** become 16-bit floats once for a whole block. A tile is copied to shared memory as it is
stored, in chunks of 16 bytes. A thread reads chunks and writes their elements as float16, in order, where products read
them. Integers up to 2048 and 8-bit floats are exact there:

========  ==========================================  ===========================  =================================
kind      an element in shared memory                 scores are multiplied by     weights are multiplied by
========  ==========================================  ===========================  =================================
INT8      the code                                    the token's scale of K       the token's scale of V
INT4      ``level * scale * 2**-e``, rounded          ``2**e``                     ``2**e``
fp8_e4m3  ``value * 2**-8``                           ``2**8``, the head's scale   sums: ``2**8``, the head's scale
fp8_e5m2  the value                                   the head's scale             sums: the head's scale
========  ==========================================  ===========================  =================================

``2**e`` follows the largest of a token's scales, so rows of INT4 are always in the range of float16. Their rounding
equals that of a float16 cache.

Weights are multiplied by adding logarithms. A score is scaled and gets the logarithm of the token's factor in one fused
multiply-add (the token's *terms*). So a row's maximum is that of weights times factors, which stay in the range of
float16 whatever the factors are. The sum of weights divides them by the factor again (the token's *back*), in float32.
A token that a row does not see has weight 0, whatever its scale is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_products import level_offsets
from numkv.kernels.cuda.attention.prefill_items import rows_at_once
from numkv.kernels.cuda.attention.sizes import CHUNK, OPERANDS
from numkv.kernels.cuda.instructions import (
    exp2_approx,
    fma_fp16x2,
    global_address,
    keep,
    ldmatrix,
    load_global_4,
    load_global_8,
    load_shared,
    load_shared_4,
    load_shared_16,
    log2_approx,
    pack_fp16,
    permute_bytes,
    permute_bytes_as,
    select_bits,
    shuffle_xor,
    shuffle_xor_by,
    shuffle_xor_float,
    store_shared,
    store_shared_4,
    store_shared_16,
    unpack_fp16,
)
from numkv.kernels.cuda.widen import FLOATS, fp8_words, int8_words, unpack_bf16
from numkv.rows.convert import codec
from numkv.rows.softmax import LOG2_E

F, I32, I64, U32 = np.float32, np.int32, np.int64, np.uint32
MINUS_INF = F(-np.inf)
#: Replaces the exponent of a row without a largest element: all zeros, or not finite.
NOTHING = I32(127)


class PrefillState(NamedTuple):
    """The online softmax of a thread's two rows, in registers."""

    maxima: Any  #: in base 2
    totals: Any
    sums: Any  #: [columns 8n + 2t, + 1 of row g, and of row g + 8]
    scales: Any  #: what scores of each row are multiplied by


def in_turn(steps):
    """Return a function that calls each of `steps` in order with its own arguments.

    It replaces loops that number registers: the compiler unrolls short loops, but not these.
    """
    if len(steps) == 1:
        return steps[0]
    first, rest = in_turn(steps[: len(steps) // 2]), in_turn(steps[len(steps) // 2 :])

    @register_jitable
    def both(*args):
        first(*args)
        rest(*args)

    return both


def make_powers(Q_KIND, SIZES, TOGETHER):
    """Make the function that finds the powers of two that scale a thread's rows into float16's range.

    If `TOGETHER`, an item's rows share one, except rows that are more than `NEAR` powers smaller.
    """
    WARPS, NEAR = SIZES.threads // 32, 12
    load, _ = codec(Q_KIND, "float32")

    @register_jitable
    def power_for(q, row, place):
        """Return the exponent that scales a row's largest element to 2**14; `NOTHING` if it has none."""
        top = F(0)
        for d in range(place, q.shape[2], 4):
            top = max(top, abs(load(q[row.token, row.head, d])))
        top = max(top, shuffle_xor_float(top, 1))
        top = max(top, shuffle_xor_float(top, 2))
        exponent = I32(U32(top.view(U32)) >> U32(23))
        if exponent > 0 and exponent < 255:
            return min(max(I32(14 + 127) - exponent, I32(-100)), I32(100))
        return NOTHING

    @register_jitable
    def float_of(exponent):
        return U32(U32(exponent + I32(127)) << U32(23)).view(np.float32)

    @register_jitable
    def common_power(exponent, powers, thread):
        """Return the least exponent of a block's rows; `powers` has a number for each warp."""
        least = U32(exponent + I32(128))
        for lanes in (4, 8, 16):
            least = min(least, shuffle_xor(least, U32(lanes)))
        powers[thread >> I32(5)] = I32(least) - I32(128)
        cuda.syncthreads()
        found = powers[0]
        for w in range(1, WARPS):
            found = min(found, powers[w])
        return found if found < NOTHING else I32(0)

    @register_jitable
    def near_to(exponent, common):
        """Return the common exponent if the row loses no bits by it, else its own."""
        return exponent if exponent < NOTHING and exponent - common > I32(NEAR) else common

    @register_jitable
    def powers_for(q, row, other, scale, scales, powers, place, thread):
        """Return the factors of a thread's rows, and the common factor of all rows' scores.

        `scales` gets the further factor of each row's scores.
        """
        exponent, other_exponent = power_for(q, row, place), power_for(q, other, place)
        if TOGETHER:
            common = common_power(min(exponent, other_exponent), powers, thread)
            exponent, other_exponent = near_to(exponent, common), near_to(other_exponent, common)
            scales[0] = float_of(max(common - exponent, I32(-126)))
            scales[1] = float_of(max(common - other_exponent, I32(-126)))
            scale *= float_of(-common)
        else:
            exponent = exponent if exponent < NOTHING else I32(0)
            other_exponent = other_exponent if other_exponent < NOTHING else I32(0)
            scales[0], scales[1] = scale * float_of(-exponent), scale * float_of(-other_exponent)
        return float_of(exponent), float_of(other_exponent), scale

    return powers_for


def make_load_queries(Q_KIND, K_KIND, SIZES):
    """Make the function that loads a thread's query rows to registers or shared memory, as fragments of A."""
    OPERAND = FLOATS[OPERANDS[K_KIND]]
    pack, halves = OPERAND.pack, OPERAND.halves
    SAME, WHOLE = OPERANDS[K_KIND] == Q_KIND, SIZES.q_halves == 1
    PARTS, IN_SHARED, BYTES = SIZES.padded // 16, SIZES.q_shared, 4 if Q_KIND == "fp32" else 2
    STEP_OF_QUERIES = 16 * SIZES.threads
    # If K is float16 and queries are not, rows are scaled by a power of two. If tokens have scales of K, an item's rows
    # share it, and it becomes a part of these scales.
    MOVED = OPERANDS[K_KIND] == "fp16" and not SAME
    TOGETHER = MOVED and SIZES.k.words > 0
    powers_for = make_powers(Q_KIND, SIZES, TOGETHER)

    @register_jitable
    def words_of(at, sign, power):
        """Return the two elements at an address as a word, and their remainder as another one."""
        if SAME:
            return load_global_4(at) ^ sign, U32(0)
        if Q_KIND == "fp32":
            bits = load_global_8(at)
            x, y = bits[0].view(np.float32), bits[1].view(np.float32)
        elif Q_KIND == "bf16":
            x, y = unpack_bf16(load_global_4(at))
        else:
            x, y = unpack_fp16(load_global_4(at))
        if WHOLE:
            return pack(x * power, y * power) ^ sign, U32(0)
        first, rest = halves(x * power, y * power)
        return first ^ sign, rest ^ sign

    def make_step(S):
        UPPER = SIZES.dim > 16 * S + 8  # there may be 8 columns only
        AT = 16 * S * BYTES

        @register_jitable
        def step(at, other, sign, power, other_power, words, q_at):
            a0, low0 = words_of(at + AT, sign, power)
            a1, low1 = words_of(other + AT, sign, other_power)
            a2 = low2 = a3 = low3 = U32(0)
            if UPPER:
                a2, low2 = words_of(at + AT + 8 * BYTES, sign, power)
                a3, low3 = words_of(other + AT + 8 * BYTES, sign, other_power)
            if IN_SHARED:
                store_shared_16(q_at + S * STEP_OF_QUERIES, a0, a1, a2, a3)
                if not WHOLE:
                    store_shared_16(q_at + (PARTS + S) * STEP_OF_QUERIES, low0, low1, low2, low3)
            else:
                words[4 * S], words[4 * S + 1], words[4 * S + 2], words[4 * S + 3] = a0, a1, a2, a3

        return step

    def make_zeros(S):
        @register_jitable
        def step(at, other, sign, power, other_power, words, q_at):
            zero = U32(0)
            if IN_SHARED:
                store_shared_16(q_at + S * STEP_OF_QUERIES, zero, zero, zero, zero)
                if not WHOLE:
                    store_shared_16(q_at + (PARTS + S) * STEP_OF_QUERIES, zero, zero, zero, zero)
            else:
                words[4 * S] = words[4 * S + 1] = words[4 * S + 2] = words[4 * S + 3] = zero

        return step

    @register_jitable
    def row_at(q, row, place):
        """Return the address of the first two elements of a thread's part of a row."""
        return (
            global_address(q)
            + row.token * q.strides[0]
            + row.head * q.strides[1]
            + place * (2 * BYTES)
        )

    load_words = in_turn(
        [make_step(s) if 16 * s < SIZES.dim else make_zeros(s) for s in range(PARTS)]
    )

    @register_jitable
    def load_queries(q, row, other, sign, scale, scales, powers, words, q_at, place, thread):
        """Load a thread's two query rows.

        Returns the factor of scores, and whether rows of the warp differ. `scales` gets each row's own factor. It
        replaces the common factor, or multiplies it if tokens of K have scales.
        """
        scales[0] = scales[1] = scale
        power = other_power = F(1)
        if MOVED:
            found = powers_for(q, row, other, scale, scales, powers, place, thread)
            power, other_power, scale = found
        at, other_at = row_at(q, row, place), row_at(q, other, place)
        load_words(at, other_at, sign, power, other_power, words, q_at)
        uneven = TOGETHER and cuda.any_sync(0xFFFFFFFF, scales[0] != F(1) or scales[1] != F(1))
        return scale, uneven

    return load_queries


def make_scores(K_KIND, SIZES):
    """The function ``score(c, words, q_at, k_words, k_at)`` that multiplies a warp's query rows by a KV tile's K."""
    TILE, PARTS, IN_SHARED, HALVES = SIZES.tile, SIZES.padded // 16, SIZES.q_shared, SIZES.q_halves
    STEP_OF_QUERIES = 16 * SIZES.threads
    mma = FLOATS[OPERANDS[K_KIND]].mma

    def make_products(FIRST):
        """Make the function that adds products to scores, or begins with them."""

        @register_jitable
        def add_products(c, a0, a1, a2, a3, k_words):
            zero = F(0)
            for j in range(TILE // 8):
                n = 4 * j
                b0, b1 = k_words[2 * j], k_words[2 * j + 1]
                old = (zero, zero, zero, zero) if FIRST else (c[n], c[n + 1], c[n + 2], c[n + 3])
                d = mma(a0, a1, a2, a3, b0, b1, old[0], old[1], old[2], old[3])
                c[n], c[n + 1], c[n + 2], c[n + 3] = d

        return add_products

    add_products = make_products(False)

    def make_step(S):
        first_products = make_products(S == 0)
        # Sixteen columns of all tokens: four matrices for each sixteen tokens.
        load = ldmatrix(4, *(32 * S + SIZES.k_step * t for t in range(0, TILE, 16)), into=True)

        @register_jitable
        def step(c, words, q_at, k_words, k_at):
            load(k_at, k_words)
            if IN_SHARED:
                a = load_shared_16(q_at + S * STEP_OF_QUERIES)
                first_products(c, a[0], a[1], a[2], a[3], k_words)
                if HALVES > 1:
                    a = load_shared_16(q_at + (PARTS + S) * STEP_OF_QUERIES)
                    add_products(c, a[0], a[1], a[2], a[3], k_words)
            else:
                w = 4 * S
                first_products(c, words[w], words[w + 1], words[w + 2], words[w + 3], k_words)

        return step

    return in_turn([make_step(s) for s in range(PARTS)])


def make_sums(V_KIND, SIZES):
    """Make the function that adds a tile's V rows, weighted, and the weights themselves."""
    TILE, V_STEP, HALVES, WEIGHTS = SIZES.tile, SIZES.v_step, SIZES.p_halves, SIZES.tile // 4
    TOTALS = HALVES > 1 and SIZES.v.words == 0  # of weights that are not scaled
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    mma, ONES = OPERAND.mma, U32(OPERAND.ones)
    # Sixteen columns of sixteen tokens are four matrices; some of them are loaded at once.
    AT_ONCE = 4 if SIZES.padded_v % 64 == 0 else 2

    def make_step(I, N0):
        offsets = (16 * V_STEP * I + 32 * (N0 + n) for n in range(AT_ONCE))
        load = ldmatrix(4, *offsets, trans=True, into=True)

        @register_jitable
        def step(state, weights, v_words, v_at):
            load(v_at, v_words)
            for h in range(HALVES):
                w = h * WEIGHTS + 4 * I
                for m in range(2 * AT_ONCE):
                    n = 4 * (2 * N0 + m)
                    d = mma(
                        weights[w], weights[w + 1], weights[w + 2], weights[w + 3],
                        v_words[2 * m], v_words[2 * m + 1], state.sums[n], state.sums[n + 1],
                        state.sums[n + 2], state.sums[n + 3],
                    )  # fmt: skip
                    state.sums[n], state.sums[n + 1] = d[0], d[1]
                    state.sums[n + 2], state.sums[n + 3] = d[2], d[3]

        return step

    places = [(i, n) for i in range(TILE // 16) for n in range(0, SIZES.padded_v // 16, AT_ONCE)]
    add_rows = in_turn([make_step(*place) for place in places])

    @register_jitable
    def add(state, weights, v_words, v_at):
        add_rows(state, weights, v_words, v_at)
        if TOTALS:
            for w in range(0, HALVES * WEIGHTS, 4):
                d = mma(
                    weights[w], weights[w + 1], weights[w + 2], weights[w + 3], ONES, ONES,
                    state.totals[0], state.totals[0], state.totals[1], state.totals[1],
                )  # fmt: skip
                state.totals[0], state.totals[1] = d[0], d[2]

    return add


def make_poison(V_KIND, SIZES):
    """Make the function for tiles whose V is not finite where some rows see it and others do not.

    Such elements are replaced by zeros. Numbers for them replace K, which is no longer needed: 1 for infinity, 128 for
    minus infinity, 16,384 for NaN, 0 for finite elements. A product of these with ones, where a row's weight is not 0,
    counts the infinities and NaN that each row sees in each column. The counts are added to the sums as infinity or
    NaN.
    """
    TILE, V_STEP, THREADS = SIZES.tile, SIZES.v_step, SIZES.threads
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    mma, ONE, EXPONENT = OPERAND.mma, OPERAND.ones & 0xFFFF, OPERAND.exponent
    PLUS, MINUS, NAN = OPERAND.codes
    CHUNKS, PLACES = SIZES.padded_v // 8, TILE * (SIZES.padded_v // 8)
    STEP = U32((0x8000 - EXPONENT) * 0x10001)
    MAGNITUDES, SIGNS = U32(0x7FFF7FFF), U32(0x80008000)
    load = ldmatrix(4, *(V_STEP * t for t in range(0, TILE, 16)), trans=True, into=True)

    @register_jitable
    def is_finite(v_from, thread):
        """Return whether the elements of V that a thread reads are finite."""
        marks = U32(0)
        for i in range(thread, PLACES, THREADS):
            w = load_shared_16(v_from + i // CHUNKS * V_STEP + i % CHUNKS * 16)
            for m in range(4):
                marks |= (w[m] & MAGNITUDES) + STEP
        return marks & SIGNS == 0

    @register_jitable
    def part(half):
        """Return the finite replacement of an element of V, and its number."""
        if half & U32(EXPONENT) != U32(EXPONENT):
            return half, U32(0)
        if half & U32(0x7FFF) != U32(EXPONENT):
            return U32(0), U32(NAN)
        return U32(0), U32(MINUS) if half & U32(0x8000) != 0 else U32(PLUS)

    @register_jitable
    def parts(word):
        low, low_number = part(word & U32(0xFFFF))
        high, high_number = part(word >> U32(16))
        return low | U32(high << U32(16)), low_number | U32(high_number << U32(16))

    @register_jitable
    def put_aside(v_from, k_from, thread):
        for i in range(thread, PLACES, THREADS):
            at = i // CHUNKS * V_STEP + i % CHUNKS * 16
            w = load_shared_16(v_from + at)
            a, b = parts(w[0]), parts(w[1])
            c, d = parts(w[2]), parts(w[3])
            store_shared_16(v_from + at, a[0], b[0], c[0], d[0])
            store_shared_16(k_from + at, a[1], b[1], c[1], d[1])

    @register_jitable
    def value_of(count):
        """Convert a count to a term of the sum."""
        n = I32(count)
        plus, minus = n & I32(127), (n >> I32(7)) & I32(127)
        if n >= I32(16384) or (plus > 0 and minus > 0):
            return F(np.nan)
        if plus > 0:
            return F(np.inf)
        return MINUS_INF if minus > 0 else F(0)

    def make_step(COLUMN):
        SUM = COLUMN // 2

        @register_jitable
        def step(state, weights, words, at):
            load(at + COLUMN * 2, words)
            for m in range(2):
                d = (F(0), F(0), F(0), F(0))
                for i in range(TILE // 16):
                    # The sign's bit where the weight is not 0, then ones there.
                    marks = (
                        ((weights[4 * i] & MAGNITUDES) + MAGNITUDES) & SIGNS,
                        ((weights[4 * i + 1] & MAGNITUDES) + MAGNITUDES) & SIGNS,
                        ((weights[4 * i + 2] & MAGNITUDES) + MAGNITUDES) & SIGNS,
                        ((weights[4 * i + 3] & MAGNITUDES) + MAGNITUDES) & SIGNS,
                    )
                    d = mma(
                        (marks[0] >> U32(15)) * U32(ONE), (marks[1] >> U32(15)) * U32(ONE),
                        (marks[2] >> U32(15)) * U32(ONE), (marks[3] >> U32(15)) * U32(ONE),
                        words[4 * i + 2 * m], words[4 * i + 2 * m + 1], d[0], d[1], d[2], d[3],
                    )  # fmt: skip
                if d[0] != 0 or d[1] != 0 or d[2] != 0 or d[3] != 0:
                    state.sums[SUM + 4 * m] += value_of(d[0])
                    state.sums[SUM + 4 * m + 1] += value_of(d[1])
                    state.sums[SUM + 4 * m + 2] += value_of(d[2])
                    state.sums[SUM + 4 * m + 3] += value_of(d[3])
                cuda.syncwarp()  # whole warps load matrices next

        return step

    poison = in_turn([make_step(16 * n) for n in range(SIZES.padded_v // 16)])

    @register_jitable
    def hide(state, weights, words, flags, number, k_stage, v_stage, v_lane, thread):
        """Make a tile's V finite, and add infinity and NaN to the rows that see them.

        `flags` has a word for even tiles and one for odd ones, both 0 at the start.
        """
        if not is_finite(v_stage, thread):
            flags[number & 1] = 1
        cuda.syncthreads()
        if flags[number & 1] != 0:
            put_aside(v_stage, k_stage, thread)
            cuda.syncthreads()
            poison(state, weights, words, v_lane - (v_stage - k_stage))

    return hide


#: A factor of V below 2**-90 counts as 2**-90 where logarithms are added, so the sum of a million weights stays finite.
LEAST_LOG, MOST_LOG = -90, 126
#: Rows of INT4 are scaled down by so many powers of two. Nibbles are subnormal float16 numbers, which makes levels
#: 2**-9 of their values, and the largest scale is scaled to 2 to 4.
DOWN = 8


def head_factor(name: str) -> float:
    """Return the factor of products with a kind's elements in shared memory, in addition to scales."""
    return 256.0 if name == "fp8_e4m3" else 1.0


def make_elements(KIND):
    """Make the function that widens four words to 16-bit floats, INT4 by a factor and an offset."""
    if KIND == "int8":
        widen = int8_words()
    elif KIND == "fp8_e5m2":
        widen = fp8_words(KIND)
    order, first, second = map(permute_bytes_as, (0x3120, 0x5140, 0x7362))

    @register_jitable
    def of_bytes(w0, w1, w2, w3, factor, offset):
        a, b = widen(w0), widen(w1)
        c, d = widen(w2), widen(w3)
        return (a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1])

    @register_jitable
    def as_it_is(w0, w1, w2, w3, factor, offset):
        return ((w0, w1, w2, w3),)

    @register_jitable
    def leveled(nibbles, up, factor, offset):
        """Return levels times their scale, rounded once. Nibbles are subnormal: `up` scales them to 2**-9."""
        return fma_fp16x2(fma_fp16x2(nibbles, up, offset), factor, U32(0x80008000))  # plus -0

    @register_jitable
    def scaled(word, factor, offset):
        """Return the elements of four bytes' low nibbles, then of the high ones."""
        here = order(word, word)
        there = here >> U32(8)
        low, high = U32(0x000F000F), U32(0x00F000F0)
        units, sixteens = U32(0x78007800), U32(0x68006800)  # 2**15 and 2**11
        return (
            leveled(here & low, units, factor, offset), leveled(there & low, units, factor, offset),
            leveled(here & high, sixteens, factor, offset), leveled(there & high, sixteens, factor, offset),
        )  # fmt: skip

    @register_jitable
    def of_nibbles(w0, w1, w2, w3, factor, offset):
        a, b = scaled(w0, factor, offset), scaled(w1, factor, offset)
        c, d = scaled(w2, factor, offset), scaled(w3, factor, offset)
        return (
            (a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1]),
            (a[2], a[3], b[2], b[3]), (c[2], c[3], d[2], d[3]),
        )  # fmt: skip

    @register_jitable
    def e4m3(word):
        """Move a word's bits to their places in float16, whose bias makes values eight powers of two smaller.

        An upper byte gets the sign, a zero and six bits of the magnitude, the lower one the last bit. The six bits are
        returned, too.
        """
        six = U32(word >> U32(1)) & U32(0x3F3F3F3F)
        upper = select_bits(word, U32(0x80808080), six)
        lower = U32(word << U32(7)) & U32(0x80808080)
        return first(lower, upper), second(lower, upper), six

    @register_jitable
    def with_nan(word):
        """Return NaN where all bits are ones."""
        marks = U32(U32(word & U32(0x7FFF7FFF)) + U32(0x40804080)) & U32(0x80008000)
        return word | U32(marks - (marks >> U32(5)))

    @register_jitable
    def of_e4m3(w0, w1, w2, w3, factor, offset):
        a, b = e4m3(w0), e4m3(w1)
        c, d = e4m3(w2), e4m3(w3)
        ones = U32(0x01010101)  # NaN, and the largest number, have six ones
        marks = U32(a[2] + ones) | U32(b[2] + ones) | U32(c[2] + ones) | U32(d[2] + ones)
        if U32(marks & U32(0x40404040)) != 0:
            return (
                (with_nan(a[0]), with_nan(a[1]), with_nan(b[0]), with_nan(b[1])),
                (with_nan(c[0]), with_nan(c[1]), with_nan(d[0]), with_nan(d[1])),
            )  # fmt: skip
        return (a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1])

    return {"int4": of_nibbles, "fp8_e4m3": of_e4m3, "int8": of_bytes, "fp8_e5m2": of_bytes}.get(
        KIND, as_it_is
    )


def make_group_scale(SIDE, OFFSET, TEAM):
    """Make INT4's functions that find a token's largest scale, and the factor and offset of a chunk's nibbles.

    Scales are `OFFSET` bytes after the addresses passed. If `TEAM` is not 0, so many adjacent threads share the groups
    of a token.
    """
    LEAST, MOST = U32(LEAST_LOG + 127 << 23), U32((MOST_LOG - DOWN + 127 << 23) + (1 << 23) - 1)
    STEPS = [2**i for i in range(8) if 2**i < TEAM]
    load_own, UNSCALED = load_shared(4, OFFSET), SIDE.kind != "int4"

    def make_larger(i):
        load = load_shared(4, OFFSET + 4 * i)

        @register_jitable
        def larger(scales_at, largest):
            word = load(scales_at)  # words of positive floats are in their order
            largest[0] = max(largest[0], U32(word << U32(16)), word)

        return larger

    def make_other(lanes):
        other = shuffle_xor_by(lanes)

        @register_jitable
        def larger(scales_at, largest):
            largest[0] = max(largest[0], other(largest[0]))

        return larger

    def make_power(find):
        @register_jitable
        def power_of(scales_at, known):
            """Return the float32 bits of the power of two of a token's largest scale; one scale may be known."""
            largest = cuda.local.array(1, np.uint32)
            largest[0] = max(known, LEAST)
            find(scales_at, largest)
            return U32(min(largest[0], MOST) & U32(0x7F800000))

        return power_of

    of_token = [make_larger(i) for i in range(max(SIDE.words, 1))]
    power_of = make_power(in_turn(of_token))
    power_for = make_power(in_turn([make_other(lanes) for lanes in STEPS] or of_token))

    @register_jitable
    def group_scale(scales_at, own_at, chosen):
        """Return a group's factor and offset as two float16 each; its scale is bytes `chosen` at `own_at`."""
        if UNSCALED:
            return U32(0), U32(0)
        words = load_own(own_at)
        word = permute_bytes(words, words, chosen)
        own = U32(word & U32(0xFFFF0000))
        down = U32(power_for(scales_at, own) ^ U32(0x7F800000)).view(np.float32)  # twice 1 / power
        scale = own.view(np.float32) * down
        # The lowest level minus 16, then times 2**-9.
        offset = fma_fp16x2(level_offsets(word), U32(0x18001800), U32(0x28002800))
        return pack_fp16(scale, scale), offset

    return power_of, group_scale


def make_keep_scales(SIZES):
    """Make the functions that store tokens' terms and backs, which frees the scales' place for the next tile's.

    The first threads of a block have a token's scale of K each, the last ones that of V.
    """
    TILE, K, V, LAST = SIZES.tile, SIZES.k, SIZES.v, I32(SIZES.threads - SIZES.tile)

    def make_factor(SIDE):
        power_of, _ = make_group_scale(SIDE, 0, 0)

        @register_jitable
        def of_row(scales_at):
            return load_shared_4(scales_at).view(np.float32)

        @register_jitable
        def of_groups(scales_at):
            return U32(power_of(scales_at, U32(0)) + U32(DOWN << 23)).view(np.float32)

        return of_row if SIDE.kind == "int8" else of_groups

    k_factor, v_factor, UNSCALED = make_factor(K), make_factor(V), not SIZES.scaled

    @register_jitable
    def begin_scales(base, thread):
        """Return the addresses of a token's scales, of its terms and of its back."""
        if UNSCALED:
            return U32(0), U32(0), U32(0)
        token, scales = thread, base + K.scales + thread * (4 * K.words)
        if thread >= LAST:
            token = I32(thread - LAST)
            scales = base + V.scales + token * (4 * V.words)
        terms = base + SIZES.terms + (token >> I32(1)) * 16 + (token & I32(1)) * 4
        return keep(U32(scales)), keep(U32(terms)), keep(U32(base + SIZES.backs + token * 4))

    @register_jitable
    def keep_scales(at, thread, scale):
        scales, terms, backs = at
        if K.words > 0 and thread < I32(TILE):
            store_shared_4(terms, U32(F(k_factor(scales) * scale).view(np.uint32)))
        if V.words > 0 and thread >= LAST:
            log = log2_approx(v_factor(scales))
            if log < F(LEAST_LOG):
                log = F(LEAST_LOG)
            back = exp2_approx(-log)
            if not back > F(0):  # of NaN; where it is seen, its weight is NaN, too
                back = F(0)
            store_shared_4(U32(terms + U32(8)), U32(log.view(np.uint32)))
            store_shared_4(backs, U32(back.view(np.uint32)))

    return begin_scales, keep_scales


def make_widen_side(SIZES, SIDE, WIDE, STEP, COLUMNS, LIKE=None):
    """Make the functions that widen a tile of K or V to `WIDE` bytes from the start of shared memory, `STEP` bytes a
    row.

    `LIKE` may be a side of the same sizes at the start. Its addresses are then reused, and the difference becomes a
    part of the instructions.
    """
    TILE, THREADS, INT4 = SIZES.tile, SIZES.threads, SIDE.kind == "int4"
    CHUNKS, KIND, OUT = SIDE.chunks, SIDE.kind, 16 // SIDE.bits
    ROWS = rows_at_once(SIZES, CHUNKS)
    ALL = ROWS * CHUNKS == THREADS
    ROW_BYTES, SCALE_BYTES, LOST = CHUNK * CHUNKS, 4 * SIDE.words, COLUMNS // 8 - OUT * CHUNKS
    ROWS_FROM, WIDE_FROM, SCALES_FROM = 0, 0, 0
    if LIKE is not None:
        ROWS_FROM, WIDE_FROM, SCALES_FROM = SIDE.rows - LIKE.rows, WIDE, SIDE.scales - LIKE.scales
    TEAM = CHUNKS if ALL and CHUNKS in (2, 4, 8, 16) else 0
    elements = make_elements(KIND)

    def make_put(m, offset):
        store = store_shared(16, offset + CHUNK * m)

        @register_jitable
        def put(to, chunks):
            w = chunks[m]
            store(to, w[0], w[1], w[2], w[3])

        return put

    def make_step(i):
        load = load_shared(16, ROWS_FROM + i * ROWS * ROW_BYTES)
        put = in_turn([make_put(m, WIDE_FROM + i * ROWS * STEP) for m in range(OUT)])
        _, group_scale = make_group_scale(SIDE, SCALES_FROM + i * ROWS * SCALE_BYTES, TEAM)

        @register_jitable
        def step(at, to, scales_at, own_at, chosen):
            w0, w1, w2, w3 = load(at)
            factor, offset = group_scale(scales_at, own_at, chosen)
            put(to, elements(w0, w1, w2, w3, factor, offset))

        return step

    steps = in_turn([make_step(i) for i in range(TILE // ROWS)])

    @register_jitable
    def begin_side(base, thread):
        """Return the addresses that a thread needs to widen its chunks."""
        chunk, row = thread % CHUNKS, thread // CHUNKS
        at = keep(U32(base + SIDE.rows + row * ROW_BYTES + chunk * CHUNK))
        to = keep(U32(base + WIDE + row * STEP + chunk * (OUT * CHUNK)))
        if not INT4:
            return row < ROWS, at, to, U32(0), U32(0), U32(0)
        scales_at = base + SIDE.scales + row * SCALE_BYTES
        chosen = U32(0x3232) if chunk % 2 else U32(0x1010)
        return (
            row < ROWS, at, to, U32(0) if TEAM else keep(U32(scales_at)),
            keep(U32(scales_at + chunk // 2 * 4)), keep(chosen),
        )  # fmt: skip

    @register_jitable
    def widen_side(way):
        there, at, to, scales_at, own_at, chosen = way
        if ALL or there:
            steps(at, to, scales_at, own_at, chosen)

    @register_jitable
    def clear(base, thread):
        """Zero the columns past the end of rows, which are written nowhere else."""
        if LOST:
            for i in range(thread, TILE * LOST, THREADS):
                at = base + WIDE + i // LOST * STEP + (i % LOST + OUT * CHUNKS) * CHUNK
                store_shared_16(U32(at), U32(0), U32(0), U32(0), U32(0))

    return begin_side, widen_side, clear


def make_widen(SIZES):
    """Make the functions that widen a tile, and that prepare shared memory for it."""
    V_FROM, SCALED, TERMS = SIZES.k_bytes, SIZES.scaled, SIZES.tile // 2
    begin_k, widen_k, clear_k = make_widen_side(SIZES, SIZES.k, 0, SIZES.k_step, SIZES.padded)
    ALIKE = SIZES.k.kind == SIZES.v.kind and SIZES.dim == SIZES.dim_v
    begin_v, widen_v, clear_v = make_widen_side(
        SIZES, SIZES.v, V_FROM, SIZES.v_step, SIZES.padded_v, SIZES.k if ALIKE else None
    )  # fmt: skip
    begin_scales, keep_scales = make_keep_scales(SIZES)
    AS_STORED = not SIZES.widened

    @register_jitable
    def begin_tables(base, place):
        """Return the addresses of the first terms and backs of a thread."""
        if not SCALED:
            return U32(0), U32(0)
        return keep(U32(base + SIZES.terms + place * 16)), keep(U32(base + SIZES.backs + place * 8))

    @register_jitable
    def widen(ways, thread, scale):
        """Widen a copied tile to 16-bit floats; `scale` is the factor of all scores."""
        keep_scales(ways[2], thread, scale)
        widen_k(ways[0])
        widen_v(ways[1])

    @register_jitable
    def prepare(base, thread):
        """Return the addresses that a thread needs to widen tiles, and to attend to them."""
        if AS_STORED:
            return I32(0), I32(0), I32(0), (U32(0), U32(0))
        clear_k(base, thread)
        clear_v(base, thread)
        if SCALED and thread < TERMS:  # where K or V has no scales
            store_shared_16(U32(base + SIZES.terms + 16 * thread), U32(0), U32(0), U32(0), U32(0))
        of_k = begin_k(base, thread)
        of_v = of_k if ALIKE else begin_v(base, thread)
        return of_k, of_v, begin_scales(base, thread), begin_tables(base, thread & I32(3))

    return widen, prepare


def make_terms(CAPPED, SIZES):
    """Make the functions that scale scores, cap them and add their tokens' logarithms, and that load their backs.

    Scaled or capped scores are then in base 2; others are unchanged.
    """
    TILE, TO_BASE_2, SCALED = SIZES.tile, F(LOG2_E), SIZES.scaled
    K_SCALED, V_SCALED = SIZES.k.words > 0, SIZES.v.words > 0
    load = load_shared(8, *range(0, 4 * TILE, 32), of="f", into=True)

    @register_jitable
    def capped(score, soft_cap):
        return soft_cap * F(math.tanh(score / soft_cap)) * TO_BASE_2

    @register_jitable
    def finished(score, factor, log, soft_cap):
        if CAPPED:
            return capped(score * factor, soft_cap) + log
        return cuda.fma(score, factor, log)

    def make_step(J):
        """Return the step for tokens 8J + 2t and 8J + 2t + 1 of both rows."""
        load_terms = load_shared(16, 64 * J, of="f")

        @register_jitable
        def scaled(c, scales, at, soft_cap):
            x, y, log, other_log = load_terms(at)
            for r in range(2):
                n = 4 * J + 2 * r
                factor, other = (x, y) if K_SCALED else (scales[r], scales[r])
                c[n] = finished(c[n], factor, log, soft_cap)
                c[n + 1] = finished(c[n + 1], other, other_log, soft_cap)

        @register_jitable
        def only_capped(c, scales, at, soft_cap):
            for r in range(2):
                for e in range(2):
                    n = 4 * J + 2 * r + e
                    c[n] = capped(c[n] * scales[r], soft_cap)

        return scaled if SCALED else only_capped

    finish_all = in_turn([make_step(j) for j in range(TILE // 8)])

    @register_jitable
    def finish_scores(c, scales, terms, uneven, soft_cap):
        if K_SCALED and uneven:
            for j in range(TILE // 8):
                for r in range(2):
                    c[4 * j + 2 * r] *= scales[r]
                    c[4 * j + 2 * r + 1] *= scales[r]
        if SCALED or CAPPED:
            finish_all(c, scales, terms, soft_cap)

    @register_jitable
    def load_backs(backs, backs_from):
        if V_SCALED:
            load(backs_from, backs)

    return finish_scores, load_backs
