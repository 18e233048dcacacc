"""Append ready rows to a cache, on CUDA; see `numkv.kernels.cpu.append` for the two operations.

A warp takes a row, its lanes adjacent elements. Rows whose block lies outside the pool are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.cuda.simd import LANES, THREADS, c_array, ceil_div, jit, launch
from numkv.kernels.kernel import WORDS
from numkv.rows.address import slot_of
from numkv.rows.convert import codec

__all__ = ["append_rows", "copy_rows"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_append_rows(SRC, DST):
    """The kernel that appends rows of kind `SRC` to a pool of kind `DST`."""
    load, _ = codec(SRC)
    _, store = codec(DST)

    def kernel(rows, pool, block_table, start):
        num_tokens, num_heads, dim = rows.shape
        num_blocks, block_size = pool.shape[0], np.int64(pool.shape[2])
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS):
            t, h = row // num_heads, row % num_heads
            position = start + t
            if position < 0 or position >= block_table.shape[0] * block_size:
                continue
            slot = slot_of(block_table, position, block_size)
            if slot < 0 or slot >= num_blocks * block_size:
                continue
            block, offset = slot // block_size, slot % block_size
            for d in range(cuda.threadIdx.x, dim, LANES):
                if SRC == DST:
                    pool[block, h, offset, d] = rows[t, h, d]
                else:
                    pool[block, h, offset, d] = store(load(rows[t, h, d]))

    return kernel


@functools.cache
def _append_rows(src: str, dst: str) -> Any:
    return jit(make_append_rows(src, dst), 8)


def append_rows(rows, rows_kind, pool, pool_kind, block_table, start):
    """Append the rows of one sequence.

    Parameters
    ----------
    rows : array (num_tokens, num_kv_heads, head_dim)
        New K or V rows, in the words of `rows_kind`.
    rows_kind : str
        Their kind.
    pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Where they go, in the words of `pool_kind`.
    pool_kind : str
        Its kind.
    block_table : int32 array (max_blocks,)
        The sequence's blocks.
    start : int
        Position of the first new token.
    """
    blocks = ceil_div(rows.shape[0] * rows.shape[1], ROWS)
    kernel = _append_rows(rows_kind, pool_kind)
    launch(kernel, blocks, (LANES, ROWS), rows, pool, block_table, start)


def make_copy_rows(WORD):
    """The kernel that copies rows of `WORD` bytes an element at per-sequence offsets."""

    def kernel(new, cache, offsets):
        num_seqs, num_heads, new_len, dim = new.shape
        num_rows = np.int64(cache.shape[2])
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        rows = num_seqs * num_heads * new_len
        for row in range(first, rows, np.int64(cuda.gridDim.x) * ROWS):
            t = row % new_len
            h = row // new_len % num_heads
            b = row // new_len // num_heads
            offset = np.int64(offsets[b])
            # Compared this way round so that an offset far outside does not overflow the sum.
            if offset < -t or offset >= num_rows - t:
                continue
            for d in range(cuda.threadIdx.x, dim, LANES):
                cache[b, h, offset + t, d] = new[b, h, t, d]

    return kernel


@functools.cache
def _copy_rows(bytes_: int) -> Any:
    return jit(make_copy_rows(bytes_), 8)


def copy_rows(new, cache, offsets, stream=None):
    """Copy rows into a cache at an offset per sequence; rows outside the cache are skipped.

    Parameters
    ----------
    new : array (batch, num_heads, new_len, head_dim)
        Rows, in words (uint16, float32 or float64) that are copied bit by bit.
    cache : array (batch, num_heads, max_cache_len, head_dim)
        The cache, in the same words.
    offsets : int64 array (batch,)
        Row of each sequence that its first new row goes to; any value.
    stream : object, optional
        Stream to run on; the default stream if None.
    """
    bits = np.dtype(f"u{new.dtype.itemsize}")  # a float's copy might quieten a NaN
    blocks = ceil_div(new.shape[0] * new.shape[1] * new.shape[2], ROWS)
    kernel = _copy_rows(bits.itemsize)
    launch(
        kernel, blocks, (LANES, ROWS), new.view(bits), cache.view(bits), offsets, stream=stream
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for src, dst in dict.fromkeys([(k, k) for k in WORDS] + [("fp32", k) for k in WORDS]):
        signature = (
            c_array(WORDS[src], 3), c_array(WORDS[dst], 4), c_array(types.int32, 1), types.int64,
        )  # fmt: skip
        yield f"append_rows[{src} to {dst}]", make_append_rows(src, dst), signature
    for word in (types.uint16, types.uint32, types.uint64):
        signature = (c_array(word, 4), c_array(word, 4), c_array(types.int64, 1))
        yield f"copy_rows[{word}]", make_copy_rows(word.bitwidth // 8), signature
