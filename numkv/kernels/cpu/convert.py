"""Rows of words to floats and back, in kernels of the CPU, and codes to floats."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.rows.codec import row_codec
from numkv.rows.convert import codec


@functools.cache
def scaled_rows(kind: str, compute: str) -> tuple[Any, Any]:
    """Return ``take, put`` for a float kind.

    ``take(words, factor, floats)`` writes a row of words times a factor as floats, and ``put(floats, factor, words)``
    rounds floats times a factor to words. A loop that stands alone, over arrays that begin with rows, is vector code.
    """
    load, store = codec(kind, compute)

    @register_jitable
    def take(words, factor, floats):
        for i in range(len(words)):
            floats[i] = factor * load(words[i])

    @register_jitable
    def put(floats, factor, words):
        for i in range(len(floats)):
            words[i] = store(factor * floats[i])

    return take, put


def make_dequantise(KIND):
    """Make the kernel that turns stored rows of a kind with scales into float32."""
    _, load_row = row_codec(KIND)

    def kernel(codes, scale, out):
        scales = by_row(scale)
        for h in range(codes.shape[0]):
            for t in range(codes.shape[1]):
                words = row_of(codes, (np.int64(h), np.int64(t)))
                of_row = row_of(scales, (np.int64(0), np.int64(h), np.int64(t)))
                load_row(words, of_row, row_of(out, (np.int64(h), np.int64(t))))

    return kernel


@functools.cache
def _dequantise(kind: str) -> Any:
    dtype, ndim = SCALES[kind]
    signature = (
        array(WORDS[kind], 3),
        array(dtype, max(3, ndim)),
        array(types.float32, 3, out=True),
    )
    return build(
        make_dequantise, signature, args=(kind,), label=f"dequantise, {kind}", emit=types.none
    )


def dequantise(codes, kind, scale, out):
    """Turn stored rows into values.

    Parameters
    ----------
    codes : array (num_heads, num_tokens, words)
        Rows of one block, in the words of `kind`.
    kind : str
        Their kind, one with scales.
    scale : array (num_heads, num_tokens) or (num_heads, num_tokens, groups)
        Scales of the rows, or of their groups, in words. Where an axis of it is 1, all share them.
    out : float32 array (num_heads, num_tokens, head_dim)
        Takes the values.
    """
    shape = (*codes.shape[:2], *scale.shape[2:])
    _dequantise(kind)(codes, np.broadcast_to(scale, shape)[None], out)
