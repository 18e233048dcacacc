"""Decode attention's products on tensor cores: queries with rows of K, rows of V with weights.

`numkv.kernels.cuda.attention.decode` describes the layouts.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.sizes import BANKS, DECODE_ROWS, QUERY_BYTES, WARPS
from numkv.kernels.cuda.instructions import (
    EVERYONE,
    fma_fp16x2,
    ldmatrix,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_global_4,
    load_shared,
    load_shared_8,
    permute_bytes,
    select_bits,
    shuffle,
    shuffle_xor,
    store_shared_8,
    transpose,
)  # fmt: skip
from numkv.kernels.cuda.widen import FLOATS, fp8_words, int8_words, unpack_bf16
from numkv.rows.convert import bf16_to_float32, codec

F, I32, U32 = np.float32, np.int32, np.uint32


def make_widen(KIND):
    """Make the function that makes two words of float16 pairs of a word of four codes: bytes (0, 2) and (1, 3)."""
    if KIND == "int8":
        return int8_words(0x4240, 0x4341)
    by_halves = fp8_words(KIND)

    @register_jitable
    def widen(word):
        return by_halves(permute_bytes(word, U32(0), U32(0x3120)))

    return widen


@register_jitable
def level_words(word, offset_low, offset_high):
    """Eight INT4 codes as float16 levels: nibbles (0, 4), (2, 6), (1, 5), (3, 7), counted from the lowest.

    A code replaces the bits of 16.0 that count units. An offset then subtracts 16 and adds the lowest level.
    `offset_low` is for nibbles of bytes 0 and 2, `offset_high` for those of bytes 1 and 3.
    """
    one, mask, sixteen = U32(0x3C003C00), U32(0x03C003C0), U32(0x4C004C00)
    a = select_bits(U32(word << U32(6)), mask, sixteen)
    b = select_bits(U32(word >> U32(2)), mask, sixteen)
    c = select_bits(U32(word << U32(2)), mask, sixteen)
    d = select_bits(U32(word >> U32(6)), mask, sixteen)
    return (
        fma_fp16x2(a, one, offset_low), fma_fp16x2(b, one, offset_high),
        fma_fp16x2(c, one, offset_low), fma_fp16x2(d, one, offset_high),
    )  # fmt: skip


@register_jitable
def level_offsets(words):
    """Return the offsets of `level_words` for two scales' words: ``lowest_level - 16``, from their last bits."""
    return U32(U32(0xCE50CE50) - U32(U32(words & U32(0x00070007)) << U32(5)))


# ---------------------------------------------------------------- queries


def make_load_queries(Q_KIND, SIZES):
    """Make the function that stores an item's queries in shared memory, as the columns of products with K.

    Also return whether it scales them.
    """
    K, OPERAND, TILES = SIZES.k, SIZES.k.operand, SIZES.k.tiles
    SAME, PRECISE = Q_KIND == OPERAND, SIZES.precise_q
    SCALED = OPERAND == "fp16" and Q_KIND != "fp16"
    SHORT, WHOLE = K.dim % 16 == 8, K.dim % 16 == 0
    halves, pack = FLOATS[OPERAND].halves, FLOATS[OPERAND].pack
    SIZE, SECOND = (4 if Q_KIND == "fp32" else 2), (8 if K.bits == 16 else 2)
    DIM, STEP, SWAPPED = K.dim, (2 if K.bits == 16 else 4), K.bits < 16
    to_float, _ = codec("fp16", "float32")
    BF16 = Q_KIND == "bf16"

    @register_jitable
    def pair(address, first):
        """Return elements `first` and the next one of a row."""
        if SIZE == 4:
            a, b = load_global_4(address + 4 * first), load_global_4(address + (4 * first + 4))
            return a.view(np.float32), b.view(np.float32)
        word = load_global_4(address + 2 * first)
        if BF16:
            return unpack_bf16(word)
        return F(to_float(U32(word & U32(0xFFFF)))), F(to_float(U32(word >> U32(16))))

    @register_jitable
    def load_queries(address, to, lane):
        """Write a share of the row of the thread's group at `to`; return the factor of its scores.

        Warps share the products by turns. Each finds the row's largest element.
        """
        factor, back = F(1), F(1)
        if SCALED:
            # Words of positive floats have the order of their values; only the largest one's exponent matters.
            largest, own = U32(0), address + 4 * SIZE * np.int64(lane.place)
            for i in range(2 * TILES):
                at = 16 * (i // 2) + 2 * (i % 2)
                if WHOLE or at + 4 * lane.place < DIM:
                    word = load_global_4(own + SIZE * at)
                    largest = max(largest, U32(word & U32(0x7FFFFFFF)))
                    other = (
                        load_global_4(own + (SIZE * at + 4)) if SIZE == 4 else U32(word << U32(16))
                    )
                    largest = max(largest, U32(other & U32(0x7FFFFFFF)))
            largest = max(largest, shuffle_xor(largest, U32(1)))
            largest = max(largest, shuffle_xor(largest, U32(2)))
            # A power of two brings the largest to 2**14; infinity stays what it is.
            exponent = min(max(U32(largest >> U32(23)), U32(15)), U32(254))
            factor = U32(U32(U32(268) - exponent) << U32(23)).view(np.float32)
            back = U32(U32(exponent - U32(14)) << U32(23)).view(np.float32)
        address += SIZE * (STEP * np.int64(lane.place) + 16 * np.int64(lane.warp))
        to = U32(to + QUERY_BYTES * lane.warp)
        for i in range((TILES + WARPS - 1) // WARPS):
            s, first = lane.warp + WARPS * i, 16 * WARPS * i
            if TILES % WARPS and s >= TILES:
                continue
            one, other, one_low, other_low = U32(0), U32(0), U32(0), U32(0)
            if SAME:
                one = load_global_4(address + 2 * first)
                if not (SHORT and s == TILES - 1):
                    other = load_global_4(address + 2 * (first + SECOND))
                if SWAPPED:
                    one, other = (
                        permute_bytes(one, other, U32(0x5410)),
                        permute_bytes(one, other, U32(0x7632)),
                    )
            else:
                a, b = pair(address, first)
                c, d = F(0), F(0)
                if not (SHORT and s == TILES - 1):
                    c, d = pair(address, first + SECOND)
                if SWAPPED:
                    b, c = c, b
                if PRECISE:
                    one, one_low = halves(factor * a, factor * b)
                    other, other_low = halves(factor * c, factor * d)
                else:
                    one, other = pack(factor * a, factor * b), pack(factor * c, factor * d)
            store_shared_8(U32(to + U32(QUERY_BYTES * WARPS * i)), one, other)
            if PRECISE:
                at = U32(to + U32(QUERY_BYTES * (TILES + WARPS * i)))
                store_shared_8(at, one_low, other_low)
        return back

    return load_queries, SCALED


# ---------------------------------------------------------------- products


def make_reads(two, one):
    """``read(at, chunk), read_one(at, chunk)``: chunks of 16 tokens, of which `at` is the first one's place.

    They load two chunks from `chunk` on, or one, by the instructions `two` and `one`.
    """

    @register_jitable
    def read(at, chunk):
        return two(U32(U32(at ^ U32((chunk % 8) << 4)) + U32(chunk // 8 * BANKS)))

    @register_jitable
    def read_one(at, chunk):
        return one(U32(U32(at ^ U32((chunk % 8) << 4)) + U32(chunk // 8 * BANKS)))

    return read, read_one


def make_scores(SIZES):
    """Make the function that scores a slice: ``K Q^T``."""
    K = SIZES.k
    TILES, BITS, PRECISE = K.tiles, K.bits, SIZES.precise_q
    UNITS = K.padded
    mma = FLOATS[K.operand].mma
    widen = make_widen(K.kind) if BITS == 8 else None
    read, read_one = make_reads(ldmatrix_x4, ldmatrix_x2)

    @register_jitable
    def multiply(a0, a1, a2, a3, b0, b1, c):
        c[0], c[1], c[2], c[3] = mma(a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3])

    @register_jitable
    def add(a0, a1, a2, a3, q, s, c):
        b0, b1 = load_shared_8(U32(q + U32(QUERY_BYTES * s)))
        multiply(a0, a1, a2, a3, b0, b1, c)
        if PRECISE:
            b0, b1 = load_shared_8(U32(q + U32(QUERY_BYTES * (TILES + s))))
            multiply(a0, a1, a2, a3, b0, b1, c)

    @register_jitable
    def clear(c):
        c[0], c[1], c[2], c[3] = F(0), F(0), F(0), F(0)

    if BITS == 16 and TILES % 4 == 0:
        STEPS = TILES // 4
        read_steps = ldmatrix(4, *(BANKS * i for i in range(STEPS)))
        query_steps = load_shared(8, *(4 * QUERY_BYTES * i for i in range(STEPS)))

        @register_jitable
        def scores_in_steps(at, q, c, part, scales, lane):
            clear(c)
            for j in range(4):
                a, b = read_steps(U32(at ^ U32(j << 5))), query_steps(U32(q + U32(QUERY_BYTES * j)))
                for i in range(STEPS):
                    multiply(
                        a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b[2 * i], b[2 * i + 1], c
                    )  # fmt: skip
                if PRECISE:
                    b = query_steps(U32(q + U32(QUERY_BYTES * (TILES + j))))
                    for i in range(STEPS):
                        multiply(
                            a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b[2 * i], b[2 * i + 1], c
                        )  # fmt: skip

        return scores_in_steps
    if BITS == 16:

        @register_jitable
        def scores(at, q, c, part, scales, lane):
            clear(c)
            for s in range(TILES):
                a0, a1, a2, a3 = read(at, 2 * s)
                add(a0, a1, a2, a3, q, s, c)

        return scores
    if BITS == 8:

        @register_jitable
        def scores_of_bytes(at, q, c, part, scales, lane):
            clear(c)
            for s in range(TILES // 2):
                w0, w1, w2, w3 = read(at, 2 * s)
                (a0, a2), (a1, a3) = widen(w0), widen(w1)
                add(a0, a1, a2, a3, q, 2 * s, c)
                (a0, a2), (a1, a3) = widen(w2), widen(w3)
                add(a0, a1, a2, a3, q, 2 * s + 1, c)
            if TILES % 2:
                w0, w1 = read_one(at, TILES - 1)
                (a0, a2), (a1, a3) = widen(w0), widen(w1)
                add(a0, a1, a2, a3, q, TILES - 1, c)

        return scores_of_bytes

    @register_jitable
    def add_group(w0, w1, q, group, word, other, c, part):
        """Add the scaled scores of a group of 32 elements, for tokens g and g + 8 with these words of scales."""
        clear(part)
        twice, twice_other = U32(word * U32(0x10001)), U32(other * U32(0x10001))
        low, high = level_offsets(twice), level_offsets(twice_other)
        a0, a2, b0, b2 = level_words(w0, low, low)
        a1, a3, b1, b3 = level_words(w1, high, high)
        add(a0, a1, a2, a3, q, 2 * group, part)
        add(b0, b1, b2, b3, q, 2 * group + 1, part)
        scale, scale_other = bf16_to_float32(word), bf16_to_float32(other)
        c[0], c[1] = cuda.fma(scale, part[0], c[0]), cuda.fma(scale, part[1], c[1])
        c[2], c[3] = cuda.fma(scale_other, part[2], c[2]), cuda.fma(scale_other, part[3], c[3])

    @register_jitable
    def scores_of_nibbles(at, q, c, part, scales, lane):
        clear(c)
        for i in range(UNITS // 2):
            w0, w1, w2, w3 = read(at, 2 * i)
            words = shuffle(scales[i], U32(lane.group))
            others = shuffle(scales[i], U32(lane.group + 8))
            add_group(
                w0, w1, q, 2 * i, U32(words & U32(0xFFFF)), U32(others & U32(0xFFFF)), c, part
            )
            add_group(w2, w3, q, 2 * i + 1, U32(words >> U32(16)), U32(others >> U32(16)), c, part)
        if UNITS % 2:
            w0, w1 = read_one(at, UNITS - 1)
            words = shuffle(scales[UNITS // 2], U32(lane.group))
            others = shuffle(scales[UNITS // 2], U32(lane.group + 8))
            add_group(w0, w1, q, UNITS - 1, words, others, c, part)

    return scores_of_nibbles


@register_jitable
def times(p, scale):
    """Return a weight times a scale; the scale of a masked token is ignored."""
    return F(p * scale) if p != F(0) else F(0)


def make_weighing(SIZES):
    """Make the functions that arrange weights for a product, and add a product to sums."""
    V, PRECISE = SIZES.v, SIZES.precise_p
    mma, pack, halves, *_ = FLOATS[V.operand]

    @register_jitable
    def add(a0, a1, a2, a3, b, sums, tile):
        n = 4 * tile
        sums[n], sums[n + 1], sums[n + 2], sums[n + 3] = mma(
            a0, a1, a2, a3, b[0], b[1], sums[n], sums[n + 1], sums[n + 2], sums[n + 3]
        )
        if PRECISE:
            sums[n], sums[n + 1], sums[n + 2], sums[n + 3] = mma(
                a0, a1, a2, a3, b[2], b[3], sums[n], sums[n + 1], sums[n + 2], sums[n + 3]
            )

    @register_jitable
    def turn(p0, p1, p2, p3, b):
        """Put weights as the second matrix of a product into `b`; and their second halves."""
        if PRECISE:
            low, low_rest = halves(p0, p1)
            high, high_rest = halves(p2, p3)
            b[2], b[3] = transpose(low_rest), transpose(high_rest)
        else:
            low, high = pack(p0, p1), pack(p2, p3)
        b[0], b[1] = transpose(low), transpose(high)

    return add, turn


def make_sums_of_nibbles(SIZES):
    """`make_sums` of INT4."""
    UNITS = SIZES.v.padded
    add, turn = make_weighing(SIZES)
    read, read_one = make_reads(ldmatrix_x4_trans, ldmatrix_x2_trans)

    @register_jitable
    def add_group(w0, w1, group, p, word, other, offset, offset_other, b, sums):
        """Add 32 columns: weights times the scales of tokens g and g + 8, and levels with the offsets of w0 and w1."""
        s, s_other = bf16_to_float32(word), bf16_to_float32(other)
        turn(times(p[0], s), times(p[1], s), times(p[2], s_other), times(p[3], s_other), b)
        a0, a1, c0, c1 = level_words(w0, offset, offset)
        a2, a3, c2, c3 = level_words(w1, offset_other, offset_other)
        add(a0, a1, a2, a3, b, sums, 2 * group)
        add(c0, c1, c2, c3, b, sums, 2 * group + 1)

    @register_jitable
    def sums_of_nibbles(at, p, b, sums, scales, low, high, ragged, rows, first, lane):
        for i in range((UNITS + 1) // 2):
            word = shuffle(scales[i], U32(lane.group + 16))
            other = shuffle(scales[i], U32(lane.group + 24))
            # For tokens 2t, 2t + 1, 2t + 8 and 2t + 9: two groups each.
            t = U32(16 + 2 * lane.place)
            x, y = shuffle(scales[i], t), shuffle(scales[i], U32(t + U32(1)))
            z, w = shuffle(scales[i], U32(t + U32(8))), shuffle(scales[i], U32(t + U32(9)))
            if 2 * i + 1 < UNITS:
                w0, w1, w2, w3 = read(at, 2 * i)
            else:
                w0, w1 = read_one(at, 2 * i)
                w2, w3 = w0, w1
            add_group(
                w0, w1, 2 * i, p, U32(word & U32(0xFFFF)), U32(other & U32(0xFFFF)),
                level_offsets(permute_bytes(x, y, U32(0x5410))), level_offsets(permute_bytes(z, w, U32(0x5410))),
                b, sums,
            )  # fmt: skip
            if 2 * i + 1 < UNITS:
                add_group(
                    w2, w3, 2 * i + 1, p, U32(word >> U32(16)), U32(other >> U32(16)),
                    level_offsets(permute_bytes(x, y, U32(0x7632))),
                    level_offsets(permute_bytes(z, w, U32(0x7632))), b, sums,
                )  # fmt: skip

    return sums_of_nibbles


def make_sums(SIZES):
    """Make the function that adds a slice's weighted rows of V: ``V^T P^T``."""
    V = SIZES.v
    if V.bits == 4:
        return make_sums_of_nibbles(SIZES)
    TILES, BITS, PRECISE = V.tiles, V.bits, SIZES.precise_p
    INT8 = V.kind == "int8"  # whose rows are finite
    INFINITE, CARRY = (0x7F807F80, 0x00800080) if V.operand == "bf16" else (0x7C007C00, 0x04000400)
    mma = FLOATS[V.operand].mma
    add, turn = make_weighing(SIZES)
    read, read_one = make_reads(ldmatrix_x4_trans, ldmatrix_x2_trans)
    IN_STEPS, STEPS = BITS == 16 and TILES % 4 == 0, max(1, TILES // 4)
    read_steps = ldmatrix(4, *(BANKS * i for i in range(STEPS)), trans=True)
    widen = make_widen(V.kind) if BITS == 8 else None

    @register_jitable
    def operands(at, tile):
        """Load sixteen columns of the slice's rows, as the first matrix of a product."""
        if BITS == 16:
            return read(at, 2 * tile)
        w0, w1 = read_one(at, tile)
        (a0, a1), (a2, a3) = widen(w0), widen(w1)
        return a0, a1, a2, a3

    @register_jitable
    def is_finite(at):
        marks = U32(0)
        for tile in range(TILES):
            a0, a1, a2, a3 = operands(at, tile)
            for a in (a0, a1, a2, a3):
                marks = U32(marks | U32(U32(a & U32(INFINITE)) + U32(CARRY)))
        return not cuda.any_sync(EVERYONE, U32(marks & U32(0x80008000)) != 0)

    @register_jitable
    def add_visible(at, b, sums, rows, first, lane):
        """Add a product of visible tokens for each row; a weight of 0 would not hide a NaN."""
        for row in range(DECODE_ROWS):
            begin, end = rows.begin[row], rows.end[row]
            mask_low, mask_high = U32(0), U32(0)
            for i in range(2):
                token = first + 2 * lane.place + i
                bits = U32(0xFFFF << (16 * i))
                if begin <= token and token < end:
                    mask_low = U32(mask_low | bits)
                if begin <= token + 8 and token + 8 < end:
                    mask_high = U32(mask_high | bits)
            for tile in range(TILES):
                a0, a1, a2, a3 = operands(at, tile)
                a0, a1, a2, a3 = a0 & mask_low, a1 & mask_low, a2 & mask_high, a3 & mask_high
                n = 4 * tile
                d0, d1, d2, d3 = sums[n], sums[n + 1], sums[n + 2], sums[n + 3]
                d0, d1, d2, d3 = mma(U32(a0), U32(a1), U32(a2), U32(a3), b[0], b[1], d0, d1, d2, d3)
                if PRECISE:
                    d0, d1, d2, d3 = mma(
                        U32(a0), U32(a1), U32(a2), U32(a3), b[2], b[3], d0, d1, d2, d3
                    )
                if row == 2 * lane.place:
                    sums[n], sums[n + 2] = d0, d2
                if row == 2 * lane.place + 1:
                    sums[n + 1], sums[n + 3] = d1, d3

    @register_jitable
    def add_slice(at, p, b, sums, scales, low, high, ragged, rows, first, lane):
        if INT8:
            turn(times(p[0], low), times(p[1], low), times(p[2], high), times(p[3], high), b)
        else:
            turn(p[0], p[1], p[2], p[3], b)
        if not INT8 and ragged and not is_finite(at):
            add_visible(at, b, sums, rows, first, lane)
            return
        if IN_STEPS:
            for j in range(4):
                a = read_steps(U32(at ^ U32(j << 5)))
                for i in range(STEPS):
                    add(a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b, sums, 4 * i + j)
        elif BITS == 16:
            for tile in range(TILES):
                a0, a1, a2, a3 = read(at, 2 * tile)
                add(a0, a1, a2, a3, b, sums, tile)
        else:
            for i in range(TILES // 2):
                w0, w1, w2, w3 = read(at, 2 * i)
                (a0, a1), (a2, a3) = widen(w0), widen(w1)
                add(a0, a1, a2, a3, b, sums, 2 * i)
                (a0, a1), (a2, a3) = widen(w2), widen(w3)
                add(a0, a1, a2, a3, b, sums, 2 * i + 1)
            if TILES % 2:
                a0, a1, a2, a3 = operands(at, TILES - 1)
                add(a0, a1, a2, a3, b, sums, TILES - 1)

    return add_slice
