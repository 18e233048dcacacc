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

Liu et al., "KIVI" (arXiv:2402.02750), section 3: keys by channel, in groups of tokens. KIVI stores the minimum with the
scale, and its levels begin there.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.convert import bf16_to_float32, float32_to_bf16

#: Tokens of a group.
TOKENS = 64

_NAN = 0x7FC0


@register_jitable
def _rounded_up(x):
    """The least bfloat16 word that is no less than a float32 from 0 up."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16(np.uint32(bits + np.uint32(0xFFFF)) >> np.uint32(16))


def channel_finder(bits):
    """``find(low, high, finite) -> (scale, zero)``: words, of the extremes of a channel's elements in float32."""
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


def channel_coder(bits):
    """``code(x, scale, zero) -> int32`` of floats in float32: the code of an element."""
    LEAST, LARGEST = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    @register_jitable
    def code(x, scale, zero):
        if not scale > np.float32(0):  # 0 or NaN
            return np.int32(0)
        place = np.float32(np.float32(x - zero) / scale)
        place = min(max(place, np.float32(LEAST)), np.float32(LARGEST))
        whole = np.int32(place)  # towards 0
        return np.int32(whole - np.int32(1)) if place < np.float32(whole) else whole

    return code


@register_jitable
def _level(code, scales, d, dim):
    """Return the value of a code in channel `d` of `dim`, by the scales of its group."""
    step = np.float32(bf16_to_float32(scales[d]) * np.float32(np.float32(code) + np.float32(0.5)))
    return np.float32(step + bf16_to_float32(scales[dim + d]))


@register_jitable
def int8_channel_value(words, scales, d, dim):
    """Element `d` of a stored row, by the scales of its group, float32."""
    return _level(words[d], scales, d, dim)


@register_jitable
def int4_channel_value(words, scales, d, dim):
    """Element `d` of a stored row, by the scales of its group, float32."""
    nibble = np.int32(np.int32(np.int32(words[d // 2]) >> np.int32(4 * (d % 2))) & np.int32(15))
    return _level(np.int32(nibble - np.int32(8)), scales, d, dim)


@register_jitable
def load_int8_channel(words, scales, out):
    """Put the values of a stored row into `out`."""
    dim = len(scales) // 2
    for d in range(len(out)):
        out[d] = int8_channel_value(words, scales, d, dim)


@register_jitable
def load_int4_channel(words, scales, out):
    """Put the values of a stored row into `out`."""
    dim = len(scales) // 2
    for d in range(len(out)):
        out[d] = int4_channel_value(words, scales, d, dim)


def channel_storer(bits, load):
    """Make the function that quantises one channel of a token group, or two with 4 bits, which share bytes.

    Parameters
    ----------
    bits : {8, 4}
        Bits of a code.
    load : function
        ``load(word) -> float32``, of the words of the rows.

    Returns
    -------
    function
        ``store(rows, codes, scales, d)`` quantises channel `d` of the rows ``(64, D)``; with 4 bits channels `d` and
        ``d + 1``, where `d` is even. It writes their codes ``(64, D or D / 2)`` and the group's scales ``(2 * D,)``.
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

    return store
