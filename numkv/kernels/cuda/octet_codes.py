"""Rows of octets into a pool, for every kind: the scales and codes of those that are quantised, between lanes.

What a row has in common, its largest magnitude or the ends of a group, goes between its lanes by shuffles; see
`numkv.kernels.cuda.octets` for what a lane has.

**Codes without divisions.** A row's scale is inverted once. ``q = x * r`` is then mended by what is left,
``q + (x - q * scale) * r``, each in one rounding: that is the quotient rounded to nearest wherever a code depends on
it, by trying all 2**23 significands of a scale with the four floats next to each of its 128 ties, and for the scales of
INT4, of eight bits, everywhere (Markstein, "Computation of elementary functions on the IBM RISC System/6000
processor", IBM J. Res. Dev. 34, 1990). Rows of tiny or infinite scales are divided.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.instructions import permute_bytes, shuffle_xor, shuffle_xor_float
from numkv.kernels.cuda.instructions.scalars import (
    fma_to_zero,
    greater_float,
    load_global_float,
    smaller_float,
    store_global,
    store_global_8,
)
from numkv.kernels.cuda.octets import ELEMENTS, bytes_of, octet_storer
from numkv.kinds import kind as kind_of
from numkv.rows.convert import bf16_to_float32
from numkv.rows.int4 import LOWEST, OFFSETS, lowest_level
from numkv.rows.quantize import int8_code, int8_scale

__all__ = ["magnitude", "row_putter"]

_INFINITY = 0x7F800000
# Scales from here to infinity, without it, are inverted.
_LEAST = 7.9e-31


@register_jitable
def magnitude(x):
    """The bits of the largest magnitude among a lane's elements, as a float32; those of NaN are above infinity's."""
    largest = np.uint32(0)
    for i in range(ELEMENTS):
        largest = max(largest, np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    return largest


@register_jitable
def _of_row(largest, lanes):
    """The largest word among those of a row's lanes."""
    step = np.uint32(lanes) >> np.uint32(1)
    while step > np.uint32(0):
        largest = max(largest, shuffle_xor(largest, np.uint32(step)))
        step = np.uint32(np.uint32(step) >> np.uint32(1))
    return np.uint32(largest)


@register_jitable
def _quotient(x, divisor, inverse):
    """``x / divisor`` as it is rounded to nearest, from the divisor's inverse; see the head of this file."""
    q = np.float32(x * inverse)
    return cuda.fma(cuda.fma(np.float32(-q), divisor, x), inverse, q)


@register_jitable
def _four_codes(x, at, scale, inverse):
    """Four INT8 codes as a word."""
    middle = np.float32(
        12582912.0
    )  # 1.5 * 2**23: the nearest integer is in the last byte of the sum
    a = np.float32(_quotient(np.float32(x[at]), scale, inverse) + middle).view(np.uint32)
    b = np.float32(_quotient(np.float32(x[at + 1]), scale, inverse) + middle).view(np.uint32)
    c = np.float32(_quotient(np.float32(x[at + 2]), scale, inverse) + middle).view(np.uint32)
    d = np.float32(_quotient(np.float32(x[at + 3]), scale, inverse) + middle).view(np.uint32)
    which = np.uint32(0x0040)
    return permute_bytes(permute_bytes(a, b, which), permute_bytes(c, d, which), np.uint32(0x5410))


@register_jitable
def _four_divided(x, at, scale):
    word = np.uint32(0)
    for i in range(4):
        byte = np.uint32(np.uint8(int8_code(np.float32(x[at + i]), scale)))
        word = np.uint32(word | np.uint32(byte << np.uint32(8 * i)))
    return word


def row_putter(KIND, COMPUTE="float32"):
    """The function by which the lanes of a row store it.

    Parameters
    ----------
    KIND : str
        Kind of the pool.
    COMPUTE : {"float32", "float64"}
        What the floats of a row are.

    Returns
    -------
    function
        ``put(x, octets, have, lanes, to, largest, look)``: of all lanes of a warp together. A lane has `octets`, a pair
        of numbers, as floats in ``x``; those that are not there, by the flags `have`, are zeros. `to` are the address
        of the row's words, that of its scale, or of its head's, and the step between scales of groups. `largest` is
        what `magnitude` says, or more; with `look` above 0 a row with something not finite is stored as zeros. It
        returns whether that was so.
    """
    if KIND == "int8":
        return _put_int8
    if KIND == "int4":
        return _put_int4
    SIZE, store, SCALED = bytes_of(KIND), octet_storer(KIND), kind_of(KIND).scales_per == "head"

    @register_jitable
    def put(x, octets, have, lanes, to, largest, look):
        scale = np.float32(1)
        if SCALED and have[0]:
            scale = load_global_float(to[1])
        if have[0]:
            store(x, 0, to[0] + np.int64(octets[0]) * np.int64(SIZE), scale)
        if have[1]:
            store(x, 8, to[0] + np.int64(octets[1]) * np.int64(SIZE), scale)
        return False

    return put


@register_jitable
def _put_int8(x, octets, have, lanes, to, largest, look):
    if look <= 0 and largest > np.uint32(_INFINITY):  # a NaN counts as 0
        largest = np.uint32(0)
        for i in range(ELEMENTS):
            of = np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7FFFFFFF))
            if of <= np.uint32(_INFINITY):
                largest = max(largest, of)
    whole = _of_row(largest, lanes)
    bad = look > 0 and whole >= np.uint32(_INFINITY)
    scale = np.float32(0) if bad else int8_scale(np.uint32(whole).view(np.float32))
    inverse = np.float32(1) / scale
    inverts = scale >= np.float32(_LEAST) and scale < np.float32(np.inf)
    a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    if inverts:
        a, b = _four_codes(x, 0, scale, inverse), _four_codes(x, 4, scale, inverse)
        c, d = _four_codes(x, 8, scale, inverse), _four_codes(x, 12, scale, inverse)
    elif not bad:
        a, b = _four_divided(x, 0, scale), _four_divided(x, 4, scale)
        c, d = _four_divided(x, 8, scale), _four_divided(x, 12, scale)
    if have[0]:
        store_global_8(to[0] + np.int64(octets[0]) * np.int64(8), a, b)
    if have[1]:
        store_global_8(to[0] + np.int64(octets[1]) * np.int64(8), c, d)
    if have[0] and octets[0] == 0:
        store_global(to[1], scale)
    return bad


# ---------------------------------------------------------------- INT4: see `numkv.rows.int4` for what is computed


@register_jitable
def _place(x, scale, inverse, lowest, boost):
    """The code of an element in the last bits of a float, 2**23 above it."""
    q = _quotient(np.float32(x * boost), scale, inverse)
    place = np.float32(np.float32(q - lowest) + np.float32(0.5))
    place = smaller_float(greater_float(place, np.float32(0)), np.float32(15))
    return q, fma_to_zero(place, np.float32(1), np.float32(8388608.0))


@register_jitable
def _group_error(x, at, scale, inverse, lowest, boost):
    """The squared error of an octet, in units of ``(scale / 512)**2``: integers, so that order makes no difference."""
    total = np.float32(0)
    for i in range(8):
        q, code = _place(np.float32(x[at + i]), scale, inverse, lowest, boost)
        level = np.float32(np.float32(code - np.float32(8388608.0)) + lowest)
        off = np.float32(abs(np.float32(q - level)))
        error = np.float32(
            fma_to_zero(off, np.float32(512), np.float32(8388608.0)) - np.float32(8388608.0)
        )
        total = cuda.fma(error, error, total)  # below 2**24: exact
    return np.uint32(total)


@register_jitable
def _word_near(x, offset):
    bits = np.int32(np.float32(x).view(np.int32) - np.int32(offset * np.int32(1 << 16)))
    unit = np.int32(OFFSETS << 16)
    eighths = np.int32(np.int32(bits + np.int32(OFFSETS << 15)) >> np.int32(19))
    return np.uint16(np.int32(eighths * np.int32(unit >> 16)) + offset)


@register_jitable
def _quad_word(x, at):
    """The word of the scale of a group of which this lane and three others have an octet each.

    And what elements and scale are multiplied by before they are divided, so that nothing is lost to underflow.
    """
    low = high = np.float32(x[at])
    bad = np.float32(0)
    for i in range(8):
        value = np.float32(x[at + i])
        low, high = smaller_float(low, value), greater_float(high, value)
        bad = cuda.fma(value, np.float32(0), bad)  # NaN from what is not finite on
    for step in (1, 2):
        low = smaller_float(low, shuffle_xor_float(low, np.uint32(step)))
        high = greater_float(high, shuffle_xor_float(high, np.uint32(step)))
        bad = np.float32(bad + shuffle_xor_float(bad, np.uint32(step)))
    span = np.float32(np.float32(high / np.float32(15)) - np.float32(low / np.float32(15)))
    reach = np.float32(greater_float(high, np.float32(-low)) / np.float32(-LOWEST))
    widest = greater_float(span, reach)
    boost = np.float32(2.0**64) if widest < np.float32(2.0**-60) else np.float32(1)
    best, least = np.uint16(0), np.float32(np.inf)
    for i in range(3):
        step = np.float32(widest * np.float32(np.float32(23 + i) / np.float32(25)))
        middle = np.float32(np.float32(high / step) + np.float32(low / step))
        middle = np.float32(middle + np.float32(OFFSETS // 2))
        offset = np.int32(
            smaller_float(greater_float(middle, np.float32(0)), np.float32(OFFSETS - 1))
        )
        word = _word_near(step, offset)
        scale = bf16_to_float32(word)
        unit = np.float32(scale / widest)
        scaled = np.float32(scale * boost)
        inverse = np.float32(np.float32(1) / scaled)
        total = _group_error(x, at, scaled, inverse, lowest_level(word), boost)
        total = np.uint32(total + shuffle_xor(total, np.uint32(1)))
        total = np.uint32(total + shuffle_xor(total, np.uint32(2)))
        error = np.float32(np.float32(np.float32(total) * unit) * unit)
        if error < least and step >= np.float32(2.0**-123):
            best, least = word, error
    return (np.uint16(0x7FC0) if bad != bad else best), boost


@register_jitable
def _put_quad(x, at, octet, have, to, bad):
    """Store an octet of INT4, together with the other three lanes of its group."""
    word, boost = _quad_word(x, at)
    if bad:
        word = np.uint16(0)
    scale, lowest = np.float32(bf16_to_float32(word) * boost), lowest_level(word)
    inverse = np.float32(np.float32(1) / scale)
    # Chosen, not branched to, as the lanes meet next. Where the scale is 0 or NaN, the last codes give +0.
    low = _four_places(x, at, scale, inverse, lowest, boost)
    high = _four_places(x, at + 4, scale, inverse, lowest, boost)
    low = low if scale > np.float32(0) else np.uint32(0x0F0F0F0F)
    high = high if scale > np.float32(0) else np.uint32(0x0F0F0F0F)
    other_low, other_high = shuffle_xor(low, np.uint32(2)), shuffle_xor(high, np.uint32(2))
    of_group = np.int64(octet & 3)
    if have and of_group < 2:
        group = np.int64(octet >> 2)
        store_global_8(
            to[0] + group * np.int64(16) + of_group * np.int64(8),
            np.uint32(low | np.uint32(other_low << np.uint32(4))),
            np.uint32(high | np.uint32(other_high << np.uint32(4))),
        )  # fmt: skip
        if of_group == 0:
            store_global(to[1] + group * to[2], np.uint16(word))


@register_jitable
def _four_places(x, at, scale, inverse, lowest, boost):
    """Four INT4 codes as the bytes of a word."""
    _, a = _place(np.float32(x[at]), scale, inverse, lowest, boost)
    _, b = _place(np.float32(x[at + 1]), scale, inverse, lowest, boost)
    _, c = _place(np.float32(x[at + 2]), scale, inverse, lowest, boost)
    _, d = _place(np.float32(x[at + 3]), scale, inverse, lowest, boost)
    which = np.uint32(0x0040)
    low = permute_bytes(a.view(np.uint32), b.view(np.uint32), which)
    high = permute_bytes(c.view(np.uint32), d.view(np.uint32), which)
    return permute_bytes(low, high, np.uint32(0x5410))


@register_jitable
def _put_int4(x, octets, have, lanes, to, largest, look):
    bad = False
    if look > 0:  # the same for all
        bad = _of_row(largest, lanes) >= np.uint32(_INFINITY)
    _put_quad(x, 0, octets[0], have[0], to, bad)
    _put_quad(x, 8, octets[1], have[1], to, bad)
    return bad
