"""Choose the blocks of a sequence that a query reads, on CUDA; see `numkv.kernels.cpu.choice`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
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
from numkv.kernels.cuda.simd import ceil_div, column_of, reader
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.choice import DIGIT_BITS, digit_of, order_of, parts_of, whose_digit
from numkv.rows.convert import codec

# Elements of a row that a thread reads at once.
STEP = 4
PLACES = 32 // DIGIT_BITS
DIGITS = 1 << DIGIT_BITS
# Where each thread's part of the chosen blocks begins, and where the last one's ends.
MARKS = THREADS + 1


def make_key_bounds(K_KIND):
    """Make the kernel that bounds the keys of blocks: a thread has a few columns of a block's kv head."""
    SCALES_PER = kind(K_KIND).scales_per
    BY_ROW, BY_HEAD = SCALES_PER == "row", SCALES_PER == "head"
    read, column = reader(K_KIND, "float32", STEP, False), column_of(K_KIND, STEP)

    def kernel(k, k_scale, blocks, counts, low, high):
        num_blocks, heads, block_size, dim = k.shape[0], k.shape[1], k.shape[2], low.shape[2]
        chunks = (dim + STEP - 1) // STEP
        x = cuda.local.array(STEP, np.float32)
        below, above = cuda.local.array(STEP, np.float32), cuda.local.array(STEP, np.float32)
        first = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        items = np.int64(blocks.shape[0]) * heads * chunks
        for item in range(first, items, np.int64(cuda.gridDim.x) * THREADS):
            chunk, h, i = item % chunks, item // chunks % heads, item // chunks // heads
            block = number_at(blocks, i)
            if block < 0 or block >= num_blocks:
                continue
            for n in range(STEP):
                below[n], above[n] = np.float32(np.inf), np.float32(-np.inf)
            for t in range(min(max(number_at(counts, i), np.int64(0)), np.int64(block_size))):
                read(k, k_scale, block, h, t, chunk, x, 0)
                scale = np.float32(1)
                if BY_ROW:
                    scale = k_scale[block, h, t]
                if BY_HEAD:
                    scale = k_scale[h]
                for n in range(STEP):
                    value = x[n] * scale
                    if not value >= below[n]:  # true for a NaN, too
                        below[n] = value
                    if not value <= above[n]:
                        above[n] = value
                    if value != value:  # and keeps it as bounds that nothing passes
                        below[n], above[n] = np.float32(-np.inf), np.float32(np.inf)
            for n in range(STEP):
                d = column(chunk, n, dim)
                if d < dim:
                    low[block, h, d], high[block, h, d] = below[n], above[n]

    return kernel


def make_block_scores(Q_KIND):
    """Make the kernel that bounds scores: the group's queries lie in shared memory, a thread has a block of tokens."""
    load, _ = codec(Q_KIND)

    def kernel(q, low, high, block_table, seq_lens, block_size, sm_scale, scores):
        num_blocks, heads, dim = low.shape
        group, scale, most = q.shape[1] // heads, np.float32(sm_scale), np.int64(scores.shape[2])
        pieces = (most + THREADS - 1) // THREADS
        x = cuda.shared.array(0, types.float32)
        for item in range(
            np.int64(cuda.blockIdx.x), scores.shape[0] * heads * pieces, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            piece, h, b = item % pieces, item // pieces % heads, item // pieces // heads
            cuda.syncthreads()
            for i in range(cuda.threadIdx.x, group * dim, THREADS):
                x[i] = scale * load(q[b, h * group + i // dim, i % dim])
            cuda.syncthreads()
            used = min((number_at(seq_lens, b) + block_size - 1) // block_size, most)
            j = piece * THREADS + cuda.threadIdx.x
            if j < most:
                best, block = np.float32(-np.inf), np.int64(-1)
                if j < used and j < block_table.shape[1]:
                    block = np.int64(block_table[b, j])
                if block >= 0 and block < num_blocks and low[block, h, 0] <= high[block, h, 0]:
                    for i in range(group):
                        total = np.float32(0)
                        for d in range(dim):
                            negative, positive = parts_of(x[i * dim + d])
                            total += negative * low[block, h, d] + positive * high[block, h, d]
                        total = total if total == total else np.float32(np.inf)
                        best = max(best, total)
                scores[b, h, j] = best

    return kernel


def make_choose_blocks():
    """Make the kernel that chooses blocks: a CUDA block has a kv head of a sequence.

    Its threads count digits together. Each thread then has a run of the sequence's blocks. The blocks that it chooses
    follow those of the threads before it.
    """

    def kernel(scores, block_table, seq_lens, block_size, first, newest, tables, lens):
        heads, top, most = scores.shape[1], np.int64(tables.shape[2]), np.int64(scores.shape[2])
        counts = cuda.shared.array(DIGITS, types.int32)
        larger = cuda.shared.array(MARKS, types.int32)
        alike = cuda.shared.array(MARKS, types.int32)
        # The lowest chosen score, and how many equal ones are chosen.
        state = cuda.shared.array(2, types.int64)
        thread = np.int64(cuda.threadIdx.x)
        for item in range(
            np.int64(cuda.blockIdx.x), scores.shape[0] * heads, np.int64(cuda.gridDim.x)
        ):
            b, h = item // heads, item % heads
            length = number_at(seq_lens, b)
            used = min((length + block_size - 1) // block_size, most)
            everything = used <= top
            begin, end = (used, used) if everything else (np.int64(first), used - newest)
            rest = np.int64(0) if everything else top - first - newest
            if thread == 0:  # all threads have passed a barrier since they read the item before
                state[0], state[1] = np.int64(0 if rest > 0 else 0xFFFFFFFF), rest
            for place in range(PLACES - 1, -1, -1):
                for i in range(thread, DIGITS, THREADS):
                    counts[i] = np.int32(0)
                cuda.syncthreads()
                found = np.uint32(state[0])
                if rest > 0:
                    for j in range(begin + thread, end, THREADS):
                        order = order_of(scores[b, h, j])
                        if whose_digit(order, found, place):
                            cuda.atomic.add(counts, digit_of(order, place), np.int32(1))
                cuda.syncthreads()
                if thread == 0 and rest > 0:
                    digit, left = np.int64(DIGITS - 1), state[1]
                    while digit > 0 and counts[digit] < left:
                        left -= counts[digit]
                        digit -= 1
                    state[0] |= digit << (place * DIGIT_BITS)
                    state[1] = left
                cuda.syncthreads()
            found, wanted = np.uint32(state[0]), state[1]
            # For each thread's run of blocks: how many are certainly chosen, and how many have the lowest chosen score.
            run = (used + THREADS - 1) // THREADS
            low, high = min(thread * run, used), min((thread + 1) * run, used)
            sure, same = np.int32(0), np.int32(0)
            for j in range(low, high):
                if j < begin or j >= end:
                    sure += np.int32(1)
                elif rest > 0:
                    order = order_of(scores[b, h, j])
                    if order > found:
                        sure += np.int32(1)
                    elif order == found:
                        same += np.int32(1)
            larger[thread + 1], alike[thread + 1] = sure, same
            cuda.syncthreads()
            if thread == 0:
                larger[0], alike[0] = np.int32(0), np.int32(0)
                for i in range(THREADS):
                    larger[i + 1] += larger[i]
                    alike[i + 1] += alike[i]
            cuda.syncthreads()
            before = np.int64(alike[thread])  # equal scores of earlier blocks, which come first
            place_of = np.int64(larger[thread]) + min(before, wanted)
            for j in range(low, high):
                keep = j < begin or j >= end
                if not keep and rest > 0:
                    order = order_of(scores[b, h, j])
                    keep = order > found
                    if order == found:
                        keep = before < wanted
                        before += 1
                if keep and place_of < top:
                    block = np.int32(-1)
                    if j < block_table.shape[1]:
                        block = block_table[b, j]
                    tables[b, h, place_of] = block
                    place_of += 1
            taken = min(used, top)
            for i in range(taken + thread, top, THREADS):
                tables[b, h, i] = np.int32(-1)
            if thread == 0:
                full = max(taken - 1, np.int64(0)) * block_size
                lens[b, h] = full + length - max(used - 1, np.int64(0)) * block_size

    return kernel


def make_tables_of_heads():
    """Make the kernel that numbers the (block, kv head) parts."""

    def kernel(tables, num_kv_heads, out):
        heads, columns = np.int64(tables.shape[1]), np.int64(tables.shape[2])
        first = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        for item in range(
            first, tables.shape[0] * heads * columns, np.int64(cuda.gridDim.x) * THREADS
        ):
            j, h, b = item % columns, item // columns % heads, item // columns // heads
            block = np.int64(tables[b, h, j])
            if block >= 0:
                block = block * num_kv_heads + (h if num_kv_heads > 1 else np.int64(0))
            out[b * heads + h, j] = np.int32(max(block, np.int64(-1)))

    return kernel


_F32 = array(types.float32, 3)


@functools.cache
def _key_bounds(k_kind: str) -> Any:
    signature = (*pool_types(k_kind), INDICES, INDICES, _F32, _F32)
    return Kernel(make_key_bounds, (k_kind,), signature, 8)


@functools.cache
def _block_scores(q_kind: str) -> Any:
    signature = (
        array(WORDS[q_kind], 3), _F32, _F32, array(types.int32, 2), INDICES, types.int64, types.float64, _F32,
    )  # fmt: skip
    return Kernel(make_block_scores, (q_kind,), signature, 8)


@functools.cache
def _choose_blocks() -> Any:
    number = types.int64
    signature = (
        _F32, array(types.int32, 2), INDICES, number, number, number, array(types.int32, 3),
        array(types.int64, 2),
    )  # fmt: skip
    return Kernel(make_choose_blocks, (), signature, 8)


@functools.cache
def _tables_of_heads() -> Any:
    signature = (array(types.int32, 3), types.int64, array(types.int32, 2))
    return Kernel(make_tables_of_heads, (), signature, 8)


@implements(Operations.key_bounds)
def key_bounds(k, k_kind, k_scale, blocks, counts, low, high):
    items = blocks.shape[0] * k.shape[1] * ceil_div(low.shape[2], STEP)
    launch(
        _key_bounds(k_kind), ceil_div(items, THREADS), THREADS, k, k_scale, blocks, counts, low, high,
    )  # fmt: skip


@implements(Operations.block_scores)
def block_scores(q, q_kind, low, high, block_table, seq_lens, block_size, sm_scale, scores):
    heads, group = low.shape[1], q.shape[1] // low.shape[1]
    row_bytes = 4 * group * low.shape[2]
    if row_bytes > SHARED_BYTES:
        raise NotSupported(
            f"`q`: expected at most {SHARED_BYTES} bytes of float32 queries for each kv head on CUDA, got {row_bytes}"
        )
    pieces = ceil_div(scores.shape[2], THREADS)
    launch(
        _block_scores(q_kind), scores.shape[0] * heads * pieces, THREADS, q, low, high, block_table, seq_lens,
        block_size, float(sm_scale), scores, shared_bytes=row_bytes,
    )  # fmt: skip


@implements(Operations.choose_blocks)
def choose_blocks(scores, block_table, seq_lens, block_size, first, newest, tables, lens):
    launch(
        _choose_blocks(), scores.shape[0] * scores.shape[1], THREADS, scores, block_table, seq_lens,
        block_size, first, newest, tables, lens,
    )  # fmt: skip


@implements(Operations.tables_of_heads)
def tables_of_heads(tables, num_kv_heads, out):
    items = tables.shape[0] * tables.shape[1] * tables.shape[2]
    launch(_tables_of_heads(), ceil_div(items, THREADS), THREADS, tables, num_kv_heads, out)
