"""The ends of an online softmax: weights of partial sums, the sink, the normalisation.

Running maxima are in base 2 (scores times log2 e), as kernels exponentiate in base 2. A maximum of -inf means that no
token has been seen yet. Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), section
3.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@register_jitable
def power_of_2(x, maximum):
    """``2 ** (x - maximum)``, and 1 where both are -inf (a sum of nothing keeps its 0)."""
    if x == maximum:
        return np.float32(1)
    return math.pow(np.float32(2), x - maximum)


@register_jitable
def finish(maximum, total, sink, ln_2):
    """Normalise a row.

    Parameters
    ----------
    maximum, total : float
        Largest score in base 2, and the sum of ``2 ** (score - maximum)``.
    sink : float
        Extra score in base 2 that only joins the denominator; -inf for none.
    ln_2 : float
        Natural logarithm of 2, in the computing dtype.

    Returns
    -------
    factor, lse : float
        The factor of the weighted sum of V rows, and the natural log of the sum of exponentials. A row that saw no
        token gets factor 0 and -inf (with a sink: the sink).
    """
    top = maximum
    if sink > top:
        top = sink
    if top == -np.inf:
        return total, top + total  # 0 and -inf; NaN scores, which never become a maximum, stay NaN
    shrink = power_of_2(maximum, top)
    denominator = total * shrink
    if sink > -np.inf:
        denominator += power_of_2(sink, top)
    return shrink / denominator, top * ln_2 + math.log(denominator)


@register_jitable
def merge_weights(lse_a, lse_b):
    """Weights of two normalised partial results, and the log of their sum of exponentials.

    Parameters
    ----------
    lse_a, lse_b : float
        Natural logs of the parts' sums of exponentials: -inf if a part saw no token, and infinity if its scores
        overflow a float.

    Returns
    -------
    weight_a, weight_b, lse : float
        Both weights are 0 if neither part saw a token. An infinite part outweighs a finite one; two infinite parts
        count equally.
    """
    top = lse_a
    if lse_b > top or lse_b != lse_b:  # a NaN stays one
        top = lse_b
    if top == -np.inf:
        return np.float32(0), np.float32(0), top
    # The larger one's is 1, without the difference, which infinity does not have from itself.
    exp_a = np.float32(1) if lse_a == top else np.float32(math.exp(lse_a - top))
    exp_b = np.float32(1) if lse_b == top else np.float32(math.exp(lse_b - top))
    total = np.float32(exp_a + exp_b)
    return exp_a / total, exp_b / total, np.float32(top + np.float32(math.log(total)))
