"""The normalised Walsh-Hadamard transform of a row, in steps that any target can divide among threads.

The transform of n = 2**k elements is k stages of n / 2 butterflies (a, b) -> (a + b, a - b), all over sqrt(n). It is
orthogonal and its own inverse. A row whose length is no power of two is cut into blocks of the largest power of two
that divides it: 96 is 3 blocks of 32. A row of odd length is unchanged. With random signs in front, an outlier spreads
over its whole block: Ashkboos et al., "QuaRot" (arXiv:2404.00456), sections 3 and 4.

There are two ways through a stage, with the same sums in the same order:

`lower_of`
    Butterfly i of a stage works in place on two elements that lie `stride` apart, the stride doubling from 1.
`butterflies`
    Every stage reads neighbours, and writes sums to one half and differences to the other: Pease, "An adaptation of the
    fast Fourier transform for parallel processing" (J. ACM 15, 1968). All loops are long and vectorise. A row of
    several blocks ends in another order: element i of block c at ``i * num_blocks + c``.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable


@register_jitable
def block_length(dim):
    """Return the largest power of two that divides `dim`, which is at least 1."""
    return np.int64(dim) & -np.int64(dim)


@register_jitable
def butterfly(a, b):
    """Sum and difference."""
    return a + b, a - b


@register_jitable
def lower_of(i, stride):
    """Index of the first element of butterfly `i`; the second lies `stride` (a power of two) further on."""
    return i + (i & -stride)


@register_jitable
def butterflies(x, low, high):
    """One stage over a whole row: sums of neighbours in `x` to `low`, their differences to `high`."""
    for i in range(len(low)):
        low[i], high[i] = butterfly(x[2 * i], x[2 * i + 1])
