"""Rows of words to floats and back, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.cpu.simd import row_of
from numkv.kernels.kernel import WORDS, array, build
from numkv.rows.convert import codec

__all__ = ["from_floats", "to_floats"]


def make_convert(KIND, COMPUTE, TO_WORDS):
    """The kernel that turns floats into words of a kind, or words into floats."""
    load, store = codec(KIND, COMPUTE)

    def kernel(source, target):
        for t in range(source.shape[0]):
            for h in range(source.shape[1]):
                a = row_of(source, (np.int64(t), np.int64(h)))
                b = row_of(target, (np.int64(t), np.int64(h)))
                for d in range(len(a)):
                    if TO_WORDS:
                        b[d] = store(a[d])
                    else:
                        b[d] = load(a[d])

    return kernel


@functools.cache
def _convert(kind: str, compute: str, to_words: bool) -> Any:
    words, floats = WORDS[kind], getattr(types, compute)
    source, target = (floats, words) if to_words else (words, floats)
    signature = (array(source, 3), array(target, 3, out=True))
    label = f"convert, {compute} to {kind}" if to_words else f"convert, {kind} to {compute}"
    return build(make_convert(kind, compute, to_words), signature, label=label)


def to_floats(words, kind, compute):
    """Floats of a 3-d array of words, as a new array.

    Parameters
    ----------
    words : array (num_tokens, num_heads, head_dim)
        Elements of a float kind.
    kind : str
        Its name.
    compute : {"float32", "float64"}
        Dtype of the result.
    """
    floats = np.empty(words.shape, compute)
    _convert(kind, compute, False)(words, floats)
    return floats


def from_floats(floats, words, kind):
    """Round a 3-d array of floats into an array of words.

    Parameters
    ----------
    floats : array (num_tokens, num_heads, head_dim)
        float32 or float64.
    words : array (num_tokens, num_heads, head_dim)
        Takes the elements.
    kind : str
        Their kind.
    """
    _convert(kind, floats.dtype.name, True)(floats, words)
