"""One row to 6-bit codes of a codebook and a scale, and back.

``value = scale * level`` with 32 levels and their negatives. The levels are the odd numbers from 1 to 29, then ``32,
34, 37, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108``. They have the least squared error for normal numbers
(from `numkv.compression.codebook`), times a factor and rounded. The factor is the best of those that keep levels in 8
bits: rounding costs 2.8 % more squared error. `numkv.rows.codebook` describes how a row's scale is found.

A code has the number of the magnitude, 0 to 31, in its lower five bits, and the sign in the sixth. Codes follow each
other without gaps, the lowest bit first: four codes are three bytes. So the group of four elements from element i on
begins at byte ``i * 3 / 4``, whatever the row's length. Vectors of any size are read in place.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.codebook import as_it_is, places_in_1, scale_finder, sign_finder, sixteenths_finder

#: Magnitudes of levels, in rising order.
LEVELS = (
    *range(1, 30, 2), 32, 34, 37, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108,
)  # fmt: skip
#: From where on a magnitude belongs to the level above: halfway between levels.
EDGES = tuple((LEVELS[i] + LEVELS[i + 1]) / 2 for i in range(len(LEVELS) - 1))


def _packed(numbers):
    """Up to eight numbers as the bytes of one, the first lowest."""
    return sum(int(number) << 8 * i for i, number in enumerate(numbers))


# The magnitudes, a byte each, eight to a word.
_TABLES = tuple(_packed(LEVELS[i : i + 8]) for i in range(0, 32, 8))
# Twice the edges, which are integers, in the order in which a search by halves meets them: edge 15 first, then 7 or 23.
_TWICE = [int(2 * edge) for edge in EDGES]
_FIRST, _SECOND, _THIRD, _FOURTH = (
    _packed(_TWICE[step - 1 :: 2 * step]) for step in (16, 8, 4, 2)
)  # fmt: skip
_LAST = _packed(_TWICE[0:16:2]), _packed(_TWICE[16::2])
#: The scale that fits normal numbers of mean square 1: the largest level of Lloyd and Max is 3.7405.
OF_NORMAL = 3.7405 / LEVELS[-1]


@register_jitable
def _byte(table, i):
    """Byte `i` of a word of eight."""
    return np.int32((np.uint64(table) >> np.uint64(8 * i)) & np.uint64(255))


@register_jitable
def _level(number):
    """A magnitude by its number."""
    low = np.uint64(_TABLES[0]) if number < 8 else np.uint64(_TABLES[1])
    high = np.uint64(_TABLES[2]) if number < 24 else np.uint64(_TABLES[3])
    return _byte(low if number < 16 else high, number & 7)


@register_jitable
def code6_level(code):
    """The level of a code, int32."""
    magnitude = _level(np.int32(code & 31))
    return np.int32(-magnitude) if code & 32 else magnitude


@register_jitable
def _number(x):
    """Return the number of the level nearest to a magnitude, in sixteenths of the scale."""
    # A search by halves without branches: loops over a row become vector code.
    twice = min(np.int32(x >> np.int32(3)), np.int32(255))
    found = np.int32(16) if twice >= np.int32(_FIRST) else np.int32(0)
    found += np.int32(8) if twice >= _byte(_SECOND, found >> 4) else np.int32(0)
    found += np.int32(4) if twice >= _byte(_THIRD, found >> 3) else np.int32(0)
    found += np.int32(2) if twice >= _byte(_FOURTH, found >> 2) else np.int32(0)
    last = np.uint64(_LAST[0]) if found < 16 else np.uint64(_LAST[1])
    found += np.int32(1) if twice >= _byte(last, (found >> 1) & 7) else np.int32(0)
    return np.int32(found)


@register_jitable
def _nearest(x):
    """The level nearest to a magnitude, in sixteenths of the scale."""
    return _level(_number(x))


def code6_store(load):
    """Make the function that stores a row: ``store(x, words) -> scale``; `load` turns elements of `x` into floats."""
    scale_of = scale_finder(load, _nearest, LEVELS[-1], OF_NORMAL)
    sixteenths, has_sign = sixteenths_finder(load), sign_finder(load)

    @register_jitable
    def code(x, in_1):
        sign = np.int32(32) if has_sign(x) else np.int32(0)
        return np.int32(_number(sixteenths(x, in_1)) + sign)

    @register_jitable
    def store(x, words):
        scale = scale_of(x)
        if scale > np.float32(0):
            in_1 = places_in_1(scale)
            for j in range(len(x) // 4):
                a, b = code(x[4 * j], in_1), code(x[4 * j + 1], in_1)
                c, d = code(x[4 * j + 2], in_1), code(x[4 * j + 3], in_1)
                words[3 * j] = np.uint8(np.int32(a | np.int32(b << 6)) & 255)
                words[3 * j + 1] = np.uint8(np.int32(b >> 2 | np.int32(c << 4)) & 255)
                words[3 * j + 2] = np.uint8(np.int32(c >> 4 | np.int32(d << 2)) & 255)
        else:  # 0 or NaN: the codes do not matter
            for j in range(len(x) // 4 * 3):
                words[j] = np.uint8(0)
        return scale

    return store


_store = code6_store(as_it_is)


@register_jitable
def store_code6(x, words, scales):
    """Put a row of floats into its bytes and its scale."""
    scales[0] = _store(x, words)


@register_jitable
def code6_value(words, scales, d, dim):
    """Element `d` of a stored row, float32."""
    at = d // 4 * 3
    low = np.int32(np.int32(words[at]) | np.int32(np.int32(words[at + 1]) << np.int32(8)))
    unit = np.int32(low | np.int32(np.int32(words[at + 2]) << np.int32(16)))
    return np.float32(np.float32(code6_level(np.int32(unit >> np.int32(6 * (d % 4))))) * scales[0])


@register_jitable
def load_code6(words, scales, out):
    """Put the values of a stored row, or of its first elements, into `out`."""
    for d in range(len(out)):
        out[d] = code6_value(words, scales, d, len(out))
