"""Choose the blocks of a sequence that a query should read, on the CPU.

Let ``low`` and ``high`` be the bounds of a block's keys. The score of a query with any of them is at most ``sum over d
of max(q[d] * low[d], q[d] * high[d])``. That is two dot products: of the negative elements of q with `low` and of the
positive ones with `high`. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference"
(arXiv:2406.10774), section 3.2. The k-th largest bound is found digit by digit, from the highest. Each digit follows
from a histogram over the bounds that agree in all higher digits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.choice import DIGIT_BITS, digit_of, order_of, parts_of, whose_digit
from numkv.rows.codec import row_codec
from numkv.rows.convert import codec

# Elements below which one thread does it all.
SERIAL_WORK = 200_000
# Blocks of a unit of work.
CHUNK = 64
PLACES = 32 // DIGIT_BITS
DIGITS = 1 << DIGIT_BITS


def make_key_bounds(K_KIND):
    """Make the kernel that bounds the keys of blocks, for a kind of K."""
    _, load_row = row_codec(K_KIND)
    SHARING = max(1, kind(K_KIND).group_tokens)  # tokens that share scales

    def kernel(k, k_scale, blocks, counts, low, high, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_blocks, heads, block_size, dim = k.shape[0], k.shape[1], k.shape[2], low.shape[2]
        k_scales = by_row(k_scale)
        row = np.empty(dim, np.float32)
        items = len(blocks) * heads
        for item in range(items * worker // workers, items * (worker + 1) // workers):
            block, h = np.int64(blocks[item // heads]), item % heads
            if block < 0 or block >= num_blocks:
                continue
            below, above = low[block, h], high[block, h]
            for d in range(dim):
                below[d], above[d] = np.float32(np.inf), np.float32(-np.inf)
            for t in range(min(max(counts[item // heads], 0), block_size)):
                at = (block, np.int64(h), np.int64(t))
                of = (block, np.int64(h), np.int64(t // SHARING))
                load_row(row_of(k, at), row_of(k_scales, of), row)
                for d in range(dim):
                    below[d] = row[d] if row[d] < below[d] else below[d]
                    above[d] = row[d] if row[d] > above[d] else above[d]
                for d in range(dim):
                    if row[d] != row[d]:
                        below[d], above[d] = np.float32(-np.inf), np.float32(np.inf)

    return kernel


def make_block_scores(Q_KIND):
    """Make the kernel that bounds scores."""
    load, _ = codec(Q_KIND)

    def kernel(q, low, high, block_table, seq_lens, block_size, sm_scale, scores, launch, worker, workers):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        heads, dim, blocks = low.shape[1], low.shape[2], scores.shape[2]
        rows, scale = q.shape[1], np.float32(sm_scale)
        group, chunks = rows // heads, (blocks + CHUNK - 1) // CHUNK
        x = np.empty((rows, 2, dim), np.float32)
        items, known = scores.shape[0] * chunks, np.int64(-1)
        for item in range(items * worker // workers, items * (worker + 1) // workers):
            b, first = item // chunks, item % chunks * CHUNK
            if b != known:
                known = b
                for i in range(rows):
                    for d in range(dim):
                        x[i, 0, d], x[i, 1, d] = parts_of(scale * load(q[b, i, d]))
            used = min((seq_lens[b] + block_size - 1) // block_size, blocks)
            for j in range(first, min(first + CHUNK, blocks)):
                if j >= used:
                    scores[b, :, j] = np.float32(-np.inf)
                    continue
                block = np.int64(block_table[b, j])
                for h in range(heads):  # whose bounds lie one after another
                    best = np.float32(-np.inf)
                    below, above = low[block, h], high[block, h]
                    for i in range(group if below[0] <= above[0] else 0):
                        negative, positive = x[h * group + i, 0], x[h * group + i, 1]
                        total = np.float32(0)
                        for d in range(dim):
                            total += negative[d] * below[d] + positive[d] * above[d]
                        total = total if total == total else np.float32(np.inf)
                        best = max(best, total)
                    scores[b, h, j] = best

    return kernel


def make_choose_blocks():
    """Make the kernel that chooses."""

    def kernel(
        scores, block_table, seq_lens, block_size, first, newest, tables, lens, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        heads, top, most = scores.shape[1], tables.shape[2], scores.shape[2]
        counts = np.empty(DIGITS, np.int64)
        items = scores.shape[0] * heads
        for item in range(items * worker // workers, items * (worker + 1) // workers):
            b, h = item // heads, item % heads
            length = np.int64(seq_lens[b])
            used = min((length + block_size - 1) // block_size, most)
            chosen = tables[b, h]
            for i in range(top):
                chosen[i] = np.int32(-1)
            taken = np.int64(0)
            if used <= top:
                for j in range(used):
                    chosen[j] = block_table[b, j]
                taken = used
            else:
                begin, end = np.int64(first), used - newest
                rest = top - first - newest  # of the blocks between these
                found, equal = np.uint32(0xFFFFFFFF), np.int64(0)
                if rest > 0:
                    found = np.uint32(0)
                    equal = rest
                    for place in range(PLACES - 1, -1, -1):
                        counts[:] = 0
                        for j in range(begin, end):
                            order = order_of(scores[b, h, j])
                            if whose_digit(order, found, place):
                                counts[digit_of(order, place)] += 1
                        digit = np.int64(DIGITS - 1)
                        while counts[digit] < equal:
                            equal -= counts[digit]
                            digit -= 1
                        found |= np.uint32(digit) << np.uint32(place * DIGIT_BITS)
                for j in range(used):
                    keep = j < begin or j >= end
                    if not keep and rest > 0:
                        order = order_of(scores[b, h, j])
                        keep = order > found
                        if order == found and equal > 0:
                            keep, equal = True, equal - 1
                    if keep:
                        chosen[taken] = block_table[b, j]
                        taken += 1
            # The last block is always among them, and the only one that may not be full.
            lens[b, h] = max(taken - 1, 0) * block_size + (length - max(used - 1, 0) * block_size)

    return kernel


def make_tables_of_heads():
    """Make the kernel that numbers parts of blocks."""

    def kernel(tables, num_kv_heads, out):
        heads = tables.shape[1]
        for b in range(tables.shape[0]):
            for h in range(heads):
                for j in range(tables.shape[2]):
                    block = np.int64(tables[b, h, j])
                    if block >= 0:
                        block = block * num_kv_heads + (h if num_kv_heads > 1 else 0)
                    out[b * heads + h, j] = np.int32(max(block, -1))

    return kernel


_F32, _OF_BLOCKS = array(types.float32, 3), array(types.int32, 2)
_LENS = array(types.int64, 1)
# Bounds lie in one piece: their loops are vector code.
_BOUNDS = types.Array(types.float32, 3, "C", readonly=True)
_NEW_BOUNDS = types.Array(types.float32, 3, "C")
# Sums may be taken in any order; NaN and infinity are as they are.
_SUMS = {"reassoc", "contract", "nsz"}


@functools.cache
def _key_bounds(k_kind: str) -> Any:
    signature = (
        array(WORDS[k_kind], 4), array(*SCALES[k_kind]), _LENS, _LENS, _NEW_BOUNDS, _NEW_BOUNDS, *ON_THREADS,
    )  # fmt: skip
    return build(make_key_bounds, signature, args=(k_kind,), label=f"key_bounds, {k_kind}")


@functools.cache
def _block_scores(q_kind: str) -> Any:
    signature = (
        array(WORDS[q_kind], 3), _BOUNDS, _BOUNDS, _OF_BLOCKS, _LENS, types.int64, types.float64,
        array(types.float32, 3, out=True), *ON_THREADS,
    )  # fmt: skip
    label = f"block_scores, {q_kind}"
    return build(make_block_scores, signature, args=(q_kind,), label=label, fastmath=_SUMS)


@functools.cache
def _choose_blocks() -> Any:
    signature = (
        _F32, _OF_BLOCKS, _LENS, types.int64, types.int64, types.int64,
        array(types.int32, 3, out=True), array(types.int64, 2, out=True), *ON_THREADS,
    )  # fmt: skip
    return build(make_choose_blocks, signature, args=(), label="choose_blocks")


@functools.cache
def _of_heads() -> Any:
    signature = (array(types.int32, 3), types.int64, array(types.int32, 2, out=True))
    return build(make_tables_of_heads, signature, args=(), label="tables_of_heads")


@implements(Operations.key_bounds)
def key_bounds(k, k_kind, k_scale, blocks, counts, low, high):
    work = len(blocks) * k.shape[1] * k.shape[2] * low.shape[2]
    run(_key_bounds(k_kind), workers_for(work, SERIAL_WORK), k, k_scale, blocks, counts, low, high)


@implements(Operations.block_scores)
def block_scores(q, q_kind, low, high, block_table, seq_lens, block_size, sm_scale, scores):
    work = scores.size * (q.shape[1] // low.shape[1]) * low.shape[2]
    run(
        _block_scores(q_kind), workers_for(work, SERIAL_WORK), q, low, high, block_table, seq_lens, block_size,
        sm_scale, scores,
    )  # fmt: skip


@implements(Operations.choose_blocks)
def choose_blocks(scores, block_table, seq_lens, block_size, first, newest, tables, lens):
    run(
        _choose_blocks(), workers_for(scores.size * 4, SERIAL_WORK), scores, block_table, seq_lens, block_size,
        first, newest, tables, lens,
    )  # fmt: skip


@implements(Operations.tables_of_heads)
def tables_of_heads(tables, num_kv_heads, out):
    _of_heads()(tables, num_kv_heads, out)
