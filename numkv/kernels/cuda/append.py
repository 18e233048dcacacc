"""Append ready rows to a cache, on CUDA; see `numkv.kernels.cpu.append` for the three operations.

A warp takes a row, its lanes adjacent elements. Rows whose slot lies outside the pool are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.rows import needs_peak, row_store, slot_finder
from numkv.kernels.cuda.simd import LANES, STORED_ONLY, THREADS, c_array, ceil_div, jit, launch
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.int4 import GROUP, store_int4_group

__all__ = ["append_rows", "copy_rows", "scatter_rows", "small_append", "small_copy"]

ROWS = THREADS // LANES  # rows that a block takes at once


def make_append_rows(SRC, DST, BY_SLOT):
    """The kernel that puts rows of kind `SRC` into a pool of kind `DST`, by given slots or by a block table."""
    load, _ = codec(SRC)
    find, (peak, put) = slot_finder(BY_SLOT), row_store(DST, "float32", load)
    NEEDS_PEAK = needs_peak(DST)
    SHAPE = (ROWS, LANES) if NEEDS_PEAK else (1, 1)

    def kernel(rows, pool, scale, places, start):
        num_tokens, num_heads, dim = rows.shape
        num_blocks, block_size = pool.shape[0], np.int64(pool.shape[2])
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        peaks = cuda.shared.array(SHAPE, np.float32)
        # All threads go round equally often, as those that quantise wait for each other inside.
        for first in range(
            np.int64(cuda.blockIdx.x) * ROWS, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS
        ):  # fmt: skip
            row = first + warp
            t, h = row // num_heads, row % num_heads
            slot = np.int64(-1)
            if row < num_tokens * num_heads:
                slot = find(places, t, start, block_size)
            here = slot >= 0 and slot < num_blocks * block_size
            if NEEDS_PEAK:
                peaks[warp, lane] = peak(rows[t, h], 0, dim, lane) if here else np.float32(0)
                cuda.syncthreads()
            if here:
                block, offset = slot // block_size, slot % block_size
                if SRC == DST:
                    for d in range(lane, dim, LANES):
                        pool[block, h, offset, d] = rows[t, h, d]
                else:
                    put(rows[t, h], 0, dim, pool, scale, block, h, offset, peaks, warp, lane)
            if NEEDS_PEAK:
                cuda.syncthreads()

    return kernel


def make_append_groups(SRC, BY_SLOT):
    """The kernel that puts rows of kind `SRC` into a pool of groups (INT4): a thread takes a group."""
    load, _ = codec(SRC)
    find = slot_finder(BY_SLOT)

    def kernel(rows, pool, scale, places, start):
        num_tokens, num_heads, dim = rows.shape
        num_slots, block_size = pool.shape[0] * np.int64(pool.shape[2]), np.int64(pool.shape[2])
        groups = np.int64(scale.shape[3])
        x = cuda.local.array(GROUP, np.float32)
        thread = cuda.threadIdx.y * np.int64(LANES) + cuda.threadIdx.x
        for item in range(
            cuda.blockIdx.x * np.int64(THREADS) + thread,
            num_tokens * num_heads * groups,
            np.int64(cuda.gridDim.x) * THREADS,
        ):
            row, group = item // groups, item % groups
            t, h = row // num_heads, row % num_heads
            slot = find(places, t, start, block_size)
            if slot < 0 or slot >= num_slots:
                continue
            block, offset = slot // block_size, slot % block_size
            first = group * GROUP
            count = min(np.int64(GROUP), dim - first)
            for i in range(count):
                x[i] = load(rows[t, h, first + i])
            words = pool[block, h, offset]
            scale[block, h, offset, group] = store_int4_group(x, 0, count, words, first // 2)

    return kernel


@functools.cache
def _append_rows(src: str, dst: str, by_slot: bool) -> Any:
    if kind(dst).scales_per == "group":
        return jit(make_append_groups(src, by_slot), 4)
    return jit(make_append_rows(src, dst, by_slot), 8)


def _blocks(rows, pool_kind, scale):
    """Blocks that a launch wants: rows, or their groups, over the threads."""
    num_rows = rows.shape[0] * rows.shape[1]
    if kind(pool_kind).scales_per == "group":
        return ceil_div(num_rows * scale.shape[3], THREADS)
    return ceil_div(num_rows, ROWS)


@implements(Operations.append_rows)
def append_rows(rows, rows_kind, pool, pool_kind, scale, block_table, start):
    kernel, blocks = _append_rows(rows_kind, pool_kind, False), _blocks(rows, pool_kind, scale)
    launch(kernel, blocks, (LANES, ROWS), rows, pool, scale, block_table, start)


@implements(Operations.scatter_rows)
def scatter_rows(rows, rows_kind, pool, pool_kind, scale, slot_mapping):
    kernel, blocks = _append_rows(rows_kind, pool_kind, True), _blocks(rows, pool_kind, scale)
    launch(kernel, blocks, (LANES, ROWS), rows, pool, scale, slot_mapping, 0)


@implements(Operations.small_append)
def small_append(rows_kind, pool_kind, by_slot):
    return None  # a launch costs more than what a small call could save


@implements(Operations.small_copy)
def small_copy(rows_kind):
    return None


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


@implements(Operations.copy_rows)
def copy_rows(new, cache, offsets, stream=None):
    bits = np.dtype(f"u{new.dtype.itemsize}")  # a float's copy might quieten a NaN
    blocks = ceil_div(new.shape[0] * new.shape[1] * new.shape[2], ROWS)
    kernel = _copy_rows(bits.itemsize)
    launch(
        kernel, blocks, (LANES, ROWS), new.view(bits), cache.view(bits), offsets, stream=stream
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    cases = [
        ("fp64", "fp64", None), ("fp32", "fp32", None), ("fp16", "fp16", None),
        ("bf16", "bf16", types.int64), ("fp32", "fp16", types.int64), ("fp32", "bf16", None),
        ("fp32", "fp64", types.int32), ("fp32", "int8", None), ("fp16", "int8", types.int64),
        ("bf16", "int8", types.int32), ("fp32", "int4", None), ("bf16", "int4", types.int64),
        ("fp16", "int4", types.int32), *(("fp16", kind, None) for kind in STORED_ONLY),
    ]  # fmt: skip
    for src, dst, slot in cases:
        signature = (
            c_array(WORDS[src], 3), c_array(WORDS[dst], 4), c_array(*SCALES[dst]),
            c_array(slot or types.int32, 1), types.int64,
        )  # fmt: skip
        name = "append_rows" if slot is None else "scatter_rows"
        by_slot = slot is not None
        kernel = (
            make_append_groups(src, by_slot)
            if kind(dst).scales_per == "group"
            else make_append_rows(src, dst, by_slot)
        )
        yield f"{name}[{src} to {dst}]", kernel, signature
    for word in (types.uint8, types.uint16, types.uint32, types.uint64):
        signature = (c_array(word, 4), c_array(word, 4), c_array(types.int64, 1))
        yield f"copy_rows[{word}]", make_copy_rows(word.bitwidth // 8), signature
