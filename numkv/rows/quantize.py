"""One row to INT8 codes and a scale, and back: symmetric, a scale for each token and kv head.

``scale = max(|x|) / 127`` in float32, ``code = round_half_even(x / scale)`` within ±127; a zero row has scale 0 and
codes 0. The error of an element is at most ``scale / 2`` up to float32 rounding, for rows from 1e-30 to 65504.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

__all__ = ["int8_code", "int8_scale", "is_finite"]


@register_jitable
def int8_scale(largest):
    """The scale of a row whose largest absolute value is `largest`, float32."""
    return np.float32(largest) / np.float32(127)


@register_jitable
def int8_code(x, scale):
    """The code of one element, float32."""
    if scale == np.float32(0):
        return np.int8(0)
    # Adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the low bits; a float32 result is needed for that.
    quotient = np.float32(np.float32(x) / scale)
    shifted = np.float32(quotient + np.float32(12582912.0))
    code = np.float32(shifted - np.float32(12582912.0))
    # x / scale may round to a hair above 127.
    code = min(max(code, np.float32(-127)), np.float32(127))
    return np.int8(code)


@register_jitable
def is_finite(x):
    """Whether a float is neither NaN nor infinite."""
    return x - x == x - x
