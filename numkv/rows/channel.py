"""Keys of 64 tokens to codes by channel, and back: a scale and a zero point for each channel of a token group.

Outlier *channels* of keys (biases of Qwen2, norm weights of others) then cost the other channels nothing, as no two
channels share a scale. For each channel of a group, in float32, from its smallest and largest element::

    zero  = bf16(smallest / 2 + largest / 2), to nearest even
    half  = max(largest - zero, zero - smallest)
    scale = half / 127.5 (4 bits: half / 7.5), as bf16, rounded up
    code  = floor((x - zero) / scale), from -128 to 127 (4 bits: -8 to 7)
    value = zero + scale * (code + 1/2)

So levels are at half steps, and all of them are used. An element is off by at most ``scale / 2``, up to rounding. A
channel with a single value has scale 0, and its values are the zero point. A channel with NaN or infinity has scale NaN
and zero point 0. Scales that overflow bf16 count as infinite.

The scales of a group are D words of bf16, then D zero points. Codes of 8 bits are int8. With 4 bits, byte j has element
2 j in its low and element 2 j + 1 in its high nibble, each 8 more than the code.

A kind may give the F channels with the largest scales (of equal ones the first) a second code, which divides their
steps by 16. With ``place = (x - zero) / scale``::

    both  = floor(16 * place), from -128 to 127
    code  = floor(both / 16)           as before
    fine  = both - 16 * code           from 0 to 15
    value = zero + scale * (code + (fine + 1/2) / 16)

The numbers of these channels come after the zero points, as integers that rise. Their second codes come after the D
codes of a row: nibbles without an offset. So a row is one of D + F elements whose last F share a channel with another.

Liu et al., "KIVI" (arXiv:2402.02750), section 3: keys by channel, in groups of tokens. KIVI stores the minimum with the
scale, and its levels begin there.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.convert import bf16_to_float32, float32_to_bf16

#: Tokens of a group.
TOKENS = 64
#: Parts into which a second code divides a step.
FINE = 16

_NAN = 0x7FC0


@register_jitable
def _rounded_up(x):
    """Return the least bfloat16 word that is no less than a float32 from 0 up."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16(np.uint32(bits + np.uint32(0xFFFF)) >> np.uint32(16))


def channel_finder(bits):
    """Make ``find(low, high, finite) -> (scale, zero)``: words, of a channel's extremes in float32."""
    HALF_LEVELS = 2.0 ** (bits - 1) - 0.5

    @register_jitable
    def find(low, high, finite):
        # Adding 0 makes the two zeros one.
        middle = np.float32(np.float32(low * np.float32(0.5)) + np.float32(high * np.float32(0.5)))
        zero = float32_to_bf16(np.float32(middle + np.float32(0)))
        at = bf16_to_float32(zero)
        half = np.float32(max(np.float32(high - at), np.float32(at - low)) + np.float32(0))
        if not finite or not half <= np.float32(3.0e38):
            return np.uint16(_NAN), np.uint16(0)
        return _rounded_up(np.float32(half / np.float32(HALF_LEVELS))), zero

    return find


@register_jitable
def _place(x, scale, zero):
    """Return an element's place among the levels: 0 in a channel of one value, or without a scale."""
    if not scale > np.float32(0):  # 0 or NaN
        return np.float32(0)
    return np.float32(np.float32(x - zero) / scale)


def _floor_within(least, largest):
    """Make ``floor(x) -> int32`` of a float32, from `least` to `largest`."""

    @register_jitable
    def floor(x):
        x = min(max(x, np.float32(least)), np.float32(largest))
        whole = np.int32(x)  # towards 0
        return np.int32(whole - np.int32(1)) if x < np.float32(whole) else whole

    return floor


def channel_coder(bits):
    """Make ``code(x, scale, zero) -> int32`` of floats in float32: the code of an element."""
    floor = _floor_within(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    @register_jitable
    def code(x, scale, zero):
        return floor(_place(x, scale, zero))

    return code


_floor_of_both = _floor_within(-128, 127)


@register_jitable
def fine_code(x, scale, zero):
    """Return the second code of an element in 4 bits, an int32 from 0 to 15."""
    both = _floor_of_both(np.float32(_place(x, scale, zero) * np.float32(FINE)))
    return np.int32(both & np.int32(FINE - 1))


@register_jitable
def put_widest(scales, dim):
    """Write the rising numbers of the channels with the largest scales after the zero points of a group."""
    count = len(scales) - 2 * dim
    before, last = np.int64(_NAN), np.int64(-1)
    for f in range(count):
        largest, at = np.int64(-2), np.int64(0)
        for d in range(dim):
            word = np.int64(scales[d])  # in the order of the floats
            if word >= np.int64(_NAN):
                word = np.int64(-1)
            if (word < before or (word == before and d > last)) and word > largest:
                largest, at = word, np.int64(d)
        before, last = largest, at
        i = f
        while i > 0 and np.int64(scales[2 * dim + i - 1]) > at:
            scales[2 * dim + i] = scales[2 * dim + i - 1]
            i -= 1
        scales[2 * dim + i] = np.uint16(at)


def channel_loader(bits, fine):
    """Make the functions that load rows and elements by the scales of their group.

    Parameters
    ----------
    bits : {8, 4}
        Bits of a code.
    fine : int
        Channels with a second code.

    Returns
    -------
    load, value : function
        ``load(words, scales, out)`` puts as many values of a stored row as `out` has elements there; ``value(words,
        scales, d, dim)`` gives element `d` of a row of `dim`. Both are float32.
    """

    @register_jitable
    def code_at(words, i):
        if bits == 8:
            return np.int32(words[i])
        byte = np.int32(words[i // 2])
        return np.int32(
            np.int32(np.int32(byte >> np.int32(4 * (i % 2))) & np.int32(15)) - np.int32(8)
        )

    @register_jitable
    def level(place, scales, d, dim):
        step = np.float32(bf16_to_float32(scales[d]) * place)
        return np.float32(step + bf16_to_float32(scales[dim + d]))

    @register_jitable
    def coarse(words, scales, d, dim):
        return level(np.float32(np.float32(code_at(words, d)) + np.float32(0.5)), scales, d, dim)

    @register_jitable
    def refined(words, scales, d, f, dim):
        both = np.int32(code_at(words, d) * np.int32(FINE) + code_at(words, dim + f) + np.int32(8))
        place = np.float32(np.float32(np.float32(both) + np.float32(0.5)) * np.float32(1 / FINE))
        return level(place, scales, d, dim)

    @register_jitable
    def load(words, scales, out):
        dim = (len(scales) - fine) // 2
        for d in range(len(out)):
            out[d] = coarse(words, scales, d, dim)
        for f in range(fine):
            d = np.int64(scales[2 * dim + f])
            if d < len(out):
                out[d] = refined(words, scales, d, f, dim)

    @register_jitable
    def value(words, scales, d, dim):
        for f in range(fine):
            if np.int64(scales[2 * dim + f]) == d:
                return refined(words, scales, d, f, dim)
        return coarse(words, scales, d, dim)

    return load, value


def channel_storer(bits, load):
    """Make the functions that quantise one channel of a token group, or two with 4 bits, which share bytes.

    Parameters
    ----------
    bits : {8, 4}
        Bits of a code.
    load : function
        ``load(word) -> float32``, of the words of the rows.

    Returns
    -------
    store, store_fine : function
        ``store(rows, codes, scales, d)`` quantises channel `d` of the rows ``(64, D)``; with 4 bits channels `d` and
        ``d + 1``, where `d` is even. It writes their codes and the group's scales. ``store_fine(rows, codes, scales,
        f)`` writes the second codes of two channels: those that `put_widest` has put at `f` and ``f + 1``, where `f` is
        even.
    """
    find, code_of, EACH = channel_finder(bits), channel_coder(bits), 8 // bits

    @register_jitable
    def scale_channel(rows, scales, d):
        low = high = np.float32(load(rows[0, d]))
        finite = True
        for t in range(TOKENS):
            x = np.float32(load(rows[t, d]))
            low, high = min(low, x), max(high, x)
            finite = finite and x - x == np.float32(0)
        scales[d], scales[rows.shape[1] + d] = find(low, high, finite)

    @register_jitable
    def store(rows, codes, scales, d):
        dim = rows.shape[1]
        for i in range(EACH):
            scale_channel(rows, scales, d + i)
        scale, zero = bf16_to_float32(scales[d]), bf16_to_float32(scales[dim + d])
        last = d + EACH - 1
        next_scale, next_zero = bf16_to_float32(scales[last]), bf16_to_float32(scales[dim + last])
        for t in range(TOKENS):
            code = code_of(np.float32(load(rows[t, d])), scale, zero)
            if EACH == 1:
                codes[t, d] = np.int8(code)
            else:
                high = code_of(np.float32(load(rows[t, last])), next_scale, next_zero)
                both = np.int32(
                    np.int32(code + np.int32(8))
                    + np.int32(np.int32(high + np.int32(8)) * np.int32(16))
                )
                codes[t, d // 2] = np.uint8(both)

    @register_jitable
    def store_fine(rows, codes, scales, f):
        dim = rows.shape[1]
        a, b = np.int64(scales[2 * dim + f]), np.int64(scales[2 * dim + f + 1])
        scale, zero = bf16_to_float32(scales[a]), bf16_to_float32(scales[dim + a])
        next_scale, next_zero = bf16_to_float32(scales[b]), bf16_to_float32(scales[dim + b])
        for t in range(TOKENS):
            low = fine_code(np.float32(load(rows[t, a])), scale, zero)
            high = fine_code(np.float32(load(rows[t, b])), next_scale, next_zero)
            codes[t, (dim + f) // 2] = np.uint8(np.int32(low + np.int32(high * np.int32(16))))

    return store, store_fine
