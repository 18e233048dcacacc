"""One row to INT4 codes and scales, and back: groups of 32 elements, each with a scale of its own.

``value = (code - 7.5) * scale`` with codes 0 to 15: sixteen levels, none of them 0, the outermost at ``±7.5 * scale``.
The scale of a group is a bfloat16, whose range is that of float32; that is 4.5 bits an element where `head_dim` is a
multiple of 32. Of the scales ``f * max(|x|) / 7.5`` with f = 0.7, 0.8, 0.9 and 1 the one with the least squared error
is taken, the smallest of equals: what is clipped at the ends is won back in the middle. Elements within
``8 * scale`` are off by at most ``scale / 2``, others by ``|x| - 7.5 * scale``. A group of zeros has scale 0; one with
NaN or infinity has scale NaN.

A group takes 16 bytes: byte j holds element j in its low and element j + 16 in its high nibble. The last group of a row
may be shorter; of n elements, n even, byte j holds element j and element ``j + n / 2``.

Squared errors are summed as integers, so that their order makes no difference: all targets find the same scales.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.convert import bf16_to_float32, float32_to_bf16

__all__ = [
    "GROUP",
    "int4_code",
    "int4_column",
    "int4_scale",
    "int4_value",
    "load_int4",
    "store_int4",
    "store_int4_group",
]

#: Elements of a group.
GROUP = 32

_NAN = 0x7FC0
_CANDIDATES = 4


@register_jitable
def int4_code(x, scale):
    """The code of a float32 `x`: the nearest level's, or the outermost one's. The scale is not 0."""
    place = np.float32(np.float32(x / scale) + np.float32(8))
    return np.int32(min(max(place, np.float32(0)), np.float32(15)))


@register_jitable
def _squared_error(x, first, count, scale):
    """The squared error of a group under a scale, in units of ``(scale / 512)**2``."""
    total = np.int32(0)
    for i in range(count):
        value = np.float32(x[first + i])
        level = np.float32(np.float32(int4_code(value, scale)) - np.float32(7.5))
        error = np.int32(
            np.float32(np.float32(np.float32(value / scale) - level) * np.float32(512))
        )
        # At most 32 squares of 4400, even where a subnormal scale has lost its last digits.
        total = np.int32(total + np.int32(error * error))
    return total


@register_jitable
def int4_scale(x, first, count):
    """The scale of the group ``x[first : first + count]``, a bfloat16 word."""
    bits = np.uint32(0)  # of the largest magnitude; those of NaN are above those of infinity
    for i in range(count):
        magnitude = np.uint32(np.float32(x[first + i]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        bits = max(bits, magnitude)
    if bits >= np.uint32(0x7F800000):
        return np.uint16(_NAN)
    largest = np.uint32(bits).view(np.float32)
    step = np.float32(largest / np.float32(75))
    best, least = np.uint16(0), np.float32(np.inf)
    for i in range(_CANDIDATES):
        word = float32_to_bf16(np.float32(step * np.float32(7 + i)))
        if word == 0:
            continue
        scale = bf16_to_float32(word)
        # Relative to the group, so that tiny errors do not vanish when they are squared.
        unit = np.float32(scale / largest)
        error = np.float32(_squared_error(x, first, count, scale))
        error = np.float32(np.float32(error * unit) * unit)
        if error < least:
            best, least = word, error
    return best


@register_jitable
def store_int4_group(x, first, count, words, at):
    """Put the group ``x[first : first + count]`` into ``words[at : at + count // 2]``, and return its scale's word."""
    word = int4_scale(x, first, count)
    scale, half = bf16_to_float32(word), count // 2
    if scale > np.float32(0):
        for j in range(half):
            low = int4_code(np.float32(x[first + j]), scale)
            high = int4_code(np.float32(x[first + half + j]), scale)
            words[at + j] = np.uint8(np.int32(low + np.int32(high * np.int32(16))))
    else:  # 0 or NaN: the codes do not matter; these give +0
        for j in range(half):
            words[at + j] = np.uint8(0x88)
    return word


@register_jitable
def store_int4(x, words, scales):
    """Put a row of floats into its bytes and its groups' scales."""
    for group in range(len(scales)):
        first = group * GROUP
        count = min(GROUP, len(x) - first)
        scales[group] = store_int4_group(x, first, count, words, first // 2)


@register_jitable
def int4_column(byte, upper, dim):
    """Which element of a row of `dim` lies in a byte's lower or `upper` nibble; `dim` for bytes past the row's end."""
    if 2 * byte >= dim:
        return dim
    first = byte // (GROUP // 2) * GROUP
    column = first + byte % (GROUP // 2)
    return column + min(GROUP, dim - first) // 2 if upper else column


@register_jitable
def int4_value(words, scales, d, dim):
    """Element `d` of a stored row of `dim`, float32."""
    group, i = d // GROUP, d % GROUP
    half = min(GROUP, dim - group * GROUP) // 2
    byte = np.int32(words[group * (GROUP // 2) + i % half])
    code = np.int32(byte & np.int32(15)) if i < half else np.int32(byte >> np.int32(4))
    level = np.float32(np.float32(code) - np.float32(7.5))
    return np.float32(level * bf16_to_float32(scales[group]))


@register_jitable
def load_int4(words, scales, out):
    """Put the values of a stored row into `out`."""
    dim = len(out)
    for d in range(dim):
        out[d] = int4_value(words, scales, d, dim)
