"""How attention's kernel for many query rows makes 16-bit floats of codes and of 8-bit floats: once for a whole block.

A tile arrives in shared memory as it is stored, 16 bytes a chunk. A thread reads chunks of it and writes their elements
as float16, in their order, where products read them. Integers up to 2048 and 8-bit floats are exact there:

========  ==========================================  ===========================  =================================
kind      an element in shared memory                 scores are multiplied by     weights are multiplied by
========  ==========================================  ===========================  =================================
INT8      the code                                    the token's scale of K       the token's scale of V
INT4      ``level * scale * 2**-e``, rounded          ``2**e``                     ``2**e``
fp8_e4m3  ``value * 2**-8``                           ``2**8``, the head's scale   sums: ``2**8``, the head's scale
fp8_e5m2  the value                                   the head's scale             sums: the head's scale
========  ==========================================  ===========================  =================================

``2**e`` is above the largest of a token's scales, so whatever they are, rows of INT4 are in the range of float16; what
is rounded there is what a cache of float16 would have rounded.

Weights times scales have to stay in the range of float16, too: the maximum of a row is that of scores plus the power of
two that their token's scale is below. A token that a row does not see has no weight, whatever its scale is.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_products import level_offsets, level_words
from numkv.kernels.cuda.attention.prefill_copies import rows_at_once
from numkv.kernels.cuda.attention.prefill_products import MINUS_INF, in_turn
from numkv.kernels.cuda.attention.prefill_sizes import CHUNK
from numkv.kernels.cuda.instructions import (
    fma_fp16x2,
    load_shared_4,
    load_shared_16_from,
    load_shared_pairs,
    pack_fp16,
    permute_bytes,
    select_bits,
    store_shared_4,
    store_shared_16,
    store_shared_16_at,
)  # fmt: skip
from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.widen import fp8_words, int8_words

__all__ = ["head_factor", "make_factors", "make_widen"]

F, I32, U32 = np.float32, np.int32, np.uint32
#: A scale below 2**-90 counts as that where maxima are found: so the sum of a million weights stays finite.
LEAST_LOG, MOST_LOG = -90, 126


def head_factor(name: str) -> float:
    """What products with elements of a kind in shared memory are multiplied by, beside scales."""
    return 256.0 if name == "fp8_e4m3" else 1.0


@register_jitable
def exponent_of(bits):
    """The power of two that a float32 of these bits is below."""
    return min(
        max(I32(U32(bits & U32(0x7FFFFFFF)) >> U32(23)) - I32(126), I32(LEAST_LOG)), I32(MOST_LOG)
    )


@register_jitable
def power_bits(exponent):
    return U32(U32(exponent + I32(127)) << U32(23))


def make_elements(KIND):
    """The function that makes chunks of 16-bit floats of one of four words; of INT4, by a factor and an offset."""
    if KIND == "int8":
        widen = int8_words("fp16")
    elif KIND == "fp8_e5m2":
        widen = fp8_words(KIND, "fp16")

    @register_jitable
    def of_bytes(w0, w1, w2, w3, factor, offset):
        a, b = widen(w0), widen(w1)
        c, d = widen(w2), widen(w3)
        return (a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1])

    @register_jitable
    def as_it_is(w0, w1, w2, w3, factor, offset):
        return ((w0, w1, w2, w3),)

    @register_jitable
    def scaled(word, factor, offset):
        a, b, c, d = level_words(permute_bytes(word, U32(0), U32(0x3120)), offset, offset)
        nothing = U32(0x80008000)  # -0
        return (
            fma_fp16x2(a, factor, nothing), fma_fp16x2(b, factor, nothing),
            fma_fp16x2(c, factor, nothing), fma_fp16x2(d, factor, nothing),
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
        """Bits go where float16 has them, with its bias: eight powers of two lower."""
        both = permute_bytes(word, U32(0), U32(0x3120))
        low = select_bits(both << U32(7), U32(0x3F803F80), (both << U32(8)) & U32(0x80008000))
        return low, select_bits(both >> U32(1), U32(0x3F803F80), both & U32(0x80008000))

    @register_jitable
    def with_nan(word):
        """NaN where there is all ones."""
        marks = U32(U32(word & U32(0x7FFF7FFF)) + U32(0x40804080)) & U32(0x80008000)
        return word | U32(marks - (marks >> U32(5)))

    @register_jitable
    def of_e4m3(w0, w1, w2, w3, factor, offset):
        a, b = e4m3(w0), e4m3(w1)
        c, d = e4m3(w2), e4m3(w3)
        ones, seven = U32(0x01010101), U32(0x7F7F7F7F)
        marks = (
            U32(w0 & seven) + ones
            | U32(w1 & seven) + ones
            | U32(w2 & seven) + ones
            | U32(w3 & seven) + ones
        )
        if U32(marks & U32(0x80808080)) != 0:
            return (
                (with_nan(a[0]), with_nan(a[1]), with_nan(b[0]), with_nan(b[1])),
                (with_nan(c[0]), with_nan(c[1]), with_nan(d[0]), with_nan(d[1])),
            )  # fmt: skip
        return (a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1])

    return {"int4": of_nibbles, "fp8_e4m3": of_e4m3, "int8": of_bytes, "fp8_e5m2": of_bytes}.get(
        KIND, as_it_is
    )


def make_group_scale(SIDE):
    """The function that finds out what a chunk of INT4 is multiplied by, and what is multiplied by that again."""
    WORDS = SIDE.words

    @register_jitable
    def group_scale(scales_at, chunk):
        """The group's factor and offset, each as two float16, and the exponent that the row has been divided by.

        `scales_at` is where the token's scales are.
        """
        largest = U32(0)
        for i in range(WORDS):  # words of positive floats are in their order
            word = load_shared_4(U32(scales_at + U32(4 * i)))
            largest = max(largest, U32(U32(word << U32(16)) & U32(0x7FFF0000)))
            largest = max(largest, U32(word & U32(0x7FFF0000)))
        exponent = exponent_of(largest)
        word = load_shared_4(U32(scales_at + U32(4 * (chunk // 2))))
        own = U32(word >> U32(16 * (chunk % 2)))
        down = power_bits(-exponent).view(np.float32)
        scale = U32(own << U32(16)).view(np.float32) * down
        own &= U32(0xFFFF)
        return pack_fp16(scale, scale), level_offsets(U32(own | U32(own << U32(16)))), exponent

    @register_jitable
    def no_scale(scales_at, chunk):
        return U32(0), U32(0), I32(0)

    return group_scale if SIDE.kind == "int4" else no_scale


def make_widen_side(TILE, SIDE, WIDE, STEP, COLUMNS):
    """The function that widens a tile of K or V to `WIDE` bytes from the start of shared memory, `STEP` bytes a row."""
    CHUNKS, KIND, OUT = SIDE.chunks, SIDE.kind, 16 // SIDE.bits
    ROWS = rows_at_once(TILE, CHUNKS)
    INT4, INT8, ROW_BYTES = KIND == "int4", KIND == "int8", CHUNK * CHUNKS
    SCALE_BYTES, LOST = 4 * SIDE.words, COLUMNS // 8 - OUT * CHUNKS
    elements, group_scale = make_elements(KIND), make_group_scale(SIDE)

    def make_put(m, offset):
        store = store_shared_16_at(offset + CHUNK * m)

        @register_jitable
        def put(to, chunks):
            w = chunks[m]
            store(to, w[0], w[1], w[2], w[3])

        return put

    def make_step(i):
        load = load_shared_16_from(i * ROWS * ROW_BYTES)
        put = in_turn([make_put(m, i * ROWS * STEP) for m in range(OUT)])

        @register_jitable
        def step(at, to, scales_at, factors_at, chunk):
            w0, w1, w2, w3 = load(at)
            scales_at = U32(scales_at + U32(i * ROWS * SCALE_BYTES))
            factor, offset, exponent = group_scale(scales_at, chunk)
            put(to, elements(w0, w1, w2, w3, factor, offset))
            if INT4 and chunk == 0:
                own = U32(factors_at + U32(4 * i * ROWS))
                store_shared_4(own, power_bits(exponent))
                store_shared_4(U32(own + U32(4 * TILE)), U32(F(exponent).view(np.uint32)))

        return step

    steps = in_turn([make_step(i) for i in range(TILE // ROWS)])

    @register_jitable
    def widen_side(base, thread):
        chunk, row = thread % CHUNKS, thread // CHUNKS
        if row < ROWS:
            steps(
                U32(base + SIDE.rows + row * ROW_BYTES + chunk * CHUNK),
                U32(base + WIDE + row * STEP + chunk * (OUT * CHUNK)),
                U32(base + SIDE.scales + row * SCALE_BYTES), U32(base + SIDE.factors + row * 4), chunk,
            )  # fmt: skip

    @register_jitable
    def keep_scales(base, token):
        """Put down the factor of a token, and its power of two, of INT8: scales make room for the next tile's."""
        if INT8 and token >= 0 and token < TILE:
            bits = load_shared_4(U32(base + SIDE.scales + 4 * token))
            store_shared_4(U32(base + SIDE.factors + 4 * token), bits)
            log = F(exponent_of(bits))
            store_shared_4(U32(base + SIDE.logs + 4 * token), U32(log.view(np.uint32)))

    @register_jitable
    def clear(base, thread):
        """Zeros in columns past the end of rows, which nobody writes to."""
        for i in range(thread, TILE * LOST, THREADS):
            at = base + WIDE + i // LOST * STEP + (i % LOST + OUT * CHUNKS) * CHUNK
            store_shared_16(U32(at), U32(0), U32(0), U32(0), U32(0))

    @register_jitable
    def clear_nothing(base, thread):
        pass

    return widen_side, keep_scales, clear if LOST else clear_nothing


def make_widen(SIZES):
    """The functions that widen a tile, and that prepare shared memory for it."""
    TILE, V_FROM = SIZES.tile, SIZES.k_bytes
    widen_k, keep_k, clear_k = make_widen_side(TILE, SIZES.k, 0, SIZES.k_step, SIZES.padded)
    widen_v, keep_v, clear_v = make_widen_side(TILE, SIZES.v, V_FROM, SIZES.v_step, SIZES.padded_v)

    @register_jitable
    def widen(base, thread):
        """Make 16-bit floats of a tile that has arrived."""
        keep_k(base, thread)
        keep_v(base, thread - (THREADS - TILE))
        widen_k(base, thread)
        widen_v(base, thread)

    @register_jitable
    def prepare(base, thread):
        clear_k(base, thread)
        clear_v(base, thread)

    @register_jitable
    def nothing(base, thread):
        pass

    return (widen, prepare) if SIZES.widened else (nothing, nothing)


def make_factors(SIZES):
    """The functions that multiply scores by their tokens' factors, and take weights of hidden tokens away."""
    TILE, K, V, HALVES = SIZES.tile, SIZES.k, SIZES.v, SIZES.p_halves
    WEIGHTS = TILE // 4
    load = load_shared_pairs(TILE // 8, 32)

    @register_jitable
    def scale_scores(c, floats, base, place):
        """Multiply by the factors of tokens 8j + 2t and 8j + 2t + 1."""
        if K.words > 0:
            load(U32(base + K.factors + 8 * place), floats)
            for j in range(TILE // 8):
                for r in range(2):
                    c[4 * j + 2 * r] *= floats[2 * j]
                    c[4 * j + 2 * r + 1] *= floats[2 * j + 1]

    @register_jitable
    def load_logs(floats, base, place):
        if V.words > 0:
            load(U32(base + V.logs + 8 * place), floats)

    @register_jitable
    def load_factors(floats, base, place):
        if V.words > 0:
            load(U32(base + V.factors + 8 * place), floats)

    @register_jitable
    def clean(c, weights):
        """Weights of 0 where scores are minus infinity: a scale may have made NaN of it."""
        for j in range(TILE // 8):
            for r in range(2):
                seen = U32(0) if c[4 * j + 2 * r] == MINUS_INF else U32(0xFFFF)
                if c[4 * j + 2 * r + 1] != MINUS_INF:
                    seen |= U32(0xFFFF0000)
                for h in range(HALVES):
                    weights[h * WEIGHTS + 2 * j + r] &= seen

    return scale_scores, load_logs, load_factors, clean
