"""Rotate stored K rows to other positions, in place, on CUDA; see `numkv.kernels.cpu.shift`.

A warp rotates a row; its lanes have adjacent pairs. Pairs are independent, except for the scale of a quantised row. The
row's floats stay in shared memory until the scale is known. Slots outside the pool are skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv import kinds
from numkv.errors import NotSupported
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import (
    INDICES,
    SHARED_BYTES,
    THREADS,
    Kernel,
    array,
    launch,
    number_at,
    pool_types,
)
from numkv.kernels.cuda.octets import (
    ELEMENTS,
    MAX_DIM,
    lanes_for,
    magnitude,
    octet_turner,
    octets_fit,
    row_finder,
    row_putter,
    rows_aligned,
    stored_loader,
)  # fmt: skip
from numkv.kernels.cuda.rows import as_it_is, row_store
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, natural
from numkv.kernels.operations import Operations, implements
from numkv.rows.codec import element_codec, elements_in
from numkv.rows.rope import pair_of, rotate_pair


def make_shift_rows(KIND):
    """Make the kernel for a pool of kind `KIND`."""
    OF_POOL = kinds.kind(KIND)
    QUANTISED, GROUP, elements = OF_POOL.has_scales, OF_POOL.group_size, elements_in(OF_POOL)
    COMPUTE = OF_POOL.compute.name
    F, REAL = OF_POOL.compute.type, getattr(types, COMPUTE)
    value, put_element = element_codec(KIND, COMPUTE)
    _, put = row_store(KIND, COMPUTE, as_it_is)
    PER_HEAD, PER_ROW = OF_POOL.scales_per == "head", OF_POOL.scales_per == "row"
    SHAPE = (ROWS, LANES)

    def kernel(pool, scale, slots, offset, cos, sin, interleaved):
        num_blocks, num_heads, block_size, words_of_row = pool.shape
        dim = elements(words_of_row)
        half, angle = cos.shape[1], natural(abs(offset))
        if GROUP:  # the groups that are rotated
            dim = min(dim, (2 * half + GROUP - 1) // GROUP * GROUP)
        rows = slots.shape[0] * num_heads
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        if QUANTISED:
            x = cuda.shared.array(0, REAL)  # all rows of the block
            peaks = cuda.shared.array(SHAPE, np.float32)
        at = warp * dim
        at_once = np.int64(cuda.blockDim.y)
        # All threads have the same number of iterations, because those that quantise synchronise within.
        for first in range(
            np.int64(cuda.blockIdx.x) * at_once, rows, np.int64(cuda.gridDim.x) * at_once
        ):  # fmt: skip
            row = first + warp
            n, h = row // num_heads, row % num_heads
            slot = number_at(slots, n) if row < rows else np.int64(-1)
            here = slot >= 0 and slot < num_blocks * np.int64(block_size)
            largest = np.float32(0)
            if here:
                block, place = slot // block_size, slot % block_size
                words = pool[block, h, place]
                if PER_HEAD:
                    scales = scale[h : h + 1]
                elif PER_ROW:
                    scales = scale[block, h, place : place + 1]
                elif GROUP:
                    scales = scale[block, h, place]
                else:
                    scales = scale
                for j in range(lane, half, LANES):
                    i = natural(j)
                    low, high = pair_of(i, half, interleaved)
                    a, b = value(words, scales, low, dim), value(words, scales, high, dim)
                    c, s = F(cos[angle, i]), F(sin[angle, i])
                    a, b = rotate_pair(a, b, c, s if offset >= 0 else -s)
                    if QUANTISED:
                        x[at + low], x[at + high] = a, b
                        largest = max(largest, max(np.float32(abs(a)), np.float32(abs(b))))
                    else:
                        put_element(a, words, scales, low)
                        put_element(b, words, scales, high)
                if QUANTISED:
                    for j in range(2 * half + lane, dim, LANES):
                        d = natural(j)
                        a = value(words, scales, d, dim)
                        x[at + d] = a
                        largest = max(largest, np.float32(abs(a)))
            if QUANTISED:
                peaks[warp, lane] = largest
                cuda.syncthreads()
                if here:
                    block, place = slot // block_size, slot % block_size
                    put(x, at, dim, pool, scale, block, h, place, peaks, warp, lane, 0)
                cuda.syncthreads()

    return kernel


def make_shift_octets(KIND):
    """Make the kernel of `make_shift_rows` for aligned rows; see `numkv.kernels.cuda.octets`.

    A lane has two octets whose elements are pairs. `width` elements of a row are rotated, or contribute to its scales.
    """
    OF_POOL = kinds.kind(KIND)
    COMPUTE, QUANTISED, REAL = OF_POOL.compute.name, OF_POOL.has_scales, OF_POOL.compute.type
    load, turn = stored_loader(KIND, COMPUTE), octet_turner(COMPUTE, "float32")
    put, find_row = row_putter(KIND, COMPUTE), row_finder(KIND)

    def kernel(pool, scale, slots, offset, cos, sin, interleaved, width, log):
        num_heads, block_size = natural(pool.shape[1]), natural(pool.shape[2])
        num_slots = pool.shape[0] * np.int64(pool.shape[2])
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        lane, mine, half_of = thread & (lanes - 1), thread >> log, width >> 4
        low = lane if lane < half_of else np.int64(0)
        octets, angle = (low, low + half_of), natural(abs(offset))
        tables = (
            global_address(cos) + angle * cos.strides[0],
            global_address(sin) + angle * sin.strides[0],
        )
        sign, num_rows = REAL(1) if offset >= 0 else REAL(-1), slots.shape[0] * num_heads
        x = cuda.local.array(ELEMENTS, REAL)
        # All threads have the same number of iterations, because those of a warp synchronise within.
        for first in range(
            np.int64(cuda.blockIdx.x) * at_once, num_rows, np.int64(cuda.gridDim.x) * at_once
        ):  # fmt: skip
            row = natural(first + mine if first + mine < num_rows else np.int64(0))
            n = row // num_heads
            slot = number_at(slots, n)
            here = first + mine < num_rows and slot >= 0 and slot < num_slots
            slot = natural(slot) if here else np.int64(0)
            block = slot // block_size
            place = (block, row - n * num_heads, slot - block * block_size)
            at = find_row(pool, scale, place)
            # Lanes without octets read those of others, to avoid branches. They store nothing.
            load(at, octets[0], x, 0)
            load(at, octets[1], x, 8)
            turn(x, octets, tables, np.int64(cos.shape[1]), interleaved, sign)
            have = here and lane < half_of
            largest = magnitude(x) if QUANTISED else np.uint32(0)
            put(x, octets, (have, have), lanes, at, largest, np.int64(0))

    return kernel


@functools.cache
def _shift_octets(kind: str) -> Any:
    table, i64 = array(types.float32, 2), types.int64
    signature = (*pool_types(kind), INDICES, i64, table, table, types.boolean, i64, i64)
    return Kernel(make_shift_octets, (kind,), signature, 4)


def _octet_width(pool, kind, cos, sin, interleaved, tokens) -> int:
    """Return the elements of a row that `make_shift_octets` processes; 0 if it does not support these rows."""
    of, half = kinds.kind(kind), cos.shape[1]
    dim = of.elements_of(pool.shape[3])
    width = dim if of.has_scales else 2 * half
    if (
        not half
        or (half % 4 if interleaved else 2 * half != width)
        or width % (64 if of.is_packed else 16)
    ):
        return 0
    if width > MAX_DIM or tokens * pool.shape[1] >= 1 << 31 or not octets_fit(pool, kind, dim):
        return 0
    return width if rows_aligned(cos) and rows_aligned(sin) else 0


@functools.cache
def _shift_rows(kind: str) -> Any:
    table = array(types.float32, 2)
    signature = (*pool_types(kind), INDICES, types.int64, table, table, types.boolean)
    return Kernel(make_shift_rows, (kind,), signature, 3)  # with fewer registers, it would spill


def _shared_bytes(name: str, words: int) -> int:
    """Return the shared memory of a row's floats, which wait there for their scale."""
    of_pool = kinds.kind(name)
    return 4 * of_pool.elements_of(words) if of_pool.has_scales else 0


@implements(Operations.shift_rows)
def shift_rows(pool, kind, scale, slots, offset, cos, sin, interleaved):
    width = _octet_width(pool, kind, cos, sin, interleaved, slots.shape[0])
    if width:
        lanes = lanes_for(width // 8)
        launch(
            _shift_octets(kind), ceil_div(slots.shape[0] * pool.shape[1], THREADS >> lanes), THREADS,
            pool, scale, slots, offset, cos, sin, bool(interleaved), width, lanes,
        )  # fmt: skip
        return
    row_bytes = _shared_bytes(kind, pool.shape[3])
    room = SHARED_BYTES - 1024  # the rest serves exchange between lanes
    if row_bytes > room:
        raise NotSupported(
            f"`pool`: expected rows of at most {room // 4} elements to shift on CUDA where they are quantised, as they "
            f"lie in shared memory, got {row_bytes // 4}; keep K in a float kind, or shift on the CPU"
        )
    at_once = max(1, min(ROWS, room // row_bytes)) if row_bytes else ROWS
    launch(
        _shift_rows(kind), ceil_div(slots.shape[0] * pool.shape[1], at_once), (LANES, at_once),
        pool, scale, slots, offset, cos, sin, bool(interleaved), shared_bytes=at_once * row_bytes,
    )  # fmt: skip
