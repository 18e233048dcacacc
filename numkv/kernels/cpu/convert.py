"""Rows of words to floats and back, on the CPU, and codes to floats."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.rows.codec import row_codec
from numkv.rows.convert import codec


def make_convert(KIND, COMPUTE, TO_WORDS):
    """Make the kernel that turns floats into words of a kind, or words into floats."""
    load, store = codec(KIND, COMPUTE)

    def kernel(source, target, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        tokens = source.shape[0]
        for t in range(tokens * worker // workers, tokens * (worker + 1) // workers):
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
def converter(kind: str, compute: str, to_words: bool) -> Any:
    """Return the kernel ``convert(source, target, launch, worker, workers)`` of a kind: from floats, or to them."""
    words, floats = WORDS[kind], getattr(types, compute)
    source, target = (floats, words) if to_words else (words, floats)
    signature = (array(source, 3), array(target, 3, out=True), *ON_THREADS)
    label = f"convert, {compute} to {kind}" if to_words else f"convert, {kind} to {compute}"
    return build(
        make_convert, signature, args=(kind, compute, to_words), label=label, emit=types.none
    )


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
    run(converter(kind, compute, False), workers_for(words.size), words, floats)
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
    # To ask a dtype for its name takes microseconds.
    kernel = converter(kind, "float32" if floats.itemsize == 4 else "float64", True)
    run(kernel, workers_for(words.size), floats, words)


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
