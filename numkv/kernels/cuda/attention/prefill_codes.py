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

``2**e`` follows the largest of a token's scales, so whatever they are, rows of INT4 are in the range of float16; what
is rounded there is what a cache of float16 would have rounded.

Weights are multiplied by adding: a score gets the logarithm of the token's factor, which is one fused multiplication
and addition with what the score is multiplied by (the token's *terms*). So a row's maximum is that of weights times
factors, which stay in the range of float16 whatever the factors are. The sum of weights divides them by the factor
again (the token's *back*), in float32. A token that a row does not see has no weight, whatever its scale is.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_products import level_offsets
from numkv.kernels.cuda.attention.prefill_items import rows_at_once
from numkv.kernels.cuda.attention.prefill_products import in_turn
from numkv.kernels.cuda.attention.sizes import CHUNK
from numkv.kernels.cuda.attention.splits import LOG2_E
from numkv.kernels.cuda.instructions import (
    exp2_approx,
    fma_fp16x2,
    keep,
    load_shared_4,
    load_shared_4_floats_from,
    load_shared_4_from,
    load_shared_16_from,
    load_shared_pairs,
    log2_approx,
    pack_fp16,
    permute_bytes,
    permute_bytes_as,
    select_bits,
    shuffle_xor_by,
    store_shared_4,
    store_shared_16,
    store_shared_16_at,
)  # fmt: skip
from numkv.kernels.cuda.widen import fp8_words, int8_words

F, I32, U32 = np.float32, np.int32, np.uint32
#: A factor of V below 2**-90 counts as that where logarithms are added: so the sum of a million weights stays finite.
LEAST_LOG, MOST_LOG = -90, 126
#: Rows of INT4 are so many powers of two smaller than scales make them: levels are 2**-9 of theirs, as nibbles are
#: where float16 is subnormal, and scales are 2 to 4 for the largest one.
DOWN = 8


def head_factor(name: str) -> float:
    """What products with elements of a kind in shared memory are multiplied by, beside scales."""
    return 256.0 if name == "fp8_e4m3" else 1.0


def make_elements(KIND):
    """The function that makes chunks of 16-bit floats of one of four words; of INT4, by a factor and an offset."""
    if KIND == "int8":
        widen = int8_words("fp16")
    elif KIND == "fp8_e5m2":
        widen = fp8_words(KIND, "fp16")
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
        """Levels are exact; times the scale they are rounded. Nibbles are subnormal: `up` brings them to 2**-9."""
        return fma_fp16x2(fma_fp16x2(nibbles, up, offset), factor, U32(0x80008000))  # plus -0

    @register_jitable
    def scaled(word, factor, offset):
        """Of four bytes the low nibbles' elements, then the high ones'."""
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
        """Bits go where float16 has them, with its bias: eight powers of two lower. And six bits of magnitudes.

        An upper byte has the sign, a zero and those six bits, the lower one the last bit.
        """
        six = U32(word >> U32(1)) & U32(0x3F3F3F3F)
        upper = select_bits(word, U32(0x80808080), six)
        lower = U32(word << U32(7)) & U32(0x80808080)
        return first(lower, upper), second(lower, upper), six

    @register_jitable
    def with_nan(word):
        """NaN where there is all ones."""
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
    """The functions for INT4 that find the largest scale of a token, and what makes numbers of a chunk's nibbles.

    Scales are `OFFSET` bytes after the addresses given. If `TEAM` is not 0, so many adjacent threads have the groups of
    a token.
    """
    LEAST, MOST = U32(LEAST_LOG + 127 << 23), U32((MOST_LOG - DOWN + 127 << 23) + (1 << 23) - 1)
    STEPS = [2**i for i in range(8) if 2**i < TEAM]
    load_own = load_shared_4_from(OFFSET)

    def make_larger(i):
        load = load_shared_4_from(OFFSET + 4 * i)

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
            """The bits of a power of two, of a float32: of a token's largest scale; one may be known."""
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
        """A group's factor and offset, each as two float16. Its scale is of the word at `own_at`: bytes `chosen`."""
        words = load_own(own_at)
        word = permute_bytes(words, words, chosen)
        own = U32(word & U32(0xFFFF0000))
        down = U32(power_for(scales_at, own) ^ U32(0x7F800000)).view(np.float32)  # twice 1 / power
        scale = own.view(np.float32) * down
        # The lowest level less 16, and then times 2**-9.
        offset = fma_fp16x2(level_offsets(word), U32(0x18001800), U32(0x28002800))
        return pack_fp16(scale, scale), offset

    @register_jitable
    def no_scale(scales_at, own_at, chosen):
        return U32(0), U32(0)

    return power_of, group_scale if SIDE.kind == "int4" else no_scale


def make_keep_scales(SIZES):
    """The functions that put tokens' terms and backs down: scales make room for the next tile's.

    The first threads of a block take a token's scale of K each, the last ones that of V.
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

    k_factor, v_factor = make_factor(K), make_factor(V)

    @register_jitable
    def begin_scales(base, thread):
        """Addresses of a token's scales, of its terms and of its back."""
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

    @register_jitable
    def begin_nothing(base, thread):
        return U32(0), U32(0), U32(0)

    return begin_scales if SIZES.scaled else begin_nothing, keep_scales


def make_widen_side(SIZES, SIDE, WIDE, STEP, COLUMNS, LIKE=None):
    """The functions that widen a tile of K or V to `WIDE` bytes from the start of shared memory, `STEP` bytes a row.

    If `LIKE`, a side of the same sizes at the start, addresses are those of that one, and the difference a part of the
    instructions.
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
        store = store_shared_16_at(offset + CHUNK * m)

        @register_jitable
        def put(to, chunks):
            w = chunks[m]
            store(to, w[0], w[1], w[2], w[3])

        return put

    def make_step(i):
        load = load_shared_16_from(ROWS_FROM + i * ROWS * ROW_BYTES)
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
        """What a thread needs to widen its chunks."""
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
        """Zeros in columns past the end of rows, which nobody writes to."""
        for i in range(thread, TILE * LOST, THREADS):
            at = base + WIDE + i // LOST * STEP + (i % LOST + OUT * CHUNKS) * CHUNK
            store_shared_16(U32(at), U32(0), U32(0), U32(0), U32(0))

    @register_jitable
    def clear_nothing(base, thread):
        pass

    return begin_side, widen_side, clear if LOST else clear_nothing


def make_widen(SIZES):
    """The functions that widen a tile, and that prepare shared memory for it."""
    V_FROM, SCALED, TERMS = SIZES.k_bytes, SIZES.scaled, SIZES.tile // 2
    begin_k, widen_k, clear_k = make_widen_side(SIZES, SIZES.k, 0, SIZES.k_step, SIZES.padded)
    ALIKE = SIZES.k.kind == SIZES.v.kind and SIZES.dim == SIZES.dim_v
    begin_v, widen_v, clear_v = make_widen_side(
        SIZES, SIZES.v, V_FROM, SIZES.v_step, SIZES.padded_v, SIZES.k if ALIKE else None
    )  # fmt: skip
    begin_scales, keep_scales = make_keep_scales(SIZES)

    @register_jitable
    def begin_tables(base, place):
        """Addresses of the first terms and backs that a thread needs."""
        if not SCALED:
            return U32(0), U32(0)
        return keep(U32(base + SIZES.terms + place * 16)), keep(U32(base + SIZES.backs + place * 8))

    @register_jitable
    def widen(ways, thread, scale):
        """Make 16-bit floats of a tile that has arrived; `scale` is what all scores are multiplied by."""
        keep_scales(ways[2], thread, scale)
        widen_k(ways[0])
        widen_v(ways[1])

    @register_jitable
    def prepare(base, thread):
        """What a thread needs to widen tiles, and to attend to them."""
        clear_k(base, thread)
        clear_v(base, thread)
        if SCALED and thread < TERMS:  # where K or V has no scales
            store_shared_16(U32(base + SIZES.terms + 16 * thread), U32(0), U32(0), U32(0), U32(0))
        of_k = begin_k(base, thread)
        of_v = of_k if ALIKE else begin_v(base, thread)
        return of_k, of_v, begin_scales(base, thread), begin_tables(base, thread & I32(3))

    @register_jitable
    def nothing(base, thread):
        return I32(0), I32(0), I32(0), begin_tables(base, thread)

    @register_jitable
    def widen_nothing(ways, thread, scale):
        pass

    return (widen, prepare) if SIZES.widened else (widen_nothing, nothing)


def make_terms(CAPPED, SIZES):
    """The functions that multiply scores, cap them and add their tokens' logarithms, and that load their backs.

    What is scaled or capped is in base 2 then; the rest stays as it is.
    """
    TILE, TO_BASE_2, SCALED = SIZES.tile, F(LOG2_E), SIZES.scaled
    K_SCALED, V_SCALED = SIZES.k.words > 0, SIZES.v.words > 0
    load = load_shared_pairs(TILE // 8, 32)

    @register_jitable
    def capped(score, soft_cap):
        return soft_cap * F(math.tanh(score / soft_cap)) * TO_BASE_2

    @register_jitable
    def finished(score, factor, log, soft_cap):
        if CAPPED:
            return capped(score * factor, soft_cap) + log
        return cuda.fma(score, factor, log)

    def make_step(J):
        """Tokens 8J + 2t and 8J + 2t + 1 of both rows."""
        load_terms = load_shared_4_floats_from(64 * J)

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
