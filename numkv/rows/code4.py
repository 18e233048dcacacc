"""One row to 4-bit codes of a codebook and a scale, and back.

``value = scale * level`` with the levels ±5, ±15, ±25, ±36, ±48, ±62, ±79 and ±104. Those are the levels with the least
squared error for normal numbers (Lloyd, 1957; Max, 1960; `numkv.compression.codebook` computes them), times a factor
and rounded. Of the factors that keep them in 8 bits it is the one that loses least: rounding costs 0.1 % more squared
error. As levels are INT8, so is a row of codes after a look into a table, and attention multiplies it as one.

Elements of a row are normal numbers once it has been multiplied by a random rotation (Zandieh et al., "TurboQuant",
arXiv:2504.19874, section 3.1), which is what pools with ``rotate=True`` do. Rows as models make them have outliers.

The scale of a row is a float32. Of three that are tried, what fits normal numbers of the row's mean square, what
reaches the row's largest element, and the mean of both, the one with the least squared error is taken, the first of
equals; it is replaced by ``sum(x * level) / sum(level ** 2)``, the best for the levels that it chose (least squares),
and codes are those of the levels that are then nearest. A row below 1e-30 is stored as zeros, with scale 0; one with
NaN or infinity has scale NaN.

A code has the number of the magnitude, 0 to 7, in its lower three bits, and the sign in the fourth. Byte j of a row
holds element 2 j in its low and element 2 j + 1 in its high nibble.

What is added up are integers, so that their order makes no difference: all targets find the same words.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

__all__ = [
    "EDGES",
    "LEVELS",
    "code4_level",
    "code4_store",
    "code4_value",
    "load_code4",
    "store_code4",
]

#: Magnitudes of levels, in rising order.
LEVELS = (5, 15, 25, 36, 48, 62, 79, 104)
#: From where on a magnitude belongs to the level above: halfway between levels.
EDGES = (10.0, 20.0, 30.5, 42.0, 55.0, 70.5, 91.5)

# The magnitudes, a byte each.
_TABLE = sum(level << 8 * i for i, level in enumerate(LEVELS))
# The scale that fits normal numbers of mean square 1: the largest level of Lloyd and Max is 2.733.
_OF_NORMAL = 2.733 / LEVELS[-1]
_TINY, _NOT_FINITE = 1e-30, 0x7F800000


@register_jitable
def code4_level(code):
    """The level of a code, int32."""
    magnitude = np.int32((np.uint64(_TABLE) >> np.uint64(8 * (code & 7))) & np.uint64(255))
    return np.int32(-magnitude) if code & 8 else magnitude


@register_jitable
def _above(x, edge, step):
    """`step` where `x` has reached an edge, else 0."""
    return np.int32(step) if x >= np.float32(edge) else np.int32(0)


# Sums of choices, not a search or a table: so loops over a row become vector code.


@register_jitable
def _number(x):
    """The number of the level nearest to a magnitude, in units of the scale."""
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
    """The level nearest to a magnitude, in units of the scale."""
    low = np.int32(5) + _above(x, EDGES[0], 10) + _above(x, EDGES[1], 10) + _above(x, EDGES[2], 11)
    return np.int32(
        low
        + _above(x, EDGES[3], 12)
        + _above(x, EDGES[4], 14)
        + _above(x, EDGES[5], 17)
        + _above(x, EDGES[6], 25)
    )


def code4_store(load):
    """The function that stores a row: ``store(x, words) -> scale``, of words that `load` turns into floats."""

    @register_jitable
    def magnitude(x, scale):
        return np.float32(abs(np.float32(np.float32(load(x)) / scale)))

    @register_jitable
    def mean_square(x, largest):
        """The mean square of a row, in units of the largest magnitude's square."""
        total = np.int64(0)
        for d in range(len(x)):
            part = np.int32(magnitude(x[d], largest) * np.float32(32767))
            total += np.int64(np.int32(part * part))
        return np.float32(
            np.float32(total) / np.float32(np.float32(len(x)) * np.float32(32767.0**2))
        )

    @register_jitable
    def squared_error(x, scale):
        """The squared error of a row under a scale, in units of ``(scale / 8) ** 2``."""
        total = np.int64(0)
        for d in range(len(x)):
            place = magnitude(x[d], scale)
            off = np.float32(np.float32(place - np.float32(_nearest(place))) * np.float32(8))
            error = np.int32(min(off, np.float32(32767)))
            total += np.int64(np.int32(error * error))
        return np.float32(total)

    @register_jitable
    def fitted(x, scale):
        """The best scale for the levels that a scale has chosen, by least squares."""
        along, size = np.int64(0), np.int64(0)
        for d in range(len(x)):
            place = magnitude(x[d], scale)
            level = _nearest(place)
            sixteenths = np.int32(min(np.float32(place * np.float32(16)), np.float32(1 << 20)))
            along += np.int64(np.int32(sixteenths * level))
            size += np.int64(np.int32(level * level))
        factor = np.float32(np.float32(along) / np.float32(np.float32(size) * np.float32(16)))
        return np.float32(scale * factor)

    @register_jitable
    def scale_of(x):
        most = np.int32(0)  # magnitude's bits; those of NaN are above those of infinity
        for d in range(len(x)):
            bits = np.int32(np.float32(load(x[d])).view(np.int32) & np.int32(0x7FFFFFFF))
            most = max(most, bits)
        if most >= np.int32(_NOT_FINITE):
            return np.float32(np.nan)
        largest = np.int32(most).view(np.float32)
        if largest < np.float32(_TINY):
            return np.float32(0)
        root = np.float32(math.sqrt(mean_square(x, largest)))
        of_normal = np.float32(np.float32(largest * root) * np.float32(_OF_NORMAL))
        of_largest = np.float32(largest / np.float32(LEVELS[-1]))
        best, least = np.float32(0), np.float32(np.inf)
        for i in range(3):
            scale = of_normal
            if i == 1:
                scale = np.float32(np.float32(of_normal + of_largest) * np.float32(0.5))
            elif i == 2:
                scale = of_largest
            # Relative to one of them, so that tiny errors do not vanish when they are squared.
            unit = np.float32(scale / of_largest)
            error = np.float32(np.float32(squared_error(x, scale) * unit) * unit)
            if error < least:
                best, least = scale, error
        return fitted(x, best)

    @register_jitable
    def code(x, scale):
        place = np.float32(np.float32(load(x)) / scale)
        return np.int32(
            _number(np.float32(abs(place)))
            + (np.int32(8) if place < np.float32(0) else np.int32(0))
        )

    @register_jitable
    def store(x, words):
        scale = scale_of(x)
        if scale > np.float32(0):
            for j in range(len(x) // 2):
                low, high = code(x[2 * j], scale), code(x[2 * j + 1], scale)
                words[j] = np.uint8(np.int32(low + np.int32(high * np.int32(16))))
        else:  # 0 or NaN: the codes do not matter
            for j in range(len(x) // 2):
                words[j] = np.uint8(0)
        return scale

    return store


@register_jitable
def _as_it_is(x):
    return x


_store = code4_store(_as_it_is)


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
