"""Append ready rows to a cache, on CUDA; see `numkv.kernels.cpu.append` for the three operations.

A warp takes a row, its lanes adjacent elements. Rows whose slot lies outside the pool are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda import late
from numkv.kernels.cuda.launches import INDICES, MAX_BLOCKS, array, jit, launch, number_at, whole
from numkv.kernels.cuda.rows import (
    V_SIDE,
    first_bad_of,
    needs_peak,
    row_store,
    slot_finder,
    zero_int4_group,
)
from numkv.kernels.cuda.simd import LANES, STORED_ONLY, THREADS, ceil_div
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.int4 import GROUP, store_int4_group
from numkv.rows.quantize import is_finite

__all__ = [
    "append_both", "append_rows", "copy_both", "copy_rows", "scatter_both", "scatter_rows", "small_append",
    "small_copy",
]  # fmt: skip

ROWS = THREADS // LANES  # rows that a block takes at once


def make_append_rows(SRC, DST, BY_SLOT):
    """The function that puts rows of kind `SRC` into a pool of kind `DST`, by given slots or by a block table.

    ``append(rows, pool, scale, places, start, block, num_blocks, peaks, look, found, raised)``, of which a block of
    threads does the part number `block` of `num_blocks`. What is not finite is reported as `look` plus its index, in
    the word of `found` that its token has; see `numkv.kernels.cuda.late`.
    """
    load, _ = codec(SRC)
    find, (peak, put) = slot_finder(BY_SLOT), row_store(DST, "float32", load)
    first_bad = first_bad_of(load)
    NEEDS_PEAK = needs_peak(DST)

    @register_jitable
    def append(rows, pool, scale, places, start, part, num_parts, peaks, look, found, raised):
        num_tokens, num_heads, dim = rows.shape
        num_blocks, block_size = pool.shape[0], np.int64(pool.shape[2])
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        # All threads go round equally often, as those that quantise wait for each other inside.
        for first in range(part * ROWS, num_tokens * num_heads, num_parts * ROWS):
            row = first + warp
            t, h = row // num_heads, row % num_heads
            slot = np.int64(-1)
            if row < num_tokens * num_heads:
                slot = find(places, t, start, block_size)
            here = slot >= 0 and slot < num_blocks * block_size
            if NEEDS_PEAK:
                largest = np.float32(0)
                if here:
                    largest = peak(rows[t, h], 0, dim, lane)
                    if look > 0:
                        d = first_bad(rows[t, h], 0, dim, lane)
                        if d >= 0:
                            largest = np.float32(np.inf)
                            cuda.atomic.min(found, t & (found.shape[0] - 1), look + row * dim + d)
                            cuda.threadfence_system()
                            raised[0] = 1
                peaks[warp, lane] = largest
                cuda.syncthreads()
            if here:
                block, offset = slot // block_size, slot % block_size
                if SRC == DST:
                    for d in range(lane, dim, LANES):
                        pool[block, h, offset, d] = rows[t, h, d]
                else:
                    put(rows[t, h], 0, dim, pool, scale, block, h, offset, peaks, warp, lane, look)
            if NEEDS_PEAK:
                cuda.syncthreads()

    return append


def make_append_groups(SRC, BY_SLOT):
    """The function that puts rows of kind `SRC` into a pool of groups (INT4): a thread takes a group.

    See `make_append_rows`. Each thread looks at the whole row, as a row that is not finite is stored as zeros.
    """
    load, _ = codec(SRC)
    find = slot_finder(BY_SLOT)

    @register_jitable
    def append(rows, pool, scale, places, start, part, num_parts, peaks, look, found, raised):
        num_tokens, num_heads, dim = rows.shape
        num_slots, block_size = pool.shape[0] * np.int64(pool.shape[2]), np.int64(pool.shape[2])
        groups = np.int64(scale.shape[3])
        x = cuda.local.array(GROUP, np.float32)
        thread = cuda.threadIdx.y * np.int64(LANES) + cuda.threadIdx.x
        for item in range(
            part * np.int64(THREADS) + thread, num_tokens * num_heads * groups, num_parts * THREADS
        ):
            row, group = item // groups, item % groups
            t, h = row // num_heads, row % num_heads
            slot = find(places, t, start, block_size)
            if slot < 0 or slot >= num_slots:
                continue
            block, offset = slot // block_size, slot % block_size
            first = group * GROUP
            count = min(np.int64(GROUP), dim - first)
            words = pool[block, h, offset]
            bad = np.int64(-1)
            if look > 0:
                for d in range(dim):
                    if bad < 0 and not is_finite(load(rows[t, h, d])):
                        bad = np.int64(d)
            if bad >= 0:
                scale[block, h, offset, group] = zero_int4_group(count, words, first // 2)
                cuda.atomic.min(found, t & (found.shape[0] - 1), look + row * dim + bad)
                cuda.threadfence_system()
                raised[0] = 1
            else:
                for i in range(count):
                    x[i] = load(rows[t, h, first + i])
                scale[block, h, offset, group] = store_int4_group(x, 0, count, words, first // 2)

    return append


def make_append(K_SRC, K_KIND, V_SRC, V_KIND, BY_SLOT):
    """The kernel that puts rows of K and of V into their pools: some blocks take K, the others V."""
    SIDES = ((K_SRC, K_KIND), (V_SRC, V_KIND))
    append_k, append_v = (
        make_append_groups(src, BY_SLOT)
        if kind(dst).scales_per == "group"
        else make_append_rows(src, dst, BY_SLOT)
        for src, dst in SIDES
    )
    SHAPE = (ROWS, LANES) if any(kind(dst).scales_per == "row" for _, dst in SIDES) else (1, 1)

    def kernel(
        k, k_pool, k_scale, v, v_pool, v_scale, places, start, k_blocks, look, found, raised
    ):  # fmt: skip
        peaks = cuda.shared.array(SHAPE, np.float32)
        block, grid = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        if block < k_blocks:
            append_k(
                k, k_pool, k_scale, places, start, block, k_blocks, peaks, look, found, raised
            )  # fmt: skip
        else:
            look_v = look + V_SIDE if look > 0 else np.int64(0)
            append_v(
                v, v_pool, v_scale, places, start, block - k_blocks, grid - k_blocks, peaks, look_v, found,
                raised,
            )  # fmt: skip

    return kernel


@functools.cache
def _append(k_src: str, k_kind: str, v_src: str, v_kind: str, by_slot: bool) -> Any:
    sides = [
        (array(WORDS[src], 3), array(WORDS[dst], 4), array(*SCALES[dst]))
        for src, dst in ((k_src, k_kind), (v_src, v_kind))
    ]
    i64 = types.int64
    signature = (*sides[0], *sides[1], INDICES, i64, i64, i64, array(i64, 1), array(i64, 1))
    grouped = any(kind(name).scales_per == "group" for name in (k_kind, v_kind))
    key = (k_src, k_kind, v_src, v_kind, by_slot)
    return jit(make_append, key, signature, 4 if grouped else 8)


def _blocks(rows, pool_kind, scale):
    """Blocks that a launch wants: rows, or their groups, over the threads; half of what there may be."""
    num_rows = rows.shape[0] * rows.shape[1]
    if kind(pool_kind).scales_per == "group":
        wanted = ceil_div(num_rows * scale.shape[3], THREADS)
    else:
        wanted = ceil_div(num_rows, ROWS)
    return min(wanted, max(1, MAX_BLOCKS // 2))


def _both(k_side, v_side, places, start, look, by_slot):
    (k, k_src, k_pool, k_kind, k_scale), (v, v_src, v_pool, v_kind, v_scale) = k_side, v_side
    kernel = _append(k_src, k_kind, v_src, v_kind, by_slot)
    k_blocks, v_blocks = _blocks(k, k_kind, k_scale), _blocks(v, v_kind, v_scale)
    launch(
        kernel, k_blocks + v_blocks, (LANES, ROWS), k, k_pool, k_scale, v, v_pool, v_scale, places,
        whole(start), k_blocks, look, *late.flags(look),
    )  # fmt: skip


def _one(rows, rows_kind, pool, pool_kind, scale, places, start, by_slot):
    """Append rows of one side: the kernel for both, of whose blocks none takes the other side."""
    kernel, blocks = (
        _append(rows_kind, pool_kind, rows_kind, pool_kind, by_slot),
        _blocks(rows, pool_kind, scale),
    )
    launch(
        kernel, blocks, (LANES, ROWS), rows, pool, scale, rows, pool, scale, places, whole(start), blocks, 0,
        *late.flags(0),
    )  # fmt: skip


@implements(Operations.append_rows)
def append_rows(rows, rows_kind, pool, pool_kind, scale, block_table, start):
    _one(rows, rows_kind, pool, pool_kind, scale, block_table, start, False)


@implements(Operations.scatter_rows)
def scatter_rows(rows, rows_kind, pool, pool_kind, scale, slot_mapping):
    _one(rows, rows_kind, pool, pool_kind, scale, slot_mapping, 0, True)


@implements(Operations.append_both)
def append_both(k, v, block_table, start, look=0):
    _both(k, v, block_table, start, look, False)


@implements(Operations.scatter_both)
def scatter_both(k, v, slot_mapping, look=0):
    _both(k, v, slot_mapping, 0, look, True)


@implements(Operations.small_append)
def small_append(rows_kind, pool_kind, by_slot):
    return None  # a launch costs more than what a small call could save


@implements(Operations.small_copy)
def small_copy(rows_kind):
    return None


def make_copy_rows(WORD):
    """The kernel that copies rows of `WORD` bytes an element at per-sequence offsets: some blocks take K, others V."""

    @register_jitable
    def copy(new, cache, offsets, part, num_parts):
        num_seqs, num_heads, new_len, dim = new.shape
        num_rows = np.int64(cache.shape[2])
        rows = num_seqs * num_heads * new_len
        for row in range(part * ROWS + cuda.threadIdx.y, rows, num_parts * ROWS):
            t = row % new_len
            h = row // new_len % num_heads
            b = row // new_len // num_heads
            offset = number_at(offsets, b)
            # Compared this way round so that an offset far outside does not overflow the sum.
            if offset < -t or offset >= num_rows - t:
                continue
            for d in range(cuda.threadIdx.x, dim, LANES):
                cache[b, h, offset + t, d] = new[b, h, t, d]

    def kernel(k_new, k_cache, v_new, v_cache, offsets, k_blocks):
        block, grid = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        if block < k_blocks:
            copy(k_new, k_cache, offsets, block, k_blocks)
        else:
            copy(v_new, v_cache, offsets, block - k_blocks, grid - k_blocks)

    return kernel


_UNSIGNED = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}


@functools.cache
def _copy_rows(bytes_: int) -> Any:
    words = array(_UNSIGNED[bytes_], 4)
    return jit(make_copy_rows, (bytes_,), (words, words, words, words, INDICES, types.int64), 8)


def _bits(x):
    """An array as words that are copied bit by bit: a float's copy might quieten a NaN."""
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return x if x.dtype == bits else x.view(bits)


def _copy_blocks(new):
    """Blocks that a side's rows want; half of what there may be."""
    wanted = ceil_div(new.shape[0] * new.shape[1] * new.shape[2], ROWS)
    return min(wanted, max(1, MAX_BLOCKS // 2))


@implements(Operations.copy_rows)
def copy_rows(new, cache, offsets):
    new, cache, blocks = _bits(new), _bits(cache), _copy_blocks(new)
    kernel = _copy_rows(new.dtype.itemsize)
    launch(kernel, blocks, (LANES, ROWS), new, cache, new, cache, offsets, blocks)


@implements(Operations.copy_both)
def copy_both(k_new, k_cache, v_new, v_cache, offsets):
    k_blocks, v_blocks = _copy_blocks(k_new), _copy_blocks(v_new)
    launch(
        _copy_rows(k_new.dtype.itemsize), k_blocks + v_blocks, (LANES, ROWS),
        _bits(k_new), _bits(k_cache), _bits(v_new), _bits(v_cache), offsets, k_blocks,
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    cases = [
        ("fp64", "fp64", "fp64", "fp64", False), ("fp32", "fp32", "fp32", "fp64", True),
        ("fp16", "fp16", "fp32", "fp16", False), ("bf16", "bf16", "fp32", "bf16", True),
        ("fp32", "int8", "fp32", "int8", False), ("fp16", "int8", "fp16", "int4", True),
        ("bf16", "int8", "bf16", "int8", True), ("fp32", "int4", "fp32", "int4", False),
        ("bf16", "int4", "bf16", "int4", True), *(("fp16", kind, "fp16", kind, False) for kind in STORED_ONLY),
    ]  # fmt: skip
    for case in cases:
        k_src, k_kind, v_src, v_kind, by_slot = case
        name = f"append[K {k_src} to {k_kind}, V {v_src} to {v_kind}, by {'slot' if by_slot else 'table'}]"
        yield name, *_append(*case).described
    for bytes_, word in _UNSIGNED.items():
        yield f"copy_rows[{word}]", *_copy_rows(bytes_).described
