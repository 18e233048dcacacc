"""RMS norm of one row: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4."""

from __future__ import annotations

import math

from numba.extending import register_jitable


@register_jitable
def root_mean_square(sum_of_squares, n, eps):
    """Return the divisor of a row's elements, before their weights: ``sqrt(mean square + eps)``.

    All three arguments are floats of the computing dtype, so that nothing is promoted.
    """
    return math.sqrt(sum_of_squares / n + eps)
