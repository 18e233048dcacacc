"""K and V of a small call in one compiled function, checks included, on the CPU.

A token of one sequence is moved so fast that what a call costs is its arguments: each array that compiled code is
handed costs as much. The functions built here look at shapes, steps and values themselves, and
return False or -1, with nothing written, where anything is not as it should be. The caller goes the general way then,
which does it, or says what is wrong. Element types and ranks are the signature's: calls with others raise
``TypeError``, with nothing written either.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.append import row_writer
from numkv.kernels.cpu.scales import by_row
from numkv.kernels.cpu.vectors.arrays import is_aligned, row_of
from numkv.kinds import kind
from numkv.rows.address import slot_of
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite

__all__ = ["copy_both", "store_both"]


def make_copy_both():
    """The kernel that copies new rows of K and V into contiguous caches; see `numkv.append`."""

    def kernel(k_new, v_new, k_cache, v_cache, offsets):
        batch, heads, tokens, size = (
            k_new.shape[0], k_new.shape[1], k_new.shape[2], np.int64(k_cache.shape[2]),
        )  # fmt: skip
        if len(offsets) != batch or not is_aligned(offsets):
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
            if not (is_aligned(new) and is_aligned(cache)):
                return False
        for new, cache in ((k_new, k_cache), (v_new, v_cache)):
            for b in range(batch):
                first = offsets[b]
                # Rows [low, high) land inside; offsets far outside must not overflow the sums.
                low = high = np.int64(0)
                if -np.int64(tokens) < first < size:
                    low = max(np.int64(0), -first)
                    high = min(np.int64(tokens), size - first)
                for h in range(heads):
                    for t in range(low, high):
                        source = row_of(new, (np.int64(b), np.int64(h), np.int64(t)))
                        target = row_of(cache, (np.int64(b), np.int64(h), np.int64(first + t)))
                        for d in range(len(source)):
                            target[d] = source[d]
        return True

    return kernel


@functools.cache
def copy_both(kind: str) -> Any:
    """``copy_both(k_new, v_new, k_cache, v_cache, offsets) -> bool`` for rows and caches of a float kind's words."""
    word = WORDS[kind]
    new, cache = array(word, 4), array(word, 4, out=True)
    signature = (new, new, cache, cache, array(types.int64, 1))
    return build(make_copy_both, signature, args=(), label=f"copy_both, {kind}")


def make_store_both(SRC, DST, BY_SLOT):
    """The kernel that puts rows of K and V of kind `SRC` into pools of kind `DST`, by slots or by a block table."""
    load, _ = codec(SRC)
    put = row_writer(SRC, DST)
    OF_POOL = kind(DST)
    PER_WORD, QUANTISED, GROUP = OF_POOL.elements_per_word, OF_POOL.has_scales, OF_POOL.group_size

    def kernel(k, v, k_pool, v_pool, k_scale, v_scale, places, start, room, look):
        num_tokens, heads = np.int64(k.shape[0]), np.int64(k_pool.shape[1])
        num_blocks, block_size = np.int64(k_pool.shape[0]), np.int64(k_pool.shape[2])
        if (BY_SLOT and len(places) != num_tokens) or (not BY_SLOT and num_tokens > room):
            return -1
        if not is_aligned(places):
            return -1
        for rows, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
            if rows.shape[0] != num_tokens or rows.shape[1] != heads:
                return -1
            if rows.shape[2] != PER_WORD * pool.shape[3]:
                return -1
            if rows.strides[2] != rows.itemsize or pool.strides[3] != pool.itemsize:
                return -1
            if not (is_aligned(rows) and is_aligned(pool) and is_aligned(scale)):
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
        if BY_SLOT:
            for t in range(num_tokens):
                if places[t] < -1 or places[t] >= num_blocks * block_size:
                    return -1
        if QUANTISED and look:
            for rows in (k, v):
                for t in range(num_tokens):
                    for h in range(heads):
                        row = row_of(rows, (np.int64(t), np.int64(h)))
                        bad = np.int64(0)
                        for d in range(len(row)):
                            bad += 0 if is_finite(load(row[d])) else 1
                        if bad:
                            return -1
        x = np.empty(max(k.shape[2], v.shape[2]), np.float32)
        for rows, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
            floats, scales = x[: rows.shape[2]], by_row(scale)
            for t in range(num_tokens):
                if BY_SLOT:
                    slot = np.int64(places[t])
                    if slot < 0:
                        continue
                else:
                    slot = slot_of(places, start + t, block_size)
                block, offset = slot // block_size, slot % block_size
                for h in range(heads):
                    place = (block, np.int64(h), offset)
                    source = row_of(rows, (np.int64(t), np.int64(h)))
                    put(source, row_of(pool, place), row_of(scales, place), floats)
        return num_tokens

    return kernel


@functools.cache
def store_both(src: str, dst: str, by_slot: bool) -> Any:
    """The function for rows of kind `src` and pools of kind `dst`, in words.

    ``store_both(k, v, k_pool, v_pool, k_scale, v_scale, places, start, room, look) -> int``: tokens written, or -1.
    `places` are int64 slots, or the int32 block table of one sequence, whose first new token has position `start` and
    which has room for `room` more; `look` says whether rows that are to be quantised are searched for NaN and infinity
    first.
    """
    rows, pool = array(WORDS[src], 3), array(WORDS[dst], 4, out=True)
    scale = array(*SCALES[dst], out=True)
    signature = (
        rows, rows, pool, pool, scale, scale, array(types.int64 if by_slot else types.int32, 1),
        types.int64, types.int64, types.boolean,
    )  # fmt: skip
    label = f"store_both, {src} to {dst}{', by slot' if by_slot else ''}"
    return build(make_store_both, signature, args=(src, dst, by_slot), label=label)
