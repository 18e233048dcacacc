"""One row to INT8 codes and a scale, and back: symmetric, a scale for each token and kv head.

``scale = max(|x|) / 127`` in float32, ``code = round_half_even(x / scale)`` within ±127; a zero row has scale 0 and
codes 0. The error of an element is at most ``scale / 2`` up to float32 rounding, for rows from 1e-30 to 65504.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.convert import codec


@register_jitable
def largest_of(x):
    """Return the largest absolute value in a row, float32; NaN counts as 0.

    Floats without signs have the order of their bits, and a maximum of integers is the same in any order. So the loop
    becomes vector code.
    """
    largest = np.int32(0)
    for d in range(len(x)):
        magnitude = np.int32(np.float32(x[d]).view(np.int32) & np.int32(0x7FFFFFFF))
        largest = max(largest, magnitude if magnitude <= np.int32(0x7F800000) else np.int32(0))
    return np.int32(largest).view(np.float32)


@register_jitable
def int8_scale(largest):
    """Return the scale of a row whose largest absolute value is `largest`, float32."""
    return np.float32(largest) / np.float32(127)


@register_jitable
def int8_divisor(scale):
    """Return the divisor of a row's elements: its scale, or infinity for a scale of 0, so that codes are 0."""
    return np.float32(np.inf) if scale == np.float32(0) else np.float32(scale)


@register_jitable
def int8_quotient(x, divisor):
    """The code of one element, by the divisor of its row."""
    # Adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the low bits; a float32 result is needed for that.
    quotient = np.float32(np.float32(x) / divisor)
    shifted = np.float32(quotient + np.float32(12582912.0))
    code = np.float32(shifted - np.float32(12582912.0))
    # x / scale may round to a hair above 127.
    code = min(max(code, np.float32(-127)), np.float32(127))
    return np.int8(code)


@register_jitable
def int8_code(x, scale):
    """The code of one element, by the scale of its row, float32."""
    return int8_quotient(x, int8_divisor(scale))


@register_jitable
def is_finite(x):
    """Return whether a float is neither NaN nor infinite."""
    return x - x == x - x


def finite_row(kind):
    """The function that returns whether a row, in the words of a float kind of 16 bits or more, has finite floats only.

    Rows are quantised in float32: numbers that it rounds to infinity count as infinite. As in `largest_of`, it takes
    the largest integer, so that the loop becomes vector code.
    """
    infinity = codec(kind)[1](np.float64(2**128 - 2**103) if kind == "fp64" else np.float32(np.inf))
    WORD, INT = type(infinity), np.dtype(f"i{infinity.itemsize}").type
    INFINITY, MAGNITUDE = infinity.view(INT), INT(np.iinfo(INT).max)

    @register_jitable
    def all_finite(row):
        largest = INT(0)
        for d in range(len(row)):
            largest = max(largest, INT(WORD(row[d]).view(INT) & MAGNITUDE))
        return largest < INFINITY

    return all_finite
