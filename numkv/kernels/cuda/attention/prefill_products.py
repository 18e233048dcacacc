"""The products of attention's kernel for many query rows: what it multiplies, on tensor cores, and how it gets there.

Steps are closures over sizes and kinds; see `numkv.kernels.cuda.attention.prefill`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.sizes import OPERANDS
from numkv.kernels.cuda.instructions import (
    global_address,
    ldmatrix_x4_into,
    load_global_4,
    load_global_8,
    load_shared_16,
    mma_bf16,
    mma_fp16,
    pack_bf16,
    pack_fp16,
    shuffle_xor,
    shuffle_xor_float,
    store_shared_16,
    unpack_fp16,
)  # fmt: skip
from numkv.kernels.cuda.widen import halves_bf16, halves_fp16, unpack_bf16
from numkv.rows.convert import codec

F, I32, I64, U32 = np.float32, np.int32, np.int64, np.uint32
MINUS_INF = F(-np.inf)
#: In place of the exponent of a row that has no largest element: all zeros, or not finite.
NOTHING = I32(127)


class Operand(NamedTuple):
    """A 16-bit float as tensor cores take it, and constants of it; of words, both halves alike."""

    mma: Any
    pack: Any
    halves: Any
    ones: int
    exponent: int  #: all bits of an exponent: infinity
    lift: float  #: powers of two that weights are moved up by; they may be `SLACK` more above 1
    codes: tuple[int, int, int]  #: 1, 128 and 16,384


FLOATS = {
    "bf16": Operand(
        mma_bf16, pack_bf16, halves_bf16, 0x3F803F80, 0x7F80, 0.0, (0x3F80, 0x4300, 0x4680)
    ),
    "fp16": Operand(
        mma_fp16, pack_fp16, halves_fp16, 0x3C003C00, 0x7C00, 11.0, (0x3C00, 0x5800, 0x7400)
    ),
}


class PrefillState(NamedTuple):
    """The online softmax of a thread's two rows, in registers."""

    maxima: Any  #: in base 2
    totals: Any
    sums: Any  #: [columns 8n + 2t, + 1 of row g, and of row g + 8]
    scales: Any  #: what scores of each row are multiplied by


def in_turn(steps):
    """The function that calls functions one after another with what it is called with.

    For what registers are numbered by: the compiler unrolls short loops whole, but not these.
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
    """The function that says by which powers of two a thread's rows are moved to where float16 holds them.

    They are the same for an item's rows if `TOGETHER`, but for rows that are `NEAR` powers smaller, or more.
    """
    WARPS, NEAR = SIZES.threads // 32, 12
    load, _ = codec(Q_KIND, "float32")

    @register_jitable
    def power_for(q, row, place):
        """The exponent that brings a row's largest element to 2**14; `NOTHING` if there is no such one."""
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
        """The least exponent of a block's rows; `powers` has a number for each warp."""
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
        """The common exponent, where a row loses nothing by it."""
        return exponent if exponent < NOTHING and exponent - common > I32(NEAR) else common

    @register_jitable
    def powers_for(q, row, other, scale, scales, powers, place, thread):
        """What a thread's rows are multiplied by, and what the scores of all rows are multiplied by then.

        `scales` gets what scores of each row are multiplied by besides.
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
    """The function that puts a thread's part of its query rows into registers or shared memory, as fragments of A."""
    OPERAND = FLOATS[OPERANDS[K_KIND]]
    pack, halves = OPERAND.pack, OPERAND.halves
    SAME, WHOLE = OPERANDS[K_KIND] == Q_KIND, SIZES.q_halves == 1
    PARTS, IN_SHARED, BYTES = SIZES.padded // 16, SIZES.q_shared, 4 if Q_KIND == "fp32" else 2
    STEP_OF_QUERIES = 16 * SIZES.threads
    # Where K is float16, and queries are not, rows are moved by a power of two. It is the same one for an item's rows
    # where tokens have scales of K, so that it becomes a part of these.
    MOVED = OPERANDS[K_KIND] == "fp16" and not SAME
    TOGETHER = MOVED and SIZES.k.words > 0
    powers_for = make_powers(Q_KIND, SIZES, TOGETHER)

    @register_jitable
    def words_of(at, sign, power):
        """The two elements at an address as a word, and what it leaves as another one."""
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
        """Address of the first two elements of a row that a thread takes."""
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
        """Those of a thread's two rows.

        Returns what scores are multiplied by, and whether rows of the warp differ. `scales` gets what each row's are
        multiplied by: in place of the former, or besides it where tokens of K have scales.
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
        """The function that adds products to scores, or begins with them."""

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
        load = ldmatrix_x4_into(TILE // 16, 16 * SIZES.k_step, False, 32 * S)

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
    """The function that adds a tile's V rows, weighted, and the weights themselves."""
    TILE, V_STEP, HALVES, WEIGHTS = SIZES.tile, SIZES.v_step, SIZES.p_halves, SIZES.tile // 4
    TOTALS = HALVES > 1 and SIZES.v.words == 0  # of weights that are not scaled
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    mma, ONES = OPERAND.mma, U32(OPERAND.ones)
    # Sixteen columns of sixteen tokens are four matrices; some of them are loaded at once.
    AT_ONCE = 4 if SIZES.padded_v % 64 == 0 else 2

    def make_step(I, N0):
        load = ldmatrix_x4_into(AT_ONCE, 32, True, I * (16 * V_STEP) + N0 * 32)

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
    """The function for tiles whose V is not finite where some rows see it and others do not.

    Where there are such elements, they are replaced by zeros, and numbers are left where K was, which nobody needs any
    more: 1 for infinity, 128 for minus infinity, 16,384 for NaN, 0 for all that is finite. A product of these with
    ones, where a row's weight is not 0, counts for each row and column what the row sees; it is added.
    """
    TILE, V_STEP, THREADS = SIZES.tile, SIZES.v_step, SIZES.threads
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    mma, ONE, EXPONENT = OPERAND.mma, OPERAND.ones & 0xFFFF, OPERAND.exponent
    PLUS, MINUS, NAN = OPERAND.codes
    CHUNKS, PLACES = SIZES.padded_v // 8, TILE * (SIZES.padded_v // 8)
    STEP = U32((0x8000 - EXPONENT) * 0x10001)
    MAGNITUDES, SIGNS = U32(0x7FFF7FFF), U32(0x80008000)
    load = ldmatrix_x4_into(TILE // 16, 16 * V_STEP, True)

    @register_jitable
    def is_finite(v_from, thread):
        """Whether the elements of V are that a thread looks at."""
        marks = U32(0)
        for i in range(thread, PLACES, THREADS):
            w = load_shared_16(v_from + i // CHUNKS * V_STEP + i % CHUNKS * 16)
            for m in range(4):
                marks |= (w[m] & MAGNITUDES) + STEP
        return marks & SIGNS == 0

    @register_jitable
    def part(half):
        """What is left of an element of V, and its number."""
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
        """What was counted, as a sum."""
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
        """Leave a tile's V finite, for rows that do not see what is not; others get it now.

        `flags` has a word for even tiles, and one for odd ones; 0 before.
        """
        if not is_finite(v_stage, thread):
            flags[number & 1] = 1
        cuda.syncthreads()
        if flags[number & 1] != 0:
            put_aside(v_stage, k_stage, thread)
            cuda.syncthreads()
            poison(state, weights, words, v_lane - (v_stage - k_stage))

    return hide
