"""Append ready rows to a cache, on CUDA; see `numkv.kernels.cpu.append` for the three operations.

A warp stores a row; its lanes have adjacent elements. Rows whose slot lies outside the pool are skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import late
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import (
    INDICES,
    MAX_BLOCKS,
    THREADS,
    UNSIGNED,
    Kernel,
    array,
    launch,
    number_at,
    pool_types,
    whole,
)
from numkv.kernels.cuda.octets import (
    ELEMENTS,
    address_finder,
    bytes_of,
    copy_row,
    lanes_for,
    magnitude,
    octet_loader,
    octets_fit,
    report,
    row_putter,
    rows_aligned,
)
from numkv.kernels.cuda.rows import (
    V_SIDE,
    first_bad_of,
    needs_peak,
    row_store,
    slot_finder,
    zero_int4_group,
)
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, natural
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.int4 import GROUP, store_int4_group
from numkv.rows.quantize import is_finite


def make_append_rows(SRC, DST, BY_SLOT):
    """Make the function that puts rows of kind `SRC` into a pool of kind `DST`, by given slots or by a block table.

    ``append(rows, pool, scale, places, start, block, num_blocks, peaks, look, found, raised)``. A block of threads
    stores part number `block` of `num_blocks`. An element that is not finite is reported as `look` plus its index, in
    its token's word of `found`; see `numkv.kernels.cuda.late`.
    """
    load, _ = codec(SRC)
    find, (peak, put) = slot_finder(BY_SLOT), row_store(DST, "float32", load)
    first_bad = first_bad_of(load)
    NEEDS_PEAK = needs_peak(DST)

    @register_jitable
    def append(
        rows, pool, scale, places, start, part, num_parts, peaks, staged, look, found, raised
    ):
        num_tokens, num_heads, dim = rows.shape
        num_blocks, block_size = pool.shape[0], np.int64(pool.shape[2])
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        # All threads have the same number of iterations, because those that quantise synchronise within.
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
    """Make the function that puts rows of kind `SRC` into a pool of groups (INT4): a thread stores a group.

    See `make_append_rows`. Each thread checks the whole row, because a row that is not finite is stored as zeros.
    """
    load, _ = codec(SRC)
    find = slot_finder(BY_SLOT)

    @register_jitable
    def append(
        rows, pool, scale, places, start, part, num_parts, peaks, staged, look, found, raised
    ):
        num_tokens, num_heads, dim = rows.shape
        num_slots, block_size = pool.shape[0] * np.int64(pool.shape[2]), np.int64(pool.shape[2])
        groups = np.int64(scale.shape[3])
        thread = cuda.threadIdx.y * np.int64(LANES) + cuda.threadIdx.x
        mine = thread * (GROUP + 1)  # so that a warp's threads use all banks of shared memory
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
                    staged[mine + i] = load(rows[t, h, first + i])
                scale[block, h, offset, group] = store_int4_group(
                    staged, mine, count, words, first // 2
                )

    return append


def make_append(K_SRC, K_KIND, V_SRC, V_KIND, BY_SLOT):
    """Make the kernel that puts rows of K and of V into their pools: some blocks store K, the others V."""
    SIDES = ((K_SRC, K_KIND), (V_SRC, V_KIND))
    append_k, append_v = (
        make_append_groups(src, BY_SLOT)
        if kind(dst).scales_per == "group"
        else make_append_rows(src, dst, BY_SLOT)
        for src, dst in SIDES
    )
    SHAPE = (ROWS, LANES) if any(kind(dst).scales_per == "row" for _, dst in SIDES) else (1, 1)

    GROUPS = any(kind(dst).scales_per == "group" for _, dst in SIDES)
    STAGED = THREADS * (GROUP + 1) if GROUPS else 1  # a group for each thread

    def kernel(
        k, k_pool, k_scale, v, v_pool, v_scale, places, start, k_blocks, look, found, raised
    ):  # fmt: skip
        peaks = cuda.shared.array(SHAPE, np.float32)
        staged = cuda.shared.array(STAGED, np.float32)
        block, grid = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        if block < k_blocks:
            append_k(
                k, k_pool, k_scale, places, start, block, k_blocks, peaks, staged, look, found,
                raised,
            )  # fmt: skip
        else:
            look_v = look + V_SIDE if look > 0 else np.int64(0)
            append_v(
                v, v_pool, v_scale, places, start, block - k_blocks, grid - k_blocks, peaks, staged, look_v, found,
                raised,
            )  # fmt: skip

    return kernel


@register_jitable
def placed(x):
    """Return the shape, the strides and the address of an array, in a form that K and V have in common."""
    return x.shape, x.strides, global_address(x)


def octet_side(SRC, DST, BY_SLOT):
    """Make the function that puts aligned rows of kind `SRC` into a pool of kind `DST`; see `make_append_octets`."""
    AS_IS, QUANTISED = SRC == DST, needs_peak(DST)
    FROM, find_row = bytes_of(SRC), address_finder(DST)
    COMPUTE = "float64" if DST == "fp64" else "float32"
    REAL = np.float64 if COMPUTE == "float64" else np.float32
    find, load, put = slot_finder(BY_SLOT), octet_loader(SRC, COMPUTE), row_putter(DST, COMPUTE)
    PIECES = FROM // 16

    @register_jitable
    def side(rows, pool, scale, places, start, part, found, raised):
        (num_tokens, num_heads, dim), steps, base = rows
        (num_blocks, _, block_size, _), pool_steps, pool_base = pool
        first_block, num_parts, log, look = part
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        lane, mine, at_once = thread & (lanes - 1), thread >> log, np.int64(THREADS) >> log
        num_heads, block_size, octets = natural(num_heads), natural(block_size), natural(dim) >> 3
        num_rows, num_slots = num_tokens * num_heads, num_blocks * block_size
        x = cuda.local.array(ELEMENTS, REAL)
        # All threads have the same number of iterations, because those of a warp synchronise within.
        for first in range(first_block * at_once, num_rows, num_parts * at_once):
            row = natural(first + mine)
            if row >= num_rows:
                row = np.int64(0)
            t = row // num_heads
            h = row - t * num_heads
            slot = find(places, t, start, block_size)
            here = first + mine < num_rows and slot >= 0 and slot < num_slots
            block = natural(slot) // block_size
            offset = natural(slot) - block * block_size
            source = base + t * steps[0] + h * steps[1]
            to = find_row(pool_base, pool_steps, scale[2], scale[1], (block, h, offset))
            if AS_IS:
                if here:
                    copy_row(source, to[0], octets * PIECES, lane, lanes)
            elif QUANTISED:
                mine_of = (lane, lane + lanes)
                have = (here and lane < octets, here and lane + lanes < octets)
                # A lane without an octet reads the first one, a lane without a row the first row. This avoids branches.
                load(source + (mine_of[0] if have[0] else np.int64(0)) * FROM, x, 0)
                load(source + (mine_of[1] if have[1] else np.int64(0)) * FROM, x, 8)
                largest = magnitude(x)
                bad = put(x, mine_of, have, lanes, to, largest, look)
                if bad and have[0] and largest >= np.uint32(0x7F800000):
                    # Reload to save registers.
                    load(source + mine_of[0] * FROM, x, 0)
                    load(source + (mine_of[1] if have[1] else np.int64(0)) * FROM, x, 8)
                    report(x, mine_of, look + row * dim, t, found, raised)
            else:
                for octet in range(lane, octets, 2 * lanes):
                    mine_of = (octet, octet + lanes)
                    have = (here, here and octet + lanes < octets)
                    if have[0]:
                        load(source + mine_of[0] * FROM, x, 0)
                    if have[1]:
                        load(source + mine_of[1] * FROM, x, 8)
                    put(x, mine_of, have, lanes, to, np.uint32(0), look)

    return side


def make_append_octets(K_SRC, K_KIND, V_SRC, V_KIND, BY_SLOT):
    """Make the kernel of `make_append` for aligned rows: two octets a thread, several rows a warp.

    Blocks of threads from `k_blocks` on store V. `k_lanes` and `v_lanes` are the binary logarithms of the lanes of a
    row.
    """
    SAME = (K_SRC, K_KIND) == (V_SRC, V_KIND)
    side_k, side_v = octet_side(K_SRC, K_KIND, BY_SLOT), octet_side(V_SRC, V_KIND, BY_SLOT)

    def kernel(
        k, k_pool, k_scale, v, v_pool, v_scale, places, numbers, found, raised
    ):  # fmt: skip
        start, k_blocks, k_lanes, v_lanes, look = numbers
        block, grid = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        is_k = block < k_blocks
        rows, pool, scale = placed(k), placed(k_pool), placed(k_scale)
        part = (block, k_blocks, k_lanes, look)
        if not is_k:
            part = (
                block - k_blocks, grid - k_blocks, v_lanes,
                look + V_SIDE if look > 0 else np.int64(0),
            )  # fmt: skip
            if SAME:
                rows, pool, scale = placed(v), placed(v_pool), placed(v_scale)
        if SAME or is_k:
            side_k(rows, pool, scale, places, start, part, found, raised)
        else:
            side_v(placed(v), placed(v_pool), placed(v_scale), places, start, part, found, raised)

    return kernel


@functools.cache
def _append(
    k_src: str, k_kind: str, v_src: str, v_kind: str, by_slot: bool, octets: bool = False
) -> Any:
    key, i64 = (k_src, k_kind, v_src, v_kind, by_slot), types.int64
    numbers = (types.UniTuple(i64, 5),) if octets else (i64, i64, i64)
    signature = (
        array(WORDS[k_src], 3), *pool_types(k_kind), array(WORDS[v_src], 3), *pool_types(v_kind), INDICES, *numbers,
        array(i64, 1), array(i64, 1),
    )  # fmt: skip
    grouped = any(kind(name).scales_per == "group" for name in (k_kind, v_kind))
    if octets:  # with groups, six would spill
        return Kernel(make_append_octets, key, signature, 5 if grouped else 6)
    return Kernel(make_append, key, signature, 4 if grouped else 8)


def _by_octets(rows, source, pool, kind):
    """Return whether `make_append_octets` supports these rows."""
    return octets_fit(rows, source, rows.shape[2]) and octets_fit(pool, kind, rows.shape[2])


def _octet_blocks(rows, lanes):
    """Return the blocks of a launch, with as many rows each as fit its threads; at most half of `MAX_BLOCKS`."""
    return min(ceil_div(rows.shape[0] * rows.shape[1], THREADS >> lanes), max(1, MAX_BLOCKS // 2))


def _blocks(rows, pool_kind, scale):
    """Return the blocks of a launch: rows, or their groups, over the threads; at most half of `MAX_BLOCKS`."""
    num_rows = rows.shape[0] * rows.shape[1]
    if kind(pool_kind).scales_per == "group":
        wanted = ceil_div(num_rows * scale.shape[3], THREADS)
    else:
        wanted = ceil_div(num_rows, ROWS)
    return min(wanted, max(1, MAX_BLOCKS // 2))


def _both(k_side, v_side, places, start, look, by_slot, only_k=False):
    (k, k_src, k_pool, k_kind, k_scale), (v, v_src, v_pool, v_kind, v_scale) = k_side, v_side
    kinds = k_src, k_kind, v_src, v_kind, by_slot
    arrays = k, k_pool, k_scale, v, v_pool, v_scale, places
    if _by_octets(k, k_src, k_pool, k_kind) and _by_octets(v, v_src, v_pool, v_kind):
        lanes = lanes_for(k.shape[2] // 8), lanes_for(v.shape[2] // 8)
        k_blocks, v_blocks = _octet_blocks(k, lanes[0]), _octet_blocks(v, lanes[1])
        launch(
            _append(*kinds, True), k_blocks + v_blocks * (not only_k), THREADS, *arrays,
            (whole(start), k_blocks, *lanes, look), *late.flags(look),
        )  # fmt: skip
        return
    k_blocks, v_blocks = _blocks(k, k_kind, k_scale), _blocks(v, v_kind, v_scale)
    launch(
        _append(*kinds), k_blocks + v_blocks * (not only_k), (LANES, ROWS), *arrays, whole(start), k_blocks, look,
        *late.flags(look),
    )  # fmt: skip


def _one(rows, rows_kind, pool, pool_kind, scale, places, start, by_slot):
    """Append rows of one side by the kernel for both; none of its blocks stores the other side."""
    side = rows, rows_kind, pool, pool_kind, scale
    _both(side, side, places, start, 0, by_slot, only_k=True)


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
    """Make the kernel that copies rows of `WORD` bytes an element at per-sequence offsets: some blocks K, others V."""

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


def make_copy_octets(WORD):
    """Make the kernel of `make_copy_rows` for aligned rows: 16 bytes a thread at once."""

    @register_jitable
    def copy(new, cache, offsets, part, num_parts, log):
        (num_seqs, num_heads, new_len, dim), steps, source = new
        (_, _, num_rows, _), to_steps, to = cache
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        num_heads, new_len, pieces = natural(num_heads), natural(new_len), natural(dim) * WORD >> 4
        rows = num_seqs * num_heads * new_len
        for item in range(part * at_once + (thread >> log), rows, num_parts * at_once):
            row = natural(item)
            head = row // new_len
            t, b = row - head * new_len, head // num_heads
            h = head - b * num_heads
            offset = number_at(offsets, b)
            # Compared this way round so that an offset far outside does not overflow the sum.
            if offset >= -t and offset < num_rows - t:
                copy_row(
                    source + b * steps[0] + h * steps[1] + t * steps[2],
                    to + b * to_steps[0] + h * to_steps[1] + (offset + t) * to_steps[2],
                    pieces, thread & (lanes - 1), lanes,
                )  # fmt: skip

    def kernel(k_new, k_cache, v_new, v_cache, offsets, k_blocks, log):
        block, grid = np.int64(cuda.blockIdx.x), np.int64(cuda.gridDim.x)
        new, cache = placed(k_new), placed(k_cache)
        part, parts, lanes = block, np.int64(k_blocks), np.int64(log[0])
        if block >= k_blocks:
            new, cache = placed(v_new), placed(v_cache)
            part, parts, lanes = block - k_blocks, grid - k_blocks, np.int64(log[1])
        copy(new, cache, offsets, part, parts, lanes)

    return kernel


@functools.cache
def _copy_rows(bytes_: int, octets: bool = False) -> Any:
    words = array(UNSIGNED[bytes_], 4)
    signature = (words, words, words, words, INDICES, types.int64)
    if octets:
        return Kernel(make_copy_octets, (bytes_,), (*signature, types.UniTuple(types.int64, 2)), 8)
    return Kernel(make_copy_rows, (bytes_,), signature, 8)


def _bits(x):
    """Return an array as integer words, because copying a float may quieten a NaN."""
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return x if x.dtype == bits else x.view(bits)


def _copy(k_new, k_cache, v_new, v_cache, offsets, only_k=False):
    arrays = tuple(map(_bits, (k_new, k_cache, v_new, v_cache)))
    bytes_ = k_new.dtype.itemsize
    rows = [x.shape[0] * x.shape[1] * x.shape[2] for x in (k_new, v_new)]
    octets = (
        not SIMULATED and max(rows) < 1 << 31 and all(rows_aligned(x, whole=True) for x in arrays)
    )
    lanes = [lanes_for(x.shape[3] * bytes_ // 16) for x in (k_new, v_new)] if octets else [0, 0]
    at_once = [THREADS >> n if octets else ROWS for n in lanes]
    k_blocks, v_blocks = (
        min(ceil_div(n, some), max(1, MAX_BLOCKS // 2)) for n, some in zip(rows, at_once, strict=True)
    )  # fmt: skip
    blocks, kernel = k_blocks + v_blocks * (not only_k), _copy_rows(bytes_, octets)
    if octets:
        launch(kernel, blocks, THREADS, *arrays, offsets, k_blocks, tuple(lanes))
    else:
        launch(kernel, blocks, (LANES, ROWS), *arrays, offsets, k_blocks)


@implements(Operations.copy_rows)
def copy_rows(new, cache, offsets):
    _copy(new, cache, new, cache, offsets, only_k=True)


@implements(Operations.copy_both)
def copy_both(k_new, k_cache, v_new, v_cache, offsets):
    _copy(k_new, k_cache, v_new, v_cache, offsets)
