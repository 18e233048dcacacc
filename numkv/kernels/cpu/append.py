"""Append ready rows to a cache, on the CPU.

Three operations:

`append_rows`
    ``pool[block, h, offset] = rows[t, h]`` where token ``start + t`` lies in slot ``block * block_size + offset`` by
    the block table; rows are converted or quantised when they come in another kind.
`scatter_rows`
    The same, with the slot of each row given; slot -1 skips the row.
`copy_rows`
    ``cache[b, h, offsets[b] + t] = new[b, h, t]`` word for word; rows that fall outside the cache are skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.scales import by_row
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.address import slot_of
from numkv.rows.codec import row_codec
from numkv.rows.convert import codec

__all__ = ["append_rows", "copy_rows", "scatter_rows"]


def row_writer(SRC, DST):
    """The function that puts one row of kind `SRC` into words of kind `DST`.

    ``put(source, words, scales, x)``; `x` is a row of float32 to work in.
    """
    load, _ = codec(SRC)
    store_row, _ = row_codec(DST)

    @register_jitable
    def put(source, words, scales, x):
        if SRC == DST:
            for d in range(len(source)):
                words[d] = source[d]
        else:
            for d in range(len(source)):
                x[d] = load(source[d])
            store_row(x, words, scales)

    return put


def make_append_rows(SRC, DST, BY_SLOT):
    """The kernel that puts rows of kind `SRC` into a pool of kind `DST`, by given slots or by a block table."""
    put = row_writer(SRC, DST)

    def kernel(rows, pool, scale, places, start, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_tokens, block_size = np.int64(rows.shape[0]), np.int64(pool.shape[2])
        scales = by_row(scale)
        x = np.empty(rows.shape[2], np.float32)
        for t in range(num_tokens * worker // workers, num_tokens * (worker + 1) // workers):
            if BY_SLOT:
                slot = np.int64(places[t])
                if slot < 0:
                    continue
            else:
                slot = slot_of(places, start + t, block_size)
            block, offset = slot // block_size, slot % block_size
            for h in range(rows.shape[1]):
                place = (block, np.int64(h), offset)
                source = row_of(rows, (np.int64(t), np.int64(h)))
                put(source, row_of(pool, place), row_of(scales, place), x)

    return kernel


@functools.cache
def _append_rows(src: str, dst: str, by_slot: bool) -> Any:
    place = types.int64 if by_slot else types.int32
    signature = (
        array(WORDS[src], 3), array(WORDS[dst], 4, out=True), array(*SCALES[dst], out=True),
        array(place, 1), types.int64, *ON_THREADS,
    )  # fmt: skip
    label = f"{'scatter_rows' if by_slot else 'append_rows'}, {src} to {dst}"
    return build(make_append_rows, signature, args=(src, dst, by_slot), label=label)


@implements(Operations.append_rows)
def append_rows(rows, rows_kind, pool, pool_kind, scale, block_table, start):
    kernel = _append_rows(rows_kind, pool_kind, False)
    run(kernel, workers_for(rows.size), rows, pool, scale, block_table, start)


@implements(Operations.scatter_rows)
def scatter_rows(rows, rows_kind, pool, pool_kind, scale, slot_mapping):
    kernel = _append_rows(rows_kind, pool_kind, True)
    run(kernel, workers_for(rows.size), rows, pool, scale, slot_mapping, 0)


def make_copy_rows(WORD):
    """The kernel that copies rows of `WORD` bytes an element at per-sequence offsets."""

    def kernel(new, cache, offsets, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_rows = np.int64(cache.shape[2])
        for b in range(new.shape[0]):
            first = offsets[b]
            # Source rows [low, high) land inside; offsets far outside must not overflow the sums.
            low = high = np.int64(0)
            if -np.int64(new.shape[2]) < first < num_rows:
                low = max(np.int64(0), -first)
                high = min(np.int64(new.shape[2]), num_rows - first)
            begin = low + (high - low) * worker // workers
            end = low + (high - low) * (worker + 1) // workers
            for h in range(new.shape[1]):
                for t in range(begin, end):
                    source = row_of(new, (np.int64(b), np.int64(h), np.int64(t)))
                    target = row_of(cache, (np.int64(b), np.int64(h), np.int64(first + t)))
                    for d in range(len(source)):
                        target[d] = source[d]

    return kernel


@functools.cache
def _copy_rows(bytes_: int) -> Any:
    word = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[bytes_]
    signature = (array(word, 4), array(word, 4, out=True), array(types.int64, 1), *ON_THREADS)
    label = f"copy_rows, {bytes_} bytes an element"
    return build(make_copy_rows, signature, args=(bytes_,), label=label)


@implements(Operations.copy_rows)
def copy_rows(new, cache, offsets, stream=None):
    bits = f"u{new.dtype.itemsize}"
    kernel = _copy_rows(new.dtype.itemsize)
    run(kernel, workers_for(new.size), new.view(bits), cache.view(bits), offsets)
