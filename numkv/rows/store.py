"""One row into a cache and out of it, for every storage kind: the last step of a write and the first of a read.

`row_store` and `row_load` choose the functions when a kernel is built. Quantised kinds give a row's scale back and take
it; float kinds give 0 and ignore it. INT4, whose rows have several scales, is stored by `numkv.rows.int4.store_int4`;
`row_load` serves it too.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.convert import codec
from numkv.rows.int4 import load_int4
from numkv.rows.quantize import int8_divisor, int8_quotient, int8_scale, largest_of

__all__ = ["row_load", "row_store"]


@register_jitable
def _store_int8(x, target, store):
    scale = int8_scale(largest_of(x))
    divisor = int8_divisor(scale)
    for d in range(len(x)):
        target[d] = int8_quotient(x[d], divisor)
    return scale


@register_jitable
def _store_floats(x, target, store):
    for d in range(len(x)):
        target[d] = store(x[d])
    return np.float32(0)


def row_store(kind, compute="float32"):
    """How a row of floats is stored in a kind.

    Parameters
    ----------
    kind : str
        Name of a storage kind.
    compute : {"float32", "float64"}
        Dtype of the row.

    Returns
    -------
    store_row, store : function
        ``store_row(x, target, store) -> scale`` puts the floats `x` into the words `target`. None for INT4.
    """
    if kind == "int4":
        return None, None
    if kind == "int8":
        return _store_int8, codec("fp32", compute)[1]
    return _store_floats, codec(kind, compute)[1]


@register_jitable
def _load_int8(words, scale, out, load):
    for d in range(len(words)):
        out[d] = np.float32(words[d]) * scale


@register_jitable
def _load_floats(words, scale, out, load):
    for d in range(len(words)):
        out[d] = load(words[d])


@register_jitable
def _load_int4(words, scales, out, load):
    load_int4(words, scales, out)


def row_load(kind):
    """How a stored row becomes float32.

    Parameters
    ----------
    kind : str
        Name of a storage kind.

    Returns
    -------
    load_row, load : function
        ``load_row(words, scale, out, load)`` puts the values of `words` into `out`; for INT4 `scale` is the row of
        scales.
    """
    if kind == "int4":
        return _load_int4, codec("fp32")[0]
    if kind == "int8":
        return _load_int8, codec("fp32")[0]
    return _load_floats, codec(kind)[0]
