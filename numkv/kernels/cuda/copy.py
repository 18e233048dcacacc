"""Copy stored blocks and tokens, word for word, on CUDA; see `numkv.kernels.cpu.copy` for the operations.

Blocks and rows are copied in the widest words that divide them. Pairs with a block or slot outside its pool are
skipped.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.cuda import memory
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import INDICES, THREADS, UNSIGNED, Kernel, array, launch, number_at
from numkv.kernels.cuda.octets import copy_row, lanes_for, rows_aligned
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, natural
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kernels.operations import Operations, implements

PIECE = 8 * THREADS  # words of a cache's block that a block of threads copies at once
ASIDE = 3 if SIMULATED else 4096  # tokens in scratch memory at once while they move in a buffer


def make_copy_blocks(WORD):
    """Make the kernel that copies blocks of words of `WORD` bytes."""

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


def make_copy_blocks_16():
    """Make the kernel that copies blocks that are multiples of 16 bytes."""

    def kernel(source, source_ids, to, to_ids):
        size = np.int64(source.shape[1]) >> 1  # of which PIECE / 2 are taken at once
        pieces = natural((size + PIECE // 2 - 1) // (PIECE // 2))
        for item in range(
            np.int64(cuda.blockIdx.x), source_ids.shape[0] * pieces, np.int64(cuda.gridDim.x)
        ):
            i = item // pieces
            first = (item - i * pieces) * (PIECE // 2)
            a, b = number_at(source_ids, i), number_at(to_ids, i)
            if a < 0 or a >= source.shape[0] or b < 0 or b >= to.shape[0]:
                continue
            copy_row(
                global_address(source) + a * source.strides[0] + first * 16,
                global_address(to) + b * to.strides[0] + first * 16,
                min(size - first, np.int64(PIECE // 2)), np.int64(cuda.threadIdx.x), np.int64(THREADS),
            )  # fmt: skip

    return kernel


@functools.cache
def _copy_blocks(bytes_: int) -> Any:
    if bytes_ == 16:
        words = array(types.uint64, 2)
        return Kernel(make_copy_blocks_16, (), (words, INDICES, words, INDICES), 8)
    words = array(UNSIGNED[bytes_], 2)
    return Kernel(make_copy_blocks, (bytes_,), (words, INDICES, words, INDICES), 8)


def _in_words(x: Any, axes: tuple[int, ...], word: int) -> Any:
    """Return a view in words of `word` bytes: `axes` stay, and one axis merges the rest, which is contiguous."""
    count = math.prod(x.shape[len(axes) :]) * x.dtype.itemsize // word
    shape, dtype = (*axes, count), np.dtype(f"u{word}")
    if SIMULATED:
        flat = x.reshape((*axes, math.prod(x.shape[len(axes) :])))
        return flat.view(dtype)
    return memory.viewed(x, shape, (*x.strides[: len(axes)], word), dtype)


@implements(Operations.copy_blocks)
def copy_blocks(source, source_ids, to, to_ids):
    if 0 in (source.size, to.size, source_ids.size):
        return
    size = math.prod(source.shape[1:]) * source.dtype.itemsize
    word = next(n for n in (8, 4, 2, 1) if size % n == 0)
    flat = [_in_words(x, (x.shape[0],), word) for x in (source, to)]
    blocks = source_ids.shape[0] * ceil_div(size // word, PIECE)
    if not SIMULATED and size % 16 == 0 and all(rows_aligned(x) for x in flat):
        word = 16
    launch(_copy_blocks(word), blocks, THREADS, flat[0], source_ids, flat[1], to_ids)


def make_copy_tokens(WORD):
    """Make the kernel that copies tokens in words of `WORD` bytes; without slots, tokens are consecutive."""

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


def make_copy_tokens_16():
    """Make the kernel of `make_copy_tokens` for rows of a multiple of 16 bytes; `lanes` is log2 of a row's threads."""

    def kernel(source, source_slots, to, to_slots, log):
        num_heads, pieces = natural(source.shape[1]), natural(source.shape[3]) >> 1
        source_size, to_size = natural(source.shape[2]), natural(to.shape[2])
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        num_rows = max(source_slots.shape[0], to_slots.shape[0]) * num_heads
        for item in range(
            np.int64(cuda.blockIdx.x) * at_once + (thread >> log), num_rows, np.int64(cuda.gridDim.x) * at_once
        ):  # fmt: skip
            row = natural(item)
            i = row // num_heads
            h = row - i * num_heads
            a = number_at(source_slots, i) if source_slots.shape[0] else i
            b = number_at(to_slots, i) if to_slots.shape[0] else i
            if a < 0 or a >= source.shape[0] * source_size or b < 0 or b >= to.shape[0] * to_size:
                continue
            a_block, b_block = natural(a) // source_size, natural(b) // to_size
            steps, to_steps = source.strides, to.strides
            copy_row(
                global_address(source) + a_block * steps[0] + h * steps[1]
                + (natural(a) - a_block * source_size) * steps[2],
                global_address(to) + b_block * to_steps[0] + h * to_steps[1]
                + (natural(b) - b_block * to_size) * to_steps[2],
                pieces, thread & (lanes - 1), lanes,
            )  # fmt: skip

    return kernel


@functools.cache
def _copy_tokens(bytes_: int) -> Any:
    if bytes_ == 16:
        words = array(types.uint64, 4)
        return Kernel(make_copy_tokens_16, (), (words, INDICES, words, INDICES, types.int64), 8)
    words = array(UNSIGNED[bytes_], 4)
    return Kernel(make_copy_tokens, (bytes_,), (words, INDICES, words, INDICES), 8)


@implements(Operations.copy_tokens)
def copy_tokens(source, source_slots, to, to_slots):
    if 0 in (source.size, to.size, source_slots.size):
        return
    bytes_ = source.dtype.itemsize * (source.shape[3] if len(source.shape) == 4 else 1)
    word = next(n for n in (8, 4, 2, 1) if bytes_ % n == 0)
    one = source is to
    source, to = (_in_words(x, x.shape[:3], word) for x in (source, to))
    heads, n = source.shape[1], source_slots.shape[0]
    wide = not SIMULATED and bytes_ % 16 == 0 and rows_aligned(source) and rows_aligned(to)
    wide = wide and max(_slots(source), _slots(to), n * heads) < 1 << 31
    kernel, in_a_row = _copy_tokens(16 if wide else word), memory.empty((0,), np.int64)

    def copy(source, source_slots, to, to_slots, tokens):
        if wide:
            lanes = lanes_for(bytes_ // 16)
            blocks = ceil_div(tokens * heads, THREADS >> lanes)
            launch(kernel, blocks, THREADS, source, source_slots, to, to_slots, lanes)
            return
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


def _slots(x: Any) -> int:
    return x.shape[0] * x.shape[2]
