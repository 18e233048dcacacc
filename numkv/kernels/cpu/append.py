"""Append ready rows to a cache, on the CPU.

Operations:

`append_rows`
    ``pool[block, h, offset] = rows[t, h]``, where the block table gives token ``start + t`` the slot ``block *
    block_size + offset``. Rows of another kind are converted or quantised.
`scatter_rows`
    The same, with a slot for each row; slot -1 skips the row.
`copy_rows`
    ``cache[b, h, offsets[b] + t] = new[b, h, t]`` word for word; rows that fall outside the cache are skipped.
`small_append`, `small_copy`
    K and V of a small call in one compiled function, checks included. A token of one sequence is moved so fast that
    arguments are most of the cost: each array that is passed to compiled code costs as much.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu import overlap
from numkv.kernels.cpu.overlap import lie_well
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import by_row, row_of, table_of
from numkv.kernels.cpu.vectors.coding import row_storer, token_storer
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.address import slot_of
from numkv.rows.codec import elements_in
from numkv.rows.convert import codec
from numkv.rows.quantize import finite_row


def token_writer(SRC, DST):
    """The function that puts the rows of a token, of kind `SRC`, into a pool of kind `DST`.

    ``put(rows, t, pool, scales, slot, x)``; `x` has room for these rows as float32, to work in.
    """
    load, _ = codec(SRC)
    store_row = row_storer(DST)

    @register_jitable
    def put_one_by_one(rows, t, pool, scales, slot, x):
        block, offset = slot // pool.shape[2], slot % pool.shape[2]
        floats = x[: rows.shape[2]]
        for h in range(rows.shape[1]):
            source = row_of(rows, (np.int64(t), np.int64(h)))
            words = row_of(pool, (block, np.int64(h), offset))
            if SRC == DST:
                for d in range(len(source)):
                    words[d] = source[d]
            elif SRC == "fp32":
                store_row(source, words, row_of(scales, (block, np.int64(h), offset)))
            else:
                for d in range(len(source)):
                    floats[d] = load(source[d])
                store_row(floats, words, row_of(scales, (block, np.int64(h), offset)))

    return token_storer(DST, SRC) or put_one_by_one


def make_append_rows(SRC, DST, BY_SLOT):
    """Make the kernel that puts rows of kind `SRC` into a pool of kind `DST`, by given slots or by a block table."""
    put = token_writer(SRC, DST)

    def kernel(rows, pool, scale, places, start, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_tokens, block_size = np.int64(rows.shape[0]), np.int64(pool.shape[2])
        scales = by_row(scale)
        x = np.empty(rows.shape[1] * rows.shape[2], np.float32)
        for t in range(num_tokens * worker // workers, num_tokens * (worker + 1) // workers):
            if BY_SLOT:
                slot = np.int64(places[t])
                if slot < 0:
                    continue
            else:
                slot = slot_of(places, start + t, block_size)
            put(rows, t, pool, scales, slot, x)

    return kernel


@functools.cache
def _append_rows(src: str, dst: str, by_slot: bool) -> Any:
    place = types.int64 if by_slot else types.int32
    signature = (
        array(WORDS[src], 3), array(WORDS[dst], 4, out=True), array(*SCALES[dst], out=True),
        array(place, 1), types.int64, *ON_THREADS,
    )  # fmt: skip
    label = f"{'scatter_rows' if by_slot else 'append_rows'}, {src} to {dst}"
    return build(
        make_append_rows, signature, args=(src, dst, by_slot), label=label, emit=types.none
    )


def make_small_append(SRC, DST, BY_SLOT):
    """Make the kernel that checks and stores rows of K and V of kind `SRC` in pools of kind `DST`, on one thread."""
    all_finite, put = finite_row(SRC), token_writer(SRC, DST)
    OF_POOL = kind(DST)
    QUANTISED, GROUP, elements = OF_POOL.has_scales, OF_POOL.group_size, elements_in(OF_POOL)

    def kernel(k, v, k_pool, v_pool, k_scale, v_scale, places, start, room, look):
        num_tokens, heads = np.int64(k.shape[0]), np.int64(k_pool.shape[1])
        num_blocks, block_size = np.int64(k_pool.shape[0]), np.int64(k_pool.shape[2])
        if (BY_SLOT and len(places) != num_tokens) or (not BY_SLOT and num_tokens > room):
            return -1
        for rows, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
            if rows.shape[0] != num_tokens or rows.shape[1] != heads:
                return -1
            if rows.shape[2] != elements(pool.shape[3]):
                return -1
            if rows.strides[2] != rows.itemsize or pool.strides[3] != pool.itemsize:
                return -1
            if pool.shape[0] != num_blocks or pool.shape[1] != heads or pool.shape[2] != block_size:
                return -1
            if QUANTISED:
                if scale.shape[0] != num_blocks or scale.shape[1] != heads:
                    return -1
                if scale.shape[2] != block_size or scale.strides[scale.ndim - 1] != scale.itemsize:
                    return -1
                if GROUP and scale.shape[3] != (rows.shape[2] + GROUP - 1) // GROUP:
                    return -1
        arrays = (k_pool, v_pool, k_scale, v_scale, k, v, places)
        if not lie_well(None, (table_of(arrays), np.int64(0 if BY_SLOT else 4), np.int64(4))):
            return -1
        if BY_SLOT:
            for t in range(num_tokens):
                if places[t] < -1 or places[t] >= num_blocks * block_size:
                    return -1
        if QUANTISED and look:
            for rows in (k, v):
                for t in range(num_tokens):
                    for h in range(heads):
                        if not all_finite(row_of(rows, (np.int64(t), np.int64(h)))):
                            return -1
        x = np.empty(heads * max(k.shape[2], v.shape[2]), np.float32)
        for rows, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
            scales = by_row(scale)
            for t in range(num_tokens):
                if BY_SLOT:
                    slot = np.int64(places[t])
                    if slot < 0:
                        continue
                else:
                    slot = slot_of(places, start + t, block_size)
                put(rows, t, pool, scales, slot, x)
        return num_tokens

    return kernel


@implements(Operations.small_append)
@functools.cache
def small_append(rows_kind, pool_kind, by_slot):
    rows, pool = array(WORDS[rows_kind], 3), array(WORDS[pool_kind], 4, out=True)
    scale = array(*SCALES[pool_kind], out=True)
    signature = (
        rows, rows, pool, pool, scale, scale, array(types.int64 if by_slot else types.int32, 1),
        types.int64, types.int64, types.boolean,
    )  # fmt: skip
    overlap.provide()
    label = f"small_append, {rows_kind} to {pool_kind}{', by slot' if by_slot else ''}"
    return build(
        make_small_append, signature, args=(rows_kind, pool_kind, by_slot), label=label, emit=types.int64
    )  # fmt: skip


@implements(Operations.append_rows)
def append_rows(rows, rows_kind, pool, pool_kind, scale, block_table, start):
    kernel = _append_rows(rows_kind, pool_kind, False)
    run(kernel, workers_for(rows.size), rows, pool, scale, block_table, start)


@implements(Operations.scatter_rows)
def scatter_rows(rows, rows_kind, pool, pool_kind, scale, slot_mapping):
    kernel = _append_rows(rows_kind, pool_kind, True)
    run(kernel, workers_for(rows.size), rows, pool, scale, slot_mapping, 0)


@register_jitable
def _landing(first, new_len, num_rows):
    """Which of the new rows ``[low, high)`` land in a cache; offsets far outside must not overflow the sums."""
    low = high = np.int64(0)
    if -new_len < first < num_rows:
        low = max(np.int64(0), -first)
        high = min(new_len, num_rows - first)
    return low, high


@register_jitable
def _copy_rows_of(new, cache, b, begin, end, first):
    """Copy new rows ``[begin, end)`` of sequence `b` to row `first` of its cache, and on."""
    for h in range(new.shape[1]):
        for t in range(begin, end):
            source = row_of(new, (b, np.int64(h), np.int64(t)))
            target = row_of(cache, (b, np.int64(h), np.int64(first + t)))
            for d in range(len(source)):
                target[d] = source[d]


def make_copy_rows(WORD):
    """Make the kernel that copies rows of `WORD` bytes an element at per-sequence offsets."""

    def kernel(new, cache, offsets, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_rows = np.int64(cache.shape[2])
        for b in range(new.shape[0]):
            low, high = _landing(offsets[b], np.int64(new.shape[2]), num_rows)
            begin = low + (high - low) * worker // workers
            end = low + (high - low) * (worker + 1) // workers
            _copy_rows_of(new, cache, np.int64(b), begin, end, offsets[b])

    return kernel


@functools.cache
def _copy_rows(bytes_: int) -> Any:
    word = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[bytes_]
    signature = (array(word, 4), array(word, 4, out=True), array(types.int64, 1), *ON_THREADS)
    label = f"copy_rows, {bytes_} bytes an element"
    return build(make_copy_rows, signature, args=(bytes_,), label=label, emit=types.none)


@implements(Operations.copy_rows)
def copy_rows(new, cache, offsets):
    bits = f"u{new.dtype.itemsize}"
    kernel = _copy_rows(new.dtype.itemsize)
    run(kernel, workers_for(new.size), new.view(bits), cache.view(bits), offsets)


def make_small_copy():
    """Make the kernel that checks and copies new rows of K and V into contiguous caches, on one thread."""

    def kernel(k_new, v_new, k_cache, v_cache, offsets):
        batch, heads, tokens, size = (
            k_new.shape[0], k_new.shape[1], k_new.shape[2], np.int64(k_cache.shape[2]),
        )  # fmt: skip
        if len(offsets) != batch:
            return False
        for new, cache in ((k_new, k_cache), (v_new, v_cache)):
            if new.shape[0] != batch or new.shape[1] != heads or new.shape[2] != tokens:
                return False
            if cache.shape[0] != batch or cache.shape[1] != heads or cache.shape[2] != size:
                return False
            if new.shape[3] != cache.shape[3]:
                return False
            if new.strides[3] != new.itemsize or cache.strides[3] != cache.itemsize:
                return False
        arrays = (k_cache, v_cache, k_new, v_new, offsets)
        if not lie_well(None, (table_of(arrays), np.int64(0), np.int64(2))):
            return False
        for new, cache in ((k_new, k_cache), (v_new, v_cache)):
            for b in range(batch):
                low, high = _landing(offsets[b], np.int64(tokens), size)
                _copy_rows_of(new, cache, np.int64(b), low, high, offsets[b])
        return True

    return kernel


@implements(Operations.small_copy)
@functools.cache
def small_copy(rows_kind):
    word = WORDS[rows_kind]
    new, cache = array(word, 4), array(word, 4, out=True)
    signature = (new, new, cache, cache, array(types.int64, 1))
    overlap.provide()
    return build(
        make_small_copy, signature, args=(), label=f"small_copy, {rows_kind}", emit=types.boolean
    )


@implements(Operations.append_both)
def append_both(k, v, block_table, start, look=0):
    append_rows(*k, block_table, start)
    append_rows(*v, block_table, start)


@implements(Operations.scatter_both)
def scatter_both(k, v, slot_mapping, look=0):
    scatter_rows(*k, slot_mapping)
    scatter_rows(*v, slot_mapping)


@implements(Operations.copy_both)
def copy_both(k_new, k_cache, v_new, v_cache, offsets):
    copy_rows(k_new, k_cache, offsets)
    copy_rows(v_new, v_cache, offsets)
