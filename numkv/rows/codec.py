"""One row into a buffer and out of it, for every storage kind: the last step of a write and the first of a read.

The functions for a kind are chosen when a kernel is built, and take the same arguments whatever the kind::

    store_row, load_row = row_codec(kind)
    store_row(x, words, scales)          # floats of a row -> its words, and its scales if they are computed from it
    load_row(words, scales, out)         # back
    value, put = element_codec(kind)
    value(words, scales, d, dim)         # element d of a stored row of dim
    put(x, words, scales, d)             # back; not for quantised kinds

`scales` has the scales of a token's row in one kv head; `scales_at` finds it. INT8 and codes of a codebook have one,
INT4 one for each group. 8-bit floats have one for the whole head, which is read, never written. If channels have
scales, they are those of the token's group, and rows are loaded only. Kinds without scales ignore it.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.channel import channel_loader
from numkv.rows.code4 import code4_value, load_code4, store_code4
from numkv.rows.code6 import code6_value, load_code6, store_code6
from numkv.rows.convert import codec
from numkv.rows.int4 import int4_value, load_int4, store_int4
from numkv.rows.quantize import int8_divisor, int8_quotient, int8_scale, largest_of

#: Float kinds whose stored elements are multiplied by a scale, which all rows of a head share.
SCALED_FLOATS = ("fp8_e4m3", "fp8_e5m2")


@register_jitable
def _store_int8(x, words, scales):
    scale = int8_scale(largest_of(x))
    divisor = int8_divisor(scale)
    for d in range(len(x)):
        words[d] = int8_quotient(x[d], divisor)
    scales[0] = scale


@register_jitable
def _load_int8(words, scales, out):
    scale = scales[0]
    for d in range(len(out)):
        out[d] = np.float32(words[d]) * scale


@register_jitable
def _int8_value(words, scales, d, dim):
    return np.float32(words[d]) * scales[0]


#: Of kinds whose scales are computed from rows: what stores a row, what loads it, and what gives one of its elements.
_QUANTISED = {
    "int8": (_store_int8, _load_int8, _int8_value),
    "int4": (store_int4, load_int4, int4_value),
    "code4": (store_code4, load_code4, code4_value),
    "code6": (store_code6, load_code6, code6_value),
    # Tokens are stored in groups: see `numkv.rows.channel`.
    "int8_channel": (None, *channel_loader(8, 0)),
    "int4_channel_fine": (None, *channel_loader(4, 8)),
    "int4_channel": (None, *channel_loader(4, 0)),
}


def scaled_codec(kind, compute="float32"):
    """The functions that load and store an element of a float kind by its scale; see `numkv.rows.convert.codec`.

    Parameters
    ----------
    kind : str
        Name of a float kind; without scales, `scale` is ignored.
    compute : {"float32", "float64"}
        The dtype that `load` returns and that divisions use.

    Returns
    -------
    load, store : function
        ``load(word, scale) -> float`` and ``store(float, scale) -> word``.
    """
    to_float, to_word = codec(kind, compute)
    REAL = np.float64 if compute == "float64" else np.float32
    if kind in SCALED_FLOATS:

        @register_jitable
        def load(word, scale):
            return REAL(to_float(word) * REAL(scale))

        @register_jitable
        def store(x, scale):
            return to_word(REAL(REAL(x) / REAL(scale)))

    else:

        @register_jitable
        def load(word, scale):
            return to_float(word)

        @register_jitable
        def store(x, scale):
            return to_word(x)

    return load, store


def row_codec(kind, compute="float32"):
    """The functions that store and load a row of a kind.

    Parameters
    ----------
    kind : str
        Name of a storage kind.
    compute : {"float32", "float64"}
        Dtype of the floats: of `x` and of `out`. Quantised kinds compute in float32 whatever it is.

    Returns
    -------
    store_row, load_row : function
        ``store_row(x, words, scales)`` writes the floats `x` to `words`, and computed scales to `scales`.
        ``load_row(words, scales, out)`` fills `out`. INT4 needs whole groups: the first ones of a row, or all.
    """
    if kind in _QUANTISED:
        store_quantised, load_quantised, _ = _QUANTISED[kind]
        return store_quantised, load_quantised
    load, store = scaled_codec(kind, compute)
    SCALED = kind in SCALED_FLOATS

    @register_jitable
    def store_row(x, words, scales):
        scale = scales[0] if SCALED else np.float32(1)
        for d in range(len(x)):
            words[d] = store(x[d], scale)

    @register_jitable
    def load_row(words, scales, out):
        scale = scales[0] if SCALED else np.float32(1)
        for d in range(len(out)):
            out[d] = load(words[d], scale)

    return store_row, load_row


def element_codec(kind, compute="float32"):
    """The functions that load and store one element of a stored row.

    Parameters
    ----------
    kind : str
        Name of a storage kind.
    compute : {"float32", "float64"}
        The floats of float kinds; those of quantised ones are float32.

    Returns
    -------
    value, put : function
        ``value(words, scales, d, dim)``: element `d` of a row of `dim`. ``put(x, words, scales, d)`` stores it; None
        for quantised kinds, whose elements have a scale in common.
    """
    if kind in _QUANTISED:
        return _QUANTISED[kind][2], None
    load, store = scaled_codec(kind, compute)
    SCALED = kind in SCALED_FLOATS

    @register_jitable
    def value(words, scales, d, dim):
        return load(words[d], scales[0] if SCALED else np.float32(1))

    @register_jitable
    def put(x, words, scales, d):
        words[d] = store(x, scales[0] if SCALED else np.float32(1))

    return value, put


def elements_in(kind):
    """Make the function ``elements(words)`` that returns the elements of a row with so many words.

    Parameters
    ----------
    kind : Kind
        Their storage kind.
    """
    (ELEMENTS, WORDS), FINE = kind.unit, kind.fine_channels

    @register_jitable
    def elements(words):
        return words * ELEMENTS // WORDS - FINE

    return elements


def scales_at(scales_per):
    """The function that finds the scales of one row in a buffer's array of scales.

    Parameters
    ----------
    scales_per : {"none", "head", "row", "group"}
        What shares a scale.

    Returns
    -------
    function
        ``at(scale, block, head, offset)``: a 1-d view, or of kinds without scales the empty array itself. Not for
        CUDA, which lets no function return a new array: its kernels have the branches in themselves.
    """
    NONE, HEAD, ROW = (scales_per == name for name in ("none", "head", "row"))

    @register_jitable
    def at(scale, block, head, offset):
        if NONE:
            return scale
        elif HEAD:
            return scale[head : head + 1]
        elif ROW:
            return scale[block, head, offset : offset + 1]
        else:
            return scale[block, head, offset]

    return at
