"""Append ready rows to a cache, on the CPU.

Two operations:

`append_rows`
    ``pool[block, h, offset] = rows[t, h]`` where token ``start + t`` lies in slot ``block * block_size + offset`` by
    the block table; elements are converted when the rows come in another kind.
`copy_rows`
    ``cache[b, h, offsets[b] + t] = new[b, h, t]`` word for word; rows that fall outside the cache are skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.cpu.simd import row_of
from numkv.kernels.kernel import WORDS, array, build
from numkv.rows.address import slot_of
from numkv.rows.convert import codec

__all__ = ["append_rows", "copy_rows"]


def make_append_rows(SRC, DST):
    """The kernel that appends rows of kind `SRC` to a pool of kind `DST`."""
    load, _ = codec(SRC)
    _, store = codec(DST)

    def kernel(rows, pool, block_table, start):
        block_size = np.int64(pool.shape[2])
        for t in range(rows.shape[0]):
            slot = slot_of(block_table, start + t, block_size)
            for h in range(rows.shape[1]):
                source = row_of(rows, (np.int64(t), np.int64(h)))
                target = row_of(pool, (slot // block_size, np.int64(h), slot % block_size))
                for d in range(len(source)):
                    if SRC == DST:
                        target[d] = source[d]
                    else:
                        target[d] = store(load(source[d]))

    return kernel


@functools.cache
def _append_rows(src: str, dst: str) -> Any:
    signature = (
        array(WORDS[src], 3), array(WORDS[dst], 4, out=True), array(types.int32, 1), types.int64,
    )  # fmt: skip
    return build(make_append_rows(src, dst), signature, label=f"append_rows, {src} to {dst}")


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
    _append_rows(rows_kind, pool_kind)(rows, pool, block_table, start)


def make_copy_rows(WORD):
    """The kernel that copies rows of `WORD` bytes an element at per-sequence offsets."""

    def kernel(new, cache, offsets):
        num_rows = np.int64(cache.shape[2])
        for b in range(new.shape[0]):
            first = offsets[b]
            # Source rows [low, high) land inside; offsets far outside must not overflow the sums.
            low = high = np.int64(0)
            if -np.int64(new.shape[2]) < first < num_rows:
                low = max(np.int64(0), -first)
                high = min(np.int64(new.shape[2]), num_rows - first)
            for h in range(new.shape[1]):
                for t in range(low, high):
                    source = row_of(new, (np.int64(b), np.int64(h), np.int64(t)))
                    target = row_of(cache, (np.int64(b), np.int64(h), np.int64(first + t)))
                    for d in range(len(source)):
                        target[d] = source[d]

    return kernel


@functools.cache
def _copy_rows(bytes_: int) -> Any:
    word = {2: types.uint16, 4: types.uint32, 8: types.uint64}[bytes_]
    signature = (array(word, 4), array(word, 4, out=True), array(types.int64, 1))
    return build(make_copy_rows(bytes_), signature, label=f"copy_rows, {bytes_} bytes an element")


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
    stream : None
        For CUDA, where to run; the CPU has none.
    """
    bits = f"u{new.dtype.itemsize}"
    _copy_rows(new.dtype.itemsize)(new.view(bits), cache.view(bits), offsets)
