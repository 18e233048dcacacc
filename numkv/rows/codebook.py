"""The scale of a row whose elements become levels of a codebook; the kinds are `numkv.rows.code4` and `code6`.

``value = scale * level``. Levels have the least squared error for normal numbers (Lloyd, 1957; Max, 1960), as integers
of 8 bits. So a table lookup turns a row of codes into INT8, which attention multiplies. Elements of a row are normal
numbers after a random rotation (Zandieh et al., "TurboQuant", arXiv:2504.19874, section 3.1). Pools with
``rotate=True`` rotate rows. Rows of models have outliers without it.

The scale is a float32, found in two steps. First, three scales are tried: one that fits normal numbers of the row's
mean square, one that reaches the row's largest element, and their mean. The one with the least squared error wins, the
first of equals. Second, it is replaced by ``sum(x * level) / sum(level ** 2)``, the least-squares optimum for its
levels. Codes are those of the levels that are then nearest. A row below 1e-30 is stored as zeros, with scale 0. One
with NaN or infinity has scale NaN.

All sums are of integers, whose order makes no difference, so all targets find the same words.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

#: Rows whose largest magnitude is below are stored as zeros.
TINY = 1e-30
_NOT_FINITE = 0x7F800000


@register_jitable
def as_it_is(x):
    """Return a float unchanged: `load` for rows of floats."""
    return x


@register_jitable
def places_in_1(scale):
    """How many sixteenths of a scale make 1."""
    return np.float32(np.float32(16) / scale)


def sixteenths_finder(load):
    """Make ``sixteenths(x, places_in_1(scale))``: a magnitude in sixteenths of a scale, cut to an integer."""

    @register_jitable
    def sixteenths(x, in_1):
        size = np.float32(abs(np.float32(load(x))))
        return np.int32(min(np.float32(size * in_1), np.float32(1 << 20)))

    return sixteenths


def sign_finder(load):
    """Make the function that returns whether a word of a row has a sign, as -0 does, too."""

    @register_jitable
    def has_sign(x):
        return np.int32(np.float32(load(x)).view(np.int32)) < np.int32(0)

    return has_sign


def scale_finder(load, nearest, TOP, OF_NORMAL):
    """The function that finds a row's scale: ``scale_of(x) -> float32``.

    Parameters
    ----------
    load : function
        Turns a word of the row into a float.
    nearest : function
        ``nearest(sixteenths) -> int32``: the level nearest to a magnitude in sixteenths of the scale.
    TOP : int
        The largest level.
    OF_NORMAL : float
        The scale that fits normal numbers of mean square 1.
    """
    sixteenths = sixteenths_finder(load)

    @register_jitable
    def mean_square(x, largest):
        """The mean square of a row, in units of the largest magnitude's square."""
        total, factor = np.int64(0), np.float32(np.float32(32767) / largest)
        for d in range(len(x)):
            part = np.int32(np.float32(np.float32(abs(np.float32(load(x[d])))) * factor))
            total += np.int64(np.int32(part * part))
        return np.float32(
            np.float32(total) / np.float32(np.float32(len(x)) * np.float32(32767.0**2))
        )

    @register_jitable
    def squared_error(x, scale):
        """The squared error of a row under a scale, in units of ``(scale / 16) ** 2``."""
        total, in_1 = np.int64(0), places_in_1(scale)
        for d in range(len(x)):
            size = sixteenths(x[d], in_1)
            off = np.int32(size - np.int32(nearest(size) * np.int32(16)))
            error = min(off, np.int32(32767))
            total += np.int64(np.int32(error * error))
        return np.float32(total)

    @register_jitable
    def fitted(x, scale):
        """The best scale for the levels that a scale has chosen, by least squares."""
        along, squares, in_1 = np.int64(0), np.int64(0), places_in_1(scale)
        for d in range(len(x)):
            size = sixteenths(x[d], in_1)
            level = nearest(size)
            along += np.int64(np.int32(size * level))
            squares += np.int64(np.int32(level * level))
        factor = np.float32(np.float32(along) / np.float32(np.float32(squares) * np.float32(16)))
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
        if largest < np.float32(TINY):
            return np.float32(0)
        root = np.float32(math.sqrt(mean_square(x, largest)))
        of_normal = np.float32(np.float32(largest * root) * np.float32(OF_NORMAL))
        of_largest = np.float32(largest / np.float32(TOP))
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

    return scale_of
