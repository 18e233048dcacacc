"""The order of scores as the order of integers, and the parts of a query that meet the bounds of keys."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

#: Bits of a digit of a score's number, which a search for the highest takes at once.
DIGIT_BITS = 8


@register_jitable
def order_of(score):
    """An unsigned number that is larger where a float32 score is larger; that of NaN is the one of infinity."""
    if score != score:
        score = np.float32(np.inf)
    bits = np.float32(score + np.float32(0)).view(np.uint32)  # -0 is 0
    if bits & np.uint32(0x80000000):
        return np.uint32(~bits)
    return np.uint32(bits | np.uint32(0x80000000))


@register_jitable
def digit_of(order, place):
    """Digit `place` of `order_of`; 0 is the lowest."""
    return np.int64((order >> np.uint32(place * DIGIT_BITS)) & np.uint32((1 << DIGIT_BITS) - 1))


@register_jitable
def whose_digit(order, found, place):
    """Return whether the digits above `place` are those of `found`."""
    above = np.uint32((place + 1) * DIGIT_BITS)
    return above >= np.uint32(32) or (order >> above) == (found >> above)


@register_jitable
def parts_of(x):
    """Return the negative and the positive part of a query's element, the factors of a lower and an upper bound.

    Those of NaN are NaN.
    """
    if x < np.float32(0):
        return x, np.float32(0)
    if x >= np.float32(0):
        return np.float32(0), x
    return x, x
