"""Attention of many query rows on tensor cores: prefill, and long chunks of it.

A block takes an item: 64 query rows, sixteen for each warp, and the KV tiles that any of them sees, one after another.
K and V of the next tile are on their way to shared memory while this one is worked on; there is one barrier a tile.
What a warp has in registers is laid out as FlashAttention-2 does it (Dao, arXiv:2307.08691), by the drawings of
`numkv.kernels.cuda.instructions.warps`, for its thread ``l``, ``g = l // 4``, ``t = l % 4``::

    scores    S = Q K^T, 16 rows x 64 tokens      c0, c1: row g, tokens 8j + 2t and 8j + 2t + 1   c2, c3: row g + 8
    weights   P, packed in pairs: scores of tokens 16i to 16i + 15 are an A of the second product as they are
    sums      O = P V, 16 rows x head_dim_v       as scores, with columns of V in place of tokens

The softmax is online (Milakov and Gimelshein, arXiv:1805.02867), in base 2; four threads have a row, and agree on its
maximum by shuffles. The sum of weights is one more product, with a column of ones.

Queries that need more than 16 bits have two halves of 16, and take two products; so have their weights. For a K of
float16, rows of other queries are moved by a power of two to where float16 holds them. Weights of float16 are moved up
by `LIFT` powers of two, as they would lose bits where they are small.

A tile that some rows do not see whole is masked. There a weight of 0 does not hide an infinite or NaN V from a row that
does not see it: if the tile has one, such elements are put aside and replaced by zeros, and each row gets those that it
sees by a product of its own (`make_poison`). Rows of V that nobody sees are not read.

Every sum is taken in an order that depends on the sequence and the head dims alone, so results do not depend on the
batch or the launch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.prefill_items import (
    ITEM_FIELDS,
    PrefillBatch,
    make_places,
    make_prefill_items,
)  # fmt: skip
from numkv.kernels.cuda.attention.prefill_sizes import OPERANDS, prefill_sizes
from numkv.kernels.cuda.attention.splits import LN_2, LOG2_E
from numkv.kernels.cuda.instructions import (
    cp_async_16_or_zeros,
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    global_address,
    ldmatrix_x4_into,
    load_shared_16,
    mma_bf16,
    mma_fp16,
    pack_bf16,
    pack_fp16,
    shared_address,
    shuffle_xor_float,
    store_shared_16,
)  # fmt: skip
from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.widen import halves_bf16, halves_fp16
from numkv.rows.convert import codec
from numkv.rows.softmax import finish

__all__ = ["make_prefill"]

F, I32, I64, U32 = np.float32, np.int32, np.int64, np.uint32
MINUS_INF = F(-np.inf)


class Operand(NamedTuple):
    """A 16-bit float as tensor cores take it, and constants of it; of words, both halves alike."""

    mma: Any
    pack: Any
    halves: Any
    ones: int
    exponent: int  #: all bits of an exponent: infinity
    lift: float  #: powers of two that weights are moved up by
    codes: tuple[int, int, int]  #: 1, 128 and 16,384


FLOATS = {
    "bf16": Operand(
        mma_bf16, pack_bf16, halves_bf16, 0x3F803F80, 0x7F80, 0.0, (0x3F80, 0x4300, 0x4680)
    ),
    "fp16": Operand(
        mma_fp16, pack_fp16, halves_fp16, 0x3C003C00, 0x7C00, 15.0, (0x3C00, 0x5800, 0x7400)
    ),
}


class State(NamedTuple):
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


def make_load_queries(Q_KIND, K_KIND, SIZES):
    """The function that puts a thread's part of its query rows into registers or shared memory, as fragments of A."""
    OPERAND = FLOATS[OPERANDS[K_KIND]]
    pack, halves = OPERAND.pack, OPERAND.halves
    SAME, WHOLE = OPERANDS[K_KIND] == Q_KIND, SIZES.q_halves == 1
    PARTS, IN_SHARED = SIZES.dim // 16, SIZES.q_shared
    # Where K is float16, and queries are not, rows are moved by a power of two.
    MOVED = OPERANDS[K_KIND] == "fp16" and not SAME
    load, _ = codec(Q_KIND, "float32")

    @register_jitable
    def power_for(q, row, place):
        """The exponent that brings a row's largest element to 2**14; 0 if there is no such one."""
        top = F(0)
        if row.there:
            for d in range(2 * place, q.shape[2], 8):
                top = max(top, abs(load(q[row.token, row.head, d])))
                if d + 1 < q.shape[2]:
                    top = max(top, abs(load(q[row.token, row.head, d + 1])))
        top = max(top, shuffle_xor_float(top, 1))
        top = max(top, shuffle_xor_float(top, 2))
        exponent = I32(U32(top.view(U32)) >> U32(23))
        if exponent > 0 and exponent < 255:
            return min(max(I32(14 + 127) - exponent, I32(-100)), I32(100))
        return I32(0)

    @register_jitable
    def float_of(exponent):
        return U32(U32(exponent + I32(127)) << U32(23)).view(np.float32)

    @register_jitable
    def words_of(q, row, d, sign, power):
        """Elements d and d + 1 of a row as a word, and what it leaves as another one."""
        x, y = F(0), F(0)
        low, high = U32(0), U32(0)
        if row.there and d < q.shape[2]:
            if SAME:
                low = U32(q[row.token, row.head, d])
            else:
                x = load(q[row.token, row.head, d]) * power
        if row.there and d + 1 < q.shape[2]:
            if SAME:
                high = U32(q[row.token, row.head, d + 1])
            else:
                y = load(q[row.token, row.head, d + 1]) * power
        if SAME:
            return U32(low | U32(high << U32(16))) ^ sign, U32(0)
        if WHOLE:
            return pack(x, y) ^ sign, U32(0)
        first, rest = halves(x, y)
        return first ^ sign, rest ^ sign

    def make_step(S):
        @register_jitable
        def step(q, row, other, sign, power, other_power, words, q_at, place):
            d = 16 * S + 2 * place
            a0, low0 = words_of(q, row, d, sign, power)
            a1, low1 = words_of(q, other, d, sign, other_power)
            a2, low2 = words_of(q, row, d + 8, sign, power)
            a3, low3 = words_of(q, other, d + 8, sign, other_power)
            if IN_SHARED:
                store_shared_16(q_at + S * (16 * THREADS), a0, a1, a2, a3)
                if not WHOLE:
                    store_shared_16(q_at + (PARTS + S) * (16 * THREADS), low0, low1, low2, low3)
            else:
                words[4 * S], words[4 * S + 1], words[4 * S + 2], words[4 * S + 3] = a0, a1, a2, a3

        return step

    load_words = in_turn([make_step(s) for s in range(PARTS)])

    @register_jitable
    def load_queries(q, row, other, sign, scale, scales, words, q_at, place):
        """Those of a thread's two rows; `scales` gets what their scores are multiplied by."""
        scales[0] = scales[1] = scale
        power = other_power = F(1)
        if MOVED:
            exponent, other_exponent = power_for(q, row, place), power_for(q, other, place)
            power, other_power = float_of(exponent), float_of(other_exponent)
            scales[0], scales[1] = scale * float_of(-exponent), scale * float_of(-other_exponent)
        load_words(q, row, other, sign, power, other_power, words, q_at, place)

    return load_queries


def make_scores(K_KIND, SIZES):
    """The function that multiplies a warp's query rows by a KV tile's K."""
    TILE, PARTS, K_STEP = SIZES.tile, SIZES.dim // 16, SIZES.k_step
    IN_SHARED, HALVES = SIZES.q_shared, SIZES.q_halves
    mma = FLOATS[OPERANDS[K_KIND]].mma
    # A row of 8 tokens' matrices: 32 columns at once.
    load = ldmatrix_x4_into(SIZES.dim // 32, 64, False)

    @register_jitable
    def score(c, words, q_at, k_words, k_at):
        if IN_SHARED:
            for i in range(TILE // 2):
                c[i] = F(0)
            for h in range(HALVES):
                for j in range(TILE // 8):
                    load(k_at + j * (8 * K_STEP), k_words)
                    for s in range(PARTS):
                        a = load_shared_16(q_at + (h * PARTS + s) * (16 * THREADS))
                        d = mma(
                            a[0], a[1], a[2], a[3], k_words[2 * s], k_words[2 * s + 1],
                            c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3],
                        )  # fmt: skip
                        c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3] = d
            return
        for j in range(TILE // 8):
            load(k_at + j * (8 * K_STEP), k_words)
            d = (F(0), F(0), F(0), F(0))
            for s in range(PARTS):
                d = mma(
                    words[4 * s], words[4 * s + 1], words[4 * s + 2], words[4 * s + 3],
                    k_words[2 * s], k_words[2 * s + 1], d[0], d[1], d[2], d[3],
                )  # fmt: skip
            c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3] = d

    return score


def make_softmax(V_KIND, CAPPED, SIZES):
    """The functions that cap and mask scores, and turn them into packed weights."""
    TILE, HALVES, TO_BASE_2 = SIZES.tile, SIZES.p_halves, F(LOG2_E)
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    pack, halves, LIFT = OPERAND.pack, OPERAND.halves, F(OPERAND.lift)
    SUMS, WEIGHTS = SIZES.dim_v // 2, TILE // 4

    @register_jitable
    def mask_row(c, row, r, tile, place):
        begin = I32(min(max(row.begin - tile, I64(0)), I64(TILE))) - 2 * place
        end = I32(min(max(row.end - tile, I64(0)), I64(TILE))) - 2 * place
        for j in range(TILE // 8):
            for e in range(2):
                if begin > 8 * j + e or end <= 8 * j + e:
                    c[4 * j + 2 * r + e] = MINUS_INF

    @register_jitable
    def mask(c, row, other, tile, place, sizes, number, lost):
        """Leave scores of tokens that a row does not see at minus infinity."""
        mask_row(c, row, 0, tile, place)
        mask_row(c, other, 1, tile, place)
        if lost != 0:
            for j in range(TILE // 8):
                for e in range(2):
                    if sizes[(number & 3) * TILE + 8 * j + 2 * place + e] == 0:
                        c[4 * j + e] = MINUS_INF
                        c[4 * j + 2 + e] = MINUS_INF

    @register_jitable
    def cap(c, scales, soft_cap):
        """Cap scores, which leaves them in base 2."""
        for r in range(2):
            for j in range(TILE // 8):
                for e in range(2):
                    i = 4 * j + 2 * r + e
                    c[i] = soft_cap * F(math.tanh(c[i] * scales[r] / soft_cap)) * TO_BASE_2

    @register_jitable
    def weigh_row(c, state, weights, r):
        scale = F(1) if CAPPED else state.scales[r]
        top = c[2 * r]
        for j in range(TILE // 8):
            for e in range(2):
                top = max(top, c[4 * j + 2 * r + e])
        top = max(top, shuffle_xor_float(top, 1))
        top = max(top, shuffle_xor_float(top, 2))
        top = max(state.maxima[r], top * scale)
        # A row that has seen nothing keeps its maximum of -inf; subtracting 0 avoids inf - inf.
        base = top if top > MINUS_INF else F(0)
        shrink = exp2_approx(state.maxima[r] - base)
        state.maxima[r] = top
        state.totals[r] *= shrink
        for n in range(SUMS // 4):
            for e in range(2):
                state.sums[4 * n + 2 * r + e] *= shrink
        offset = LIFT - base
        for j in range(TILE // 8):
            x = exp2_approx(cuda.fma(c[4 * j + 2 * r], scale, offset))
            y = exp2_approx(cuda.fma(c[4 * j + 2 * r + 1], scale, offset))
            if HALVES == 1:
                weights[2 * j + r] = pack(x, y)
            else:
                first, rest = halves(x, y)
                weights[2 * j + r] = first
                weights[WEIGHTS + 2 * j + r] = rest

    @register_jitable
    def weigh(c, state, weights):
        """The weights of a tile relative to the rows' maxima; what there was is brought to the same."""
        weigh_row(c, state, weights, 0)
        weigh_row(c, state, weights, 1)

    return mask, cap, weigh


def make_sums(V_KIND, SIZES):
    """The function that adds a tile's V rows, weighted, and the weights themselves."""
    TILE, V_STEP, HALVES, WEIGHTS = SIZES.tile, SIZES.v_step, SIZES.p_halves, SIZES.tile // 4
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    mma, ONES = OPERAND.mma, U32(OPERAND.ones)
    # Sixteen columns of sixteen tokens are four matrices; some of them are loaded at once.
    AT_ONCE = 4 if SIZES.dim_v % 64 == 0 else 2
    load = ldmatrix_x4_into(AT_ONCE, 32, True)

    @register_jitable
    def add(state, weights, v_words, v_at):
        for i in range(TILE // 16):
            for n0 in range(0, SIZES.dim_v // 16, AT_ONCE):
                load(v_at + i * (16 * V_STEP) + n0 * 32, v_words)
                for h in range(HALVES):
                    w = h * WEIGHTS + 4 * i
                    for m in range(2 * AT_ONCE):
                        n = 4 * (2 * n0 + m)
                        d = mma(
                            weights[w], weights[w + 1], weights[w + 2], weights[w + 3],
                            v_words[2 * m], v_words[2 * m + 1], state.sums[n], state.sums[n + 1],
                            state.sums[n + 2], state.sums[n + 3],
                        )  # fmt: skip
                        state.sums[n], state.sums[n + 1] = d[0], d[1]
                        state.sums[n + 2], state.sums[n + 3] = d[2], d[3]
            for h in range(HALVES):
                w = h * WEIGHTS + 4 * i
                d = mma(
                    weights[w], weights[w + 1], weights[w + 2], weights[w + 3], ONES, ONES,
                    state.totals[0], state.totals[0], state.totals[1], state.totals[1],
                )  # fmt: skip
                state.totals[0], state.totals[1] = d[0], d[2]

    return add


def make_poison(V_KIND, SIZES):
    """The functions for tiles whose V is not finite where some rows see it and others do not.

    One looks for such elements. One replaces them by zeros, and leaves numbers where K was, which nobody needs any
    more: 1 for infinity, 128 for minus infinity, 16,384 for NaN, 0 for all that is finite. A product of these with
    ones, where a row's weight is not 0, counts for each row and column what the row sees: the third one adds that.
    """
    TILE, V_STEP = SIZES.tile, SIZES.v_step
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    mma, ONE, EXPONENT = OPERAND.mma, OPERAND.ones & 0xFFFF, OPERAND.exponent
    PLUS, MINUS, NAN = OPERAND.codes
    CHUNKS, PLACES = SIZES.dim_v // 8, TILE * (SIZES.dim_v // 8)
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

        return step

    poison = in_turn([make_step(16 * n) for n in range(SIZES.dim_v // 16)])
    return is_finite, put_aside, poison


def make_copy(SIZES):
    """The function that starts to copy a KV tile to shared memory."""
    TILE, K_STEP, V_STEP = SIZES.tile, SIZES.k_step, SIZES.v_step
    K_CHUNKS, V_CHUNKS = SIZES.dim // 8, SIZES.dim_v // 8
    K_ROWS, V_ROWS = THREADS // K_CHUNKS, THREADS // V_CHUNKS
    ALIKE = K_CHUNKS == V_CHUNKS

    def make_side(ROWS, STEP):
        TIMES = -(-TILE // ROWS)
        EVEN = TILE % ROWS == 0

        @register_jitable
        def copy_side(at, sizes, number, row, source, most, to):
            """Copy every `ROWS`-th row of a tile from `row` on; what is past the end of a row of the pool is 0."""
            if row < ROWS:
                for i in range(TIMES):
                    r = row + i * ROWS
                    if EVEN or r < TILE:
                        size = sizes[(number & 3) * TILE + r] & most
                        cp_async_16_or_zeros(
                            to + i * (ROWS * STEP), source + at[(number & 1) * TILE + r], size
                        )

        return copy_side

    copy_k, copy_v = make_side(K_ROWS, K_STEP), make_side(V_ROWS, V_STEP)

    @register_jitable
    def copy_both(places, number, row, k_from, v_from, most, k_to, v_to):
        k_at, v_at, sizes, _ = places
        if row < K_ROWS:
            for i in range(-(-TILE // K_ROWS)):
                r = row + i * K_ROWS
                if TILE % K_ROWS == 0 or r < TILE:
                    size = sizes[(number & 3) * TILE + r] & most
                    at = (number & 1) * TILE + r
                    cp_async_16_or_zeros(k_to + i * (K_ROWS * K_STEP), k_from + k_at[at], size)
                    cp_async_16_or_zeros(v_to + i * (V_ROWS * V_STEP), v_from + v_at[at], size)

    @register_jitable
    def copy(places, number, thread, k_from, v_from, dim, dim_v, base):
        k_chunk, v_chunk = thread % K_CHUNKS, thread % V_CHUNKS
        k_row, v_row = thread // K_CHUNKS, thread // V_CHUNKS
        k_most = I32(16) if 8 * k_chunk < dim else I32(0)
        v_most = I32(16) if 8 * v_chunk < dim_v else I32(0)
        k_to = base + k_row * K_STEP + k_chunk * 16
        v_to = base + SIZES.k_bytes + v_row * V_STEP + v_chunk * 16
        if ALIKE and dim == dim_v:
            copy_both(
                places,
                number,
                k_row,
                k_from + k_chunk * 16,
                v_from + v_chunk * 16,
                k_most,
                k_to,
                v_to,
            )
        else:
            k_at, v_at, sizes, _ = places
            copy_k(k_at, sizes, number, k_row, k_from + k_chunk * 16, k_most, k_to)
            copy_v(v_at, sizes, number, v_row, v_from + v_chunk * 16, v_most, v_to)
        cp_async_commit()

    return copy


def make_store(Q_KIND, V_KIND, SIZES):
    """The function that normalises a thread's two rows and stores them."""
    COLUMNS, TO_BASE_2, TO_BASE_E = SIZES.dim_v // 8, F(LOG2_E), F(LN_2)
    LIFT = F(FLOATS[OPERANDS[V_KIND]].lift)
    _, store_word = codec(Q_KIND, "float32")

    def make_step(COLUMN):
        SUM = COLUMN // 2

        @register_jitable
        def step(state, out, token, head, r, factor, place):
            d = COLUMN + 2 * place
            if d < out.shape[2]:
                out[token, head, d] = store_word(factor * state.sums[SUM + 2 * r])
            if d + 1 < out.shape[2]:
                out[token, head, d + 1] = store_word(factor * state.sums[SUM + 2 * r + 1])

        return step

    store_row = in_turn([make_step(8 * n) for n in range(COLUMNS)])

    @register_jitable
    def store(state, row, r, sinks, out, lse, place):
        if row.there:
            sink = F(sinks[row.head]) * TO_BASE_2 if sinks.shape[0] > 0 else MINUS_INF
            factor, log_sum = finish(state.maxima[r] - LIFT, state.totals[r], sink, TO_BASE_E)
            if place == 0 and lse.shape[0] > 0:
                lse[row.token, row.head] = log_sum
            store_row(state, out, row.token, row.head, r, F(factor), place)

    return store


def make_prefill(Q_KIND, K_KIND, V_KIND, DIM, DIM_V, CAPPED):
    """The kernel.

    Parameters
    ----------
    Q_KIND, K_KIND, V_KIND : str
        Kinds of q and the output, of K and of V.
    DIM, DIM_V : int
        Columns of K and V in shared memory: multiples of 32.
    CAPPED : bool
        Whether scores are capped.
    """
    SIZES = prefill_sizes(Q_KIND, K_KIND, V_KIND, DIM, DIM_V)
    TILE, STAGE, K_STEP, V_STEP = SIZES.tile, SIZES.stage, SIZES.k_step, SIZES.v_step
    Q_WORDS = 1 if SIZES.q_shared else SIZES.q_words
    SCORES, SUMS, WEIGHTS = TILE // 2, DIM_V // 2, TILE // 4 * SIZES.p_halves
    LOADED = max(DIM // 8, 16)
    TABLE, SIZES_TABLE = 2 * TILE, 4 * TILE
    count_prefill, put_prefill, find_prefill, describe_row = make_prefill_items()
    locate, copy = make_places(TILE), make_copy(SIZES)
    load_queries = make_load_queries(Q_KIND, K_KIND, SIZES)
    score, add = make_scores(K_KIND, SIZES), make_sums(V_KIND, SIZES)
    mask, cap, weigh = make_softmax(V_KIND, CAPPED, SIZES)
    is_finite, put_aside, poison = make_poison(V_KIND, SIZES)
    store = make_store(Q_KIND, V_KIND, SIZES)

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, options, scale, soft_cap, sinks, out, lse,
    ):  # fmt: skip
        by_slot, window_left, most_tokens = options
        heads, group = I64(k.shape[1]), I64(q.shape[1]) // I64(k.shape[1])
        capacity = I64(block_table.shape[1])
        if not by_slot:
            capacity *= k.shape[2]
        batch = PrefillBatch(
            seq_lens,
            q_starts,
            ranges,
            I64(q.shape[0]),
            capacity,
            window_left,
            group,
            heads,
            most_tokens,
        )
        thread = I32(cuda.threadIdx.x) & I32(0x7FFFFFFF)
        lane, warp = thread & I32(31), thread >> I32(5)
        place = lane & I32(3)

        stages = cuda.shared.array(0, np.uint32)  # two stages of K and V, then query rows
        counts = cuda.shared.array(THREADS, np.int64)
        found = cuda.shared.array(ITEM_FIELDS, np.int64)
        k_at = cuda.shared.array(TABLE, np.int64)
        v_at = cuda.shared.array(TABLE, np.int64)
        sizes = cuda.shared.array(SIZES_TABLE, np.int32)
        lost = cuda.shared.array(1, np.int32)
        flags = cuda.shared.array(2, np.int32)  # whether the V of a tile is not finite
        places = (k_at, v_at, sizes, lost)

        words = cuda.local.array(Q_WORDS, np.uint32)
        loaded = cuda.local.array(LOADED, np.uint32)
        weights = cuda.local.array(WEIGHTS, np.uint32)
        c = cuda.local.array(SCORES, np.float32)
        maxima = cuda.local.array(2, np.float32)
        totals = cuda.local.array(2, np.float32)
        sums = cuda.local.array(SUMS, np.float32)
        scales = cuda.local.array(2, np.float32)
        state = State(maxima, totals, sums, scales)

        base = shared_address(stages)
        k_from, v_from = global_address(k), global_address(v)
        q_at = base + 2 * STAGE + thread * 16
        # A thread gives the address of a row of a matrix: of eight tokens' K, and of sixteen tokens' V.
        k_lane = base + (lane & I32(7)) * K_STEP + (lane >> I32(3)) * 16
        v_lane = base + SIZES.k_bytes + (lane & I32(15)) * V_STEP + (lane >> I32(4)) * 16
        sign = U32(0x80008000) if scale < 0 else U32(0)

        count = count_prefill(batch, thread)
        counts[thread] = count
        cuda.syncthreads()
        before, items = I64(0), I64(0)
        for i in range(min(seq_lens.shape[0], THREADS)):
            if i == thread:
                before = items
            items += counts[i]
        for number in range(I64(cuda.blockIdx.x), items, I64(cuda.gridDim.x)):
            cuda.syncthreads()
            put_prefill(batch, number, before, count, found, thread)
            if thread == 0:
                lost[0] = 0
                flags[0] = 0
            cuda.syncthreads()
            item = find_prefill(found)
            first = item.begin - item.begin % TILE
            tiles = (item.end - first + TILE - 1) // TILE
            locate(places, block_table, by_slot, k, v, item, first, 0, thread)
            locate(places, block_table, by_slot, k, v, item, first + TILE, 1, thread)
            cuda.syncthreads()
            if tiles > 0:
                copy(places, 0, thread, k_from, v_from, q.shape[2], out.shape[2], base)
            own = warp * 16 + (lane >> I32(2))
            row, other = describe_row(batch, item, own), describe_row(batch, item, own + 8)
            load_queries(q, row, other, sign, abs(scale), scales, words, q_at, place)
            maxima[0] = maxima[1] = MINUS_INF
            totals[0] = totals[1] = F(0)
            for i in range(SUMS):
                sums[i] = F(0)
            for n in range(tiles):
                tile, stage = first + n * TILE, (n & 1) * STAGE
                cp_async_wait(0)
                cuda.syncthreads()
                if n + 1 < tiles:
                    following = base + STAGE - stage
                    copy(places, n + 1, thread, k_from, v_from, q.shape[2], out.shape[2], following)
                if n + 2 < tiles:
                    locate(places, block_table, by_slot, k, v, item, tile + 2 * TILE, n + 2, thread)
                if thread == 0:
                    flags[(n + 1) & 1] = 0
                score(c, words, q_at, loaded, k_lane + stage)
                if CAPPED:
                    cap(c, scales, soft_cap)
                ragged = tile < item.all_begin or tile + TILE > item.all_end or lost[0] != 0
                if ragged:
                    mask(c, row, other, tile, place, sizes, n, lost[0])
                weigh(c, state, weights)
                if ragged:
                    v_stage = base + stage + SIZES.k_bytes
                    if not is_finite(v_stage, thread):
                        flags[n & 1] = 1
                    cuda.syncthreads()
                    if flags[n & 1] != 0:
                        put_aside(v_stage, base + stage, thread)
                        cuda.syncthreads()
                        poison(state, weights, loaded, v_lane + stage - SIZES.k_bytes)
                add(state, weights, loaded, v_lane + stage)
            store(state, row, 0, sinks, out, lse, place)
            store(state, other, 1, sinks, out, lse, place)

    return kernel
