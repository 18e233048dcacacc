"""One row to 4-bit codes of a codebook and a scale, and back.

``value = scale * level`` with the levels ±5, ±15, ±25, ±36, ±48, ±62, ±79 and ±104. They are the levels with the least
squared error for normal numbers (from `numkv.compression.codebook`), times a factor and rounded. The factor is the best
of those that keep levels in 8 bits: rounding costs 0.1 % more squared error. `numkv.rows.codebook` describes how a
row's scale is found.

A code has the number of the magnitude, 0 to 7, in its lower three bits, and the sign in the fourth. Byte j of a row
holds element 2 j in its low and element 2 j + 1 in its high nibble.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.codebook import as_it_is, places_in_1, scale_finder, sign_finder, sixteenths_finder

#: Magnitudes of levels, in rising order.
LEVELS = (5, 15, 25, 36, 48, 62, 79, 104)
#: From where on a magnitude belongs to the level above: halfway between levels.
EDGES = (10.0, 20.0, 30.5, 42.0, 55.0, 70.5, 91.5)

# The magnitudes, a byte each.
_TABLE = sum(level << 8 * i for i, level in enumerate(LEVELS))
#: The scale that fits normal numbers of mean square 1: the largest level of Lloyd and Max is 2.733.
OF_NORMAL = 2.733 / LEVELS[-1]


@register_jitable
def code4_level(code):
    """The level of a code, int32."""
    magnitude = np.int32((np.uint64(_TABLE) >> np.uint64(8 * (code & 7))) & np.uint64(255))
    return np.int32(-magnitude) if code & 8 else magnitude


@register_jitable
def _above(x, edge, step):
    """`step` where sixteenths have reached an edge, else 0."""
    return np.int32(step) if x >= np.int32(16 * edge) else np.int32(0)


# Sums of choices, not a search or a table: so loops over a row become vector code.


@register_jitable
def _number(x):
    """Return the number of the level nearest to a magnitude, in sixteenths of the scale."""
    low = _above(x, EDGES[0], 1) + _above(x, EDGES[1], 1) + _above(x, EDGES[2], 1)
    return np.int32(
        low
        + _above(x, EDGES[3], 1)
        + _above(x, EDGES[4], 1)
        + _above(x, EDGES[5], 1)
        + _above(x, EDGES[6], 1)
    )


@register_jitable
def _nearest(x):
    """The level nearest to a magnitude, in sixteenths of the scale."""
    low = np.int32(5) + _above(x, EDGES[0], 10) + _above(x, EDGES[1], 10) + _above(x, EDGES[2], 11)
    return np.int32(
        low
        + _above(x, EDGES[3], 12)
        + _above(x, EDGES[4], 14)
        + _above(x, EDGES[5], 17)
        + _above(x, EDGES[6], 25)
    )


def code4_store(load):
    """Make the function that stores a row: ``store(x, words) -> scale``; `load` turns elements of `x` into floats."""
    scale_of = scale_finder(load, _nearest, LEVELS[-1], OF_NORMAL)
    sixteenths, has_sign = sixteenths_finder(load), sign_finder(load)

    @register_jitable
    def code(x, in_1):
        sign = np.int32(8) if has_sign(x) else np.int32(0)
        return np.int32(_number(sixteenths(x, in_1)) + sign)

    @register_jitable
    def store(x, words):
        scale = scale_of(x)
        if scale > np.float32(0):
            in_1 = places_in_1(scale)
            for j in range(len(x) // 2):
                low, high = code(x[2 * j], in_1), code(x[2 * j + 1], in_1)
                words[j] = np.uint8(np.int32(low + np.int32(high * np.int32(16))))
        else:  # 0 or NaN: the codes do not matter
            for j in range(len(x) // 2):
                words[j] = np.uint8(0)
        return scale

    return store


_store = code4_store(as_it_is)


@register_jitable
def store_code4(x, words, scales):
    """Put a row of floats into its bytes and its scale."""
    scales[0] = _store(x, words)


@register_jitable
def code4_value(words, scales, d, dim):
    """Element `d` of a stored row, float32."""
    code = np.int32(np.int32(words[d // 2]) >> np.int32(4 * (d % 2)))
    return np.float32(np.float32(code4_level(code)) * scales[0])


@register_jitable
def load_code4(words, scales, out):
    """Put the values of a stored row, or of its first elements, into `out`."""
    for d in range(len(out)):
        out[d] = code4_value(words, scales, d, len(out))
