"""Copy what is stored, word for word, on CUDA; see `numkv.kernels.cpu.copy` for the operations.

Blocks, and rows of tokens, are copied in the widest words that they are made of. Pairs with a block or slot outside its
pool are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.cuda import memory
from numkv.kernels.cuda.launches import INDICES, SIMULATED, array, jit, launch, number_at
from numkv.kernels.cuda.simd import LANES, THREADS, ceil_div
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations

__all__ = ["copy_blocks", "copy_tokens"]

PIECE = 8 * THREADS  # words of a cache's block that a block of threads takes at once
ROWS = THREADS // LANES  # rows of tokens that a block of threads takes at once
ASIDE = 3 if SIMULATED else 4096  # tokens that lie aside at once while they move within a buffer

_UNSIGNED = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}


def make_copy_blocks(WORD):
    """The kernel that copies blocks of words of `WORD` bytes."""

    def kernel(source, source_ids, to, to_ids):
        num_ids, size = source_ids.shape[0], np.int64(source.shape[1])
        pieces = (size + PIECE - 1) // PIECE
        for item in range(np.int64(cuda.blockIdx.x), num_ids * pieces, np.int64(cuda.gridDim.x)):
            i, piece = item // pieces, item % pieces
            a, b = number_at(source_ids, i), number_at(to_ids, i)
            if a < 0 or a >= source.shape[0] or b < 0 or b >= to.shape[0]:
                continue
            end = min(size, (piece + 1) * PIECE)
            for w in range(piece * PIECE + cuda.threadIdx.x, end, THREADS):
                to[b, w] = source[a, w]

    return kernel


@functools.cache
def _copy_blocks(bytes_: int) -> Any:
    words = array(_UNSIGNED[bytes_], 2)
    return jit(make_copy_blocks, (bytes_,), (words, INDICES, words, INDICES), 8)


@implements(Operations.copy_blocks)
def copy_blocks(source, source_ids, to, to_ids):
    if 0 in (source.size, to.size, source_ids.size):
        return
    size = source.nbytes // source.shape[0]
    word = next(n for n in (8, 4, 2, 1) if size % n == 0)
    flat = [
        x.reshape((x.size,)).view(np.dtype(f"u{word}")).reshape((x.shape[0], size // word))
        for x in (source, to)
    ]
    blocks = source_ids.shape[0] * ceil_div(size // word, PIECE)
    launch(_copy_blocks(word), blocks, THREADS, flat[0], source_ids, flat[1], to_ids)


def make_copy_tokens(WORD):
    """The kernel that copies the rows of tokens, of words of `WORD` bytes; without slots, tokens stand in a row."""

    def kernel(source, source_slots, to, to_slots):
        num_heads, size = source.shape[1], source.shape[3]
        source_size, to_size = np.int64(source.shape[2]), np.int64(to.shape[2])
        num_tokens = max(source_slots.shape[0], to_slots.shape[0])
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS):
            i, h = row // num_heads, row % num_heads
            a = number_at(source_slots, i) if source_slots.shape[0] else i
            b = number_at(to_slots, i) if to_slots.shape[0] else i
            if a < 0 or a >= source.shape[0] * source_size or b < 0 or b >= to.shape[0] * to_size:
                continue
            for w in range(cuda.threadIdx.x, size, LANES):
                to[b // to_size, h, b % to_size, w] = source[
                    a // source_size, h, a % source_size, w
                ]

    return kernel


@functools.cache
def _copy_tokens(bytes_: int) -> Any:
    words = array(_UNSIGNED[bytes_], 4)
    return jit(make_copy_tokens, (bytes_,), (words, INDICES, words, INDICES), 8)


@implements(Operations.copy_tokens)
def copy_tokens(source, source_slots, to, to_slots):
    if 0 in (source.size, to.size, source_slots.size):
        return
    bytes_ = source.dtype.itemsize * (source.shape[3] if len(source.shape) == 4 else 1)
    word = next(n for n in (8, 4, 2, 1) if bytes_ % n == 0)
    one = source is to
    source, to = (
        x.reshape((x.size,)).view(np.dtype(f"u{word}")).reshape((*x.shape[:3], bytes_ // word))
        for x in (source, to)
    )
    heads, n = source.shape[1], source_slots.shape[0]
    kernel, in_a_row = _copy_tokens(word), memory.empty((0,), np.int64)

    def copy(source, source_slots, to, to_slots, tokens):
        blocks = ceil_div(tokens * heads, ROWS)
        launch(kernel, blocks, (LANES, ROWS), source, source_slots, to, to_slots)

    if not one:
        copy(source, source_slots, to, to_slots, n)
        return
    for first in range(0, n, ASIDE):
        part = slice(first, min(n, first + ASIDE))
        tokens = part.stop - first
        aside = memory.empty((1, heads, tokens, source.shape[3]), source.dtype)
        copy(source, source_slots[part], aside, in_a_row, tokens)
        copy(aside, in_a_row, to, to_slots[part], tokens)


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for bytes_ in (1, 8):
        yield f"copy_blocks[{_UNSIGNED[bytes_]}]", *_copy_blocks(bytes_).described
        yield f"copy_tokens[{_UNSIGNED[bytes_]}]", *_copy_tokens(bytes_).described
