"""Splits of long KV ranges in attention on CUDA: memory for partial results, and the kernels that merge them.

A split's part of a query row is in float32 or float64. It has the weighted sum of V rows, padded to a multiple of 4,
and 4 more numbers. These are the largest score in base 2, the sum of ``2 ** (score - largest)``, and two unused ones.

The merge is also parallel over splits. Each team of threads adds up every n-th split, with n teams. The teams' sums are
then added up in order. The order depends only on the number of splits and the head dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import memory
from numkv.kernels.cuda.attention.items import (
    MAX_SPLIT_ROWS,
    MAX_SPLITS,
    ROWS_TOGETHER,
    SPLIT_STEP,
    AttentionBatch,
    Splitting,
    extent,
    index_at,
    split_length,
)  # fmt: skip
from numkv.kernels.cuda.attention.sizes import WARPS
from numkv.kernels.cuda.instructions import (
    global_address,
    load_chunk,
    load_global_8,
    load_global_16,
    row_address,
    shuffle,
    shuffle_float,
    shuffle_xor_float,
    store_global,
)  # fmt: skip
from numkv.kernels.cuda.launches import INDICES, MAX_BLOCKS, THREADS, Kernel, array, launch
from numkv.kernels.cuda.simd import ceil_div, natural
from numkv.kernels.cuda.streams import SIMULATED
from numkv.rows.convert import codec
from numkv.rows.softmax import LN_2, LOG2_E, finish

# The most splits that one team of threads merges alone for a head; splits that a thread reads ahead. A block merges at
# most `MAX_SPLITS` at once, over all its heads.
FEW = 2 if SIMULATED else 32
AT_ONCE = 4
MOST_HEADS = min(8, THREADS)

#: Numbers of a part after its padded sum. Its maximum and its total come first.
PART_EXTRA = 4


class RoomForParts(NamedTuple):
    """The room for parts that a call may need."""

    regions: int  #: tokens or sequences
    slots: int  #: parts of each region; 0 if no sequence can be split
    by_token: bool
    splits: int  #: the most splits of a sequence
    how: Splitting

    @property
    def rows(self) -> int:
        """Return the number of parts, at least 1, so that arrays are never empty."""
        return max(self.regions * self.slots, 1)


def most_splits(reach: int, rows: int, heads: int, how: Splitting) -> int:
    """Return the most splits of a sequence with this number of query rows, which see at most `reach` tokens."""
    units = heads * ceil_div(rows, ROWS_TOGETHER)
    if rows > MAX_SPLIT_ROWS or reach <= SPLIT_STEP:
        return 1
    shortest = split_length(0, rows, heads, how)
    return max(1, min(ceil_div(reach, shortest), ceil_div(1 << how.log_items, units)))


@functools.lru_cache(maxsize=1024)
def room_for(
    num_tokens: int, num_seqs: int, heads: int, group: int, capacity: int, window_left: int, how: Splitting
) -> RoomForParts:  # fmt: skip
    """Return room for the parts of any sequences that a call may have.

    Parts are laid out by tokens, or by sequences where that takes less memory. By tokens, each token needs room for the
    most splits, because its sequence may have any number of queries.

    Parameters
    ----------
    num_tokens, num_seqs : int
        Number of queries of the call. Number of its sequences.
    heads, group : int
        Number of kv heads. Number of q heads per kv head.
    capacity : int
        The most tokens of a sequence.
    window_left : int
        Size of the window; negative for none.
    how : Splitting
        The device's way to split sequences.
    """
    # A single sequence has all queries.
    most = min(num_tokens, MAX_SPLIT_ROWS // group)
    counts = range(1, most + 1) if num_seqs > 1 else [num_tokens] if num_tokens <= most else []
    splits, of_sequence = 1, 0
    for tokens in counts:
        reach = capacity if window_left < 0 else min(capacity, window_left + tokens + SPLIT_STEP)
        found = most_splits(reach, tokens * group, heads, how)
        if found > 1:
            splits = max(splits, found)
            of_sequence = max(of_sequence, tokens * group * heads * found)
    if splits == 1:
        return RoomForParts(num_tokens, 0, True, 1, how)
    of_token = heads * group * splits
    if num_tokens * of_token <= num_seqs * of_sequence:
        return RoomForParts(num_tokens, of_token, True, splits, how)
    return RoomForParts(num_seqs, of_sequence, False, splits, how)


def parts_of(room: RoomForParts, dim_v: int, compute: str) -> Any:
    """Allocate memory for the parts of splits, ``(1, 1, room.rows, padded dim_v + PART_EXTRA)``.

    The memory returns to the stream when its last reference is dropped. Its next user runs after the kernels that were
    launched with it.
    """
    return memory.empty((1, 1, room.rows, ceil_div(dim_v, 4) * 4 + PART_EXTRA), np.dtype(compute))


@register_jitable
def batch_of_parts(options, seq_lens, q_starts, ranges, out):
    """Return the `AttentionBatch` of a merge."""
    capacity, window_left, heads, slots, by_token, least, log_items, _ = options
    return AttentionBatch(
        seq_lens, q_starts, ranges, out.shape[0], np.int64(capacity), window_left,
        natural(out.shape[1]) // natural(heads), natural(heads), np.int64(slots), by_token, out.shape[0],
        Splitting(least, log_items),
    )  # fmt: skip


@register_jitable
def find_splits(batch, at, found):
    """Store the number of splits of the sequence of token `at`, the token's index in it, and the sequence's index."""
    # The sequence is the last one that starts at or before the token. In decode, each has one token.
    num_seqs = batch.seq_lens.shape[0]
    b, above = np.int64(0), np.int64(num_seqs)
    if at < num_seqs and index_at(batch.q_starts, at) == at:
        if index_at(batch.q_starts, at + 1) == at + 1:
            b, above = at, at + 1
    while above - b > 1:
        middle = (b + above) // 2
        if index_at(batch.q_starts, middle) <= at:
            b = middle
        else:
            above = middle
    own = extent(batch, b)
    t = at - own.start
    found[0], found[1], found[2] = own.splits, t, b
    if t < 0 or t >= own.tokens:
        found[0] = 1


def make_merge_splits(Q_KIND, COMPUTE):
    """Make the kernel that merges the parts of split sequences in order, some q heads of a token at a time."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    KIND, WIDTH = ("fp32", 4) if COMPUTE == "float32" else ("fp64", 2)
    SUMS, FLOATS, FOUND = THREADS * WIDTH, AT_ONCE * WIDTH, THREADS
    _, store_q = codec(Q_KIND, COMPUTE)

    @register_jitable
    def add_parts(parts, first, c, splits, start, step, weights, floats, x):
        """Add up in `x` chunk `c` of the parts of splits `start`, ``start + step`` and so on, times their weights."""
        for e in range(WIDTH):
            x[e] = F(0)
        i = start
        while i < splits:
            for m in range(AT_ONCE):
                n = natural(min(i + m * step, splits - 1))
                row = row_address(parts, 0, 0, first + n)
                load_chunk(KIND, WIDTH, parts, row, c * WIDTH, floats, m * WIDTH)
            for m in range(AT_ONCE):
                n = i + m * step
                if n < splits:
                    weight = weights[natural(n)]
                    for e in range(WIDTH):
                        x[e] = cuda.fma(weight, floats[m * WIDTH + e], x[e])
            i += AT_ONCE * step

    def kernel(parts, options, seq_lens, q_starts, ranges, sinks, out, lse):
        _, _, _, slots, by_token, _, _, each = options
        num_tokens, num_q_heads, dim = out.shape[0], natural(out.shape[1]), out.shape[2]
        batch = batch_of_parts(options, seq_lens, q_starts, ranges, out)
        thread = natural(cuda.threadIdx.x)
        width = parts.shape[3] - PART_EXTRA
        chunks = natural((dim + WIDTH - 1) // WIDTH)
        lanes = natural(min(chunks, np.int64(THREADS)))
        teams = natural(THREADS // lanes)
        lane, team = natural(thread % lanes), natural(thread // lanes)
        weights = cuda.shared.array(MAX_SPLITS, F)  # [head, split]: largest scores, then weights
        totals = cuda.shared.array(MAX_SPLITS, F)  # [head, split]
        peaks = cuda.shared.array(FOUND, F)  # [head, searcher]
        factors = cuda.shared.array(MAX_SPLITS, F)
        sums = cuda.shared.array(SUMS, F)  # [team, column]
        found = cuda.shared.array(3, np.int32)
        floats = cuda.local.array(FLOATS, F)
        x = cuda.local.array(WIDTH, F)
        pieces = natural((num_q_heads + each - 1) // each)  # groups of q heads
        searchers = natural(THREADS // natural(each))
        for job in range(
            np.int64(cuda.blockIdx.x), num_tokens * pieces, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            at = natural(natural(job) // pieces)
            h0 = (natural(job) - at * pieces) * each
            if thread == 0:
                find_splits(batch, at, found)
            cuda.syncthreads()
            splits, t, b = natural(found[0]), natural(found[1]), natural(found[2])
            if splits > 1:
                count = natural(min(np.int64(each), num_q_heads - h0))
                first = (t * num_q_heads + h0) * splits + b * slots
                if by_token:
                    first = h0 * splits + at * slots
                i = thread
                while i < count * splits:
                    weights[i] = parts[0, 0, natural(first + i), width]
                    totals[i] = parts[0, 0, natural(first + i), width + 1]
                    i = natural(i + THREADS)
                cuda.syncthreads()
                r, own = natural(thread // searchers), natural(thread % searchers)
                if r < count:
                    top = F(-np.inf)
                    i = own
                    while i < splits:
                        top = max(top, weights[natural(r * splits + i)])
                        i += searchers
                    peaks[thread] = top
                cuda.syncthreads()
                if r < count:
                    top = F(-np.inf)
                    i = np.int64(0)
                    while i < min(searchers, splits):
                        top = max(top, peaks[natural(r * searchers + i)])
                        i += 1
                    base = top if top > F(-np.inf) else F(0)
                    i = own
                    while i < splits:
                        n = natural(r * splits + i)
                        weight = F(math.exp2(weights[n] - base))
                        weights[n] = weight
                        totals[n] = weight * totals[n]
                        i += searchers
                    if own == 0:
                        factors[r] = top
                cuda.syncthreads()
                if thread < count:
                    total = F(0)
                    i = np.int64(0)
                    while i < splits:
                        total += totals[natural(thread * splits + i)]
                        i += 1
                    has_sink = sinks.shape[0] > 0
                    sink = F(sinks[h0 + thread]) * F(LOG2_E) if has_sink else F(-np.inf)
                    factor, log_sum = finish(factors[thread], total, sink, F(LN_2))
                    factors[thread] = F(factor)
                    if lse.shape[0] > 0:
                        lse[at, h0 + thread] = log_sum
                cuda.syncthreads()
                if splits <= FEW:  # a team for each head
                    r = team if team < teams else count
                    while r < count:
                        c = lane
                        while c < chunks:
                            add_parts(
                                parts, first + r * splits, c, splits, 0, 1, weights[r * splits :], floats, x
                            )  # fmt: skip
                            for e in range(WIDTH):
                                if c * WIDTH + e < dim:
                                    out[at, natural(h0 + r), c * WIDTH + e] = store_q(
                                        factors[r] * x[e]
                                    )
                            c = natural(c + lanes)
                        r = natural(r + teams)
                else:  # all teams merge one head at a time
                    for i in range(count):
                        r = natural(i)
                        for start in range(0, chunks, lanes):
                            c = natural(min(start + lane, chunks - 1))
                            own = team if team < teams else splits
                            add_parts(
                                parts, first + r * splits, c, splits, own, teams, weights[r * splits :], floats, x
                            )  # fmt: skip
                            for e in range(WIDTH):
                                sums[thread * WIDTH + e] = x[e]
                            cuda.syncthreads()
                            left = min(lanes * WIDTH, dim - start * WIDTH)
                            for d in range(thread, left, THREADS):
                                y = F(0)
                                m = natural(d)
                                while m < teams * lanes * WIDTH:
                                    y += sums[m]
                                    m += lanes * WIDTH
                                out[at, h0 + r, start * WIDTH + d] = store_q(factors[r] * y)
                            cuda.syncthreads()
            else:  # `found` has been read
                cuda.syncthreads()

    return kernel


def make_merge_few(Q_KIND):
    """Make the kernel that replaces `make_merge_splits` if no sequence has more than `FEW` splits: a warp per q head.

    A thread has the maximum and total of a split, and four columns at a time. All sums have the order of the other
    kernel. Results are therefore the same, whatever the other sequences of a batch are.
    """
    _, store_q = codec(Q_KIND, "float32")
    F, I32, U32 = np.float32, np.int32, np.uint32
    WORD = F if Q_KIND == "fp32" else np.uint16

    @register_jitable
    def add_columns(x, at, step, splits, weight):
        """Add up in `x` four columns of the parts of a row, times their weights."""
        for e in range(4):
            x[e] = F(0)
        i = np.int32(0)
        while i < splits:
            w = shuffle_float(weight, U32(i))
            a, b, c, d = load_global_16(at)
            x[0] = cuda.fma(w, a.view(np.float32), x[0])
            x[1] = cuda.fma(w, b.view(np.float32), x[1])
            x[2] = cuda.fma(w, c.view(np.float32), x[2])
            x[3] = cuda.fma(w, d.view(np.float32), x[3])
            at += step
            i = np.int32(i + 1)

    def kernel(parts, options, seq_lens, q_starts, ranges, sinks, out, lse):
        _, _, _, slots, by_token, _, _, _ = options
        num_tokens, num_q_heads, dim = out.shape[0], natural(out.shape[1]), natural(out.shape[2])
        batch = batch_of_parts(options, seq_lens, q_starts, ranges, out)
        thread = natural(cuda.threadIdx.x)
        lane, warp = natural(thread % 32), natural(shuffle(U32(thread // 32), U32(0)))
        found = cuda.shared.array(3, np.int32)
        x = cuda.local.array(4, F)
        pieces = natural((num_q_heads + (WARPS - 1)) // WARPS)
        step = parts.strides[2]
        width = np.int64(parts.shape[3] - PART_EXTRA)
        job = natural(cuda.blockIdx.x)
        while job < num_tokens * pieces:
            at = natural(job // pieces)
            h = natural((job - at * pieces) * WARPS + warp)
            if thread == 0:
                find_splits(batch, at, found)
            cuda.syncthreads()
            splits, t, b = I32(shuffle(U32(found[0]), U32(0))), natural(found[1]), natural(found[2])
            if splits > 1 and h < num_q_heads:
                first = (t * num_q_heads + h) * splits + b * slots
                if by_token:
                    first = h * splits + at * slots
                row = global_address(parts) + first * step
                top, total, weight, weighted = F(-np.inf), F(0), F(0), F(0)
                if lane < splits:
                    top_word, total_word = load_global_8(row + lane * step + 4 * width)
                    weight, weighted = top_word.view(np.float32), total_word.view(np.float32)
                    top = weight
                for lanes in (16, 8, 4, 2, 1):
                    top = max(top, shuffle_xor_float(top, U32(lanes)))
                base = top if top > F(-np.inf) else F(0)
                weight = F(math.exp2(weight - base))
                weighted = F(weight * weighted)
                i = np.int32(0)
                while i < splits:
                    total += shuffle_float(weighted, U32(i))
                    i = np.int32(i + 1)
                # Before the loop, as in the other kernel, so that products are rounded in the same way.
                sink = F(sinks[h]) * F(LOG2_E) if sinks.shape[0] > 0 else F(-np.inf)
                factor, log_sum = finish(top, total, sink, F(LN_2))
                if lse.shape[0] > 0 and lane == 0:
                    lse[at, h] = log_sum
                to = global_address(out) + at * out.strides[0] + h * out.strides[1]
                d = natural(0)
                while d < dim:  # all threads together: each has a weight that others need
                    own = natural(d + 4 * lane)
                    add_columns(x, row + 4 * min(own, width - 4), step, splits, weight)
                    for e in range(4):
                        if own + e < dim:
                            store_global(
                                to + (own + e) * out.strides[2], WORD(store_q(F(factor) * x[e]))
                            )
                    d = natural(d + 128)
            job = natural(job + np.int64(cuda.gridDim.x))
            cuda.syncthreads()  # `found` has been read

    return kernel


@functools.cache
def _merge_splits(q_kind: str, compute: str, few: bool) -> Any:
    real = getattr(types, compute)
    signature = (
        array(real, 4), types.UniTuple(types.int64, 8), INDICES, INDICES, array(types.int64, 2), array(real, 1),
        array(WORDS[q_kind], 3), array(types.float32, 2),
    )  # fmt: skip
    if few:
        return Kernel(make_merge_few, (q_kind,), signature)
    return Kernel(make_merge_splits, (q_kind, compute), signature)


def merge_splits(
    parts, room, q_kind, capacity, heads, seq_lens, q_starts, ranges, window_left, sinks, out, lse
):  # fmt: skip
    """Merge the parts of split sequences.

    Parameters
    ----------
    parts : array
        See `parts_of`.
    room : RoomForParts
        Layout of the parts.
    q_kind : str
        Kind of `out`.
    capacity : int
        Tokens that a row of the block table has room for.
    heads : int
        Number of kv heads.
    seq_lens, q_starts, ranges, window_left, sinks, out, lse
        See `numkv.kernels.operations.Operations.attend`.
    """
    num_tokens, num_q_heads = out.shape[:2]
    few = not SIMULATED and room.splits <= FEW and sinks.dtype == np.float32
    # Heads that a block merges at once. With few splits, several heads keep its teams busy. Otherwise more blocks are
    # faster.
    least = 4 if room.splits <= FEW else 1
    each = max(ceil_div(num_tokens * num_q_heads, MAX_BLOCKS // 2 + 1), least)
    each = WARPS if few else min(each, num_q_heads, MOST_HEADS, MAX_SPLITS // room.splits)
    launch(
        _merge_splits(q_kind, sinks.dtype.name, few), num_tokens * ceil_div(num_q_heads, each), THREADS,
        parts, (capacity, window_left, heads, room.slots, int(room.by_token), *room.how, each), seq_lens, q_starts,
        ranges, sinks, out, lse,
    )  # fmt: skip
