"""How attention splits long KV ranges on CUDA: the memory for parts of results, and the kernel that merges them.

A split's part of a row, in float32 or float64, is its weighted sum of V rows, padded to a multiple of 4, and 4 more
numbers: the largest score in base 2, the sum of ``2 ** (score - largest)``, and two that are not used.

The merge is parallel over splits, too: teams of threads take every so many of them, and the teams' sums are added up in
order. The order depends on the number of splits and the head dim alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import memory
from numkv.kernels.cuda.attention.items import (
    ITEMS,
    MAX_SPLIT_ROWS,
    MAX_SPLITS,
    ROWS_TOGETHER,
    SPLIT_STEP,
    Batch,
    extent,
    split_length,
)  # fmt: skip
from numkv.kernels.cuda.launches import INDICES, MAX_BLOCKS, array, jit, launch, number_at
from numkv.kernels.cuda.simd import THREADS, ceil_div, load_chunk, natural
from numkv.rows.convert import codec
from numkv.rows.softmax import finish

__all__ = ["LN_2", "LOG2_E", "PART_EXTRA", "Room", "merge_splits", "parts_of", "room_for"]

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

#: Numbers of a part beside its padded sum: its maximum and its total come first.
PART_EXTRA = 4


class Room(NamedTuple):
    """What parts a call may need room for."""

    regions: int  #: tokens or sequences
    slots: int  #: parts that each of them has room for; 0 if nothing can be split
    by_token: bool
    splits: int  #: the most that a sequence can have

    @property
    def rows(self) -> int:
        """Parts in all; 1 if there are none, as arrays have elements."""
        return max(self.regions * self.slots, 1)


def most_splits(reach: int, rows: int, heads: int) -> int:
    """The most splits that a sequence of some query rows can have, if these see no more than `reach` tokens."""
    units = heads * ceil_div(rows, ROWS_TOGETHER)
    if rows > MAX_SPLIT_ROWS or reach <= SPLIT_STEP:
        return 1
    return max(1, min(ceil_div(reach, split_length(0, rows, heads)), ceil_div(ITEMS, units)))


@functools.lru_cache(maxsize=1024)
def room_for(
    num_tokens: int, num_seqs: int, heads: int, group: int, capacity: int, window_left: int
) -> Room:
    """Room for the parts of any sequences that a call may have.

    Parts lie by tokens, or by sequences where that takes less: a token may belong to a sequence of any number of them.

    Parameters
    ----------
    num_tokens, num_seqs : int
        Queries and sequences of the call.
    heads, group : int
        kv heads, and q heads of each.
    capacity : int
        Tokens that a sequence can have.
    window_left : int
        Size of the window; negative for none.
    """
    # A sequence that is alone has all queries.
    most = min(num_tokens, MAX_SPLIT_ROWS // group)
    counts = range(1, most + 1) if num_seqs > 1 else [num_tokens] if num_tokens <= most else []
    splits, of_sequence = 1, 0
    for tokens in counts:
        reach = capacity
        if window_left >= 0:
            reach = min(capacity, window_left + tokens + SPLIT_STEP)
        found = most_splits(reach, tokens * group, heads)
        if found > 1:
            splits = max(splits, found)
            of_sequence = max(of_sequence, tokens * group * heads * found)
    if splits == 1:
        return Room(num_tokens, 0, True, 1)
    of_token = heads * group * splits
    if num_tokens * of_token <= num_seqs * of_sequence:
        return Room(num_tokens, of_token, True, splits)
    return Room(num_seqs, of_sequence, False, splits)


def parts_of(room: Room, dim_v: int, compute: str) -> Any:
    """Memory for the parts of splits, ``(1, 1, room.rows, padded dim_v + PART_EXTRA)``.

    It goes back to the stream when nobody holds it; what takes it next runs after the kernels that were launched with
    it.
    """
    return memory.empty((1, 1, room.rows, ceil_div(dim_v, 4) * 4 + PART_EXTRA), np.dtype(compute))


def make_merge_splits(Q_KIND, COMPUTE):
    """The kernel that merges the parts of split sequences, in order."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    KIND, WIDTH = ("fp32", 4) if COMPUTE == "float32" else ("fp64", 2)
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2
    SUMS = THREADS * WIDTH
    SEARCHERS = min(16, THREADS)
    AT_ONCE = 4  # splits that a thread reads ahead
    FLOATS = AT_ONCE * WIDTH
    _, store_q = codec(Q_KIND, COMPUTE)

    def kernel(
        parts, capacity, heads, slots, by_token, each, seq_lens, q_starts, ranges, window_left, sinks, out, lse
    ):  # fmt: skip
        num_tokens, num_q_heads, dim = out.shape
        num_seqs = seq_lens.shape[0]
        num_sinks = sinks.shape[0]
        group = natural(num_q_heads) // natural(heads)
        batch = Batch(
            seq_lens, q_starts, ranges, num_tokens, np.int64(capacity), window_left, group,
            np.int64(heads), np.int64(slots), by_token,
        )  # fmt: skip
        thread = natural(cuda.threadIdx.x)
        width = parts.shape[3] - 4
        chunks = natural((dim + WIDTH - 1) // WIDTH)
        lanes = min(chunks, np.int64(THREADS))
        teams = THREADS // lanes
        lane, team = thread % lanes, thread // lanes
        tops = cuda.shared.array(MAX_SPLITS, F)
        totals = cuda.shared.array(MAX_SPLITS, F)
        peaks = cuda.shared.array(SEARCHERS, F)
        sums = cuda.shared.array(SUMS, F)  # [team, column]
        team_totals = cuda.shared.array(THREADS, F)
        floats = cuda.local.array(FLOATS, F)
        x = cuda.local.array(WIDTH, F)
        pieces = natural((num_q_heads + each - 1) // each)  # of the heads
        for job in range(
            np.int64(cuda.blockIdx.x), num_tokens * pieces, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            at, piece = natural(job) // pieces, natural(job) % pieces
            # The sequence whose queries token `at` is one of: the last that starts no later. In decoding, each has one.
            b, above = np.int64(0), np.int64(num_seqs)
            if at < num_seqs and number_at(q_starts, at) == at and number_at(q_starts, at + 1) > at:
                b, above = at, at + 1
            while above - b > 1:
                middle = (b + above) // 2
                if number_at(q_starts, middle) <= at:
                    b = middle
                else:
                    above = middle
            own = extent(batch, b)
            splits, t = own.splits, at - own.start
            if splits == 1 or t < 0 or t >= own.tokens:
                continue
            for h in range(piece * each, min((piece + 1) * each, num_q_heads)):
                first = (t * num_q_heads + h) * splits + b * slots
                if by_token:
                    first = h * splits + at * slots
                for i in range(thread, splits, THREADS):
                    tops[i] = parts[0, 0, first + i, width]
                    totals[i] = parts[0, 0, first + i, width + 1]
                cuda.syncthreads()
                if thread < SEARCHERS:
                    top = F(-np.inf)
                    for i in range(thread, splits, SEARCHERS):
                        top = max(top, tops[i])
                    peaks[thread] = top
                cuda.syncthreads()
                top = F(-np.inf)
                for i in range(SEARCHERS):
                    top = max(top, peaks[i])
                base = top if top > F(-np.inf) else F(0)
                for column in range(0, chunks, lanes):
                    c = min(column + lane, chunks - 1)
                    total = F(0)
                    for e in range(WIDTH):
                        x[e] = F(0)
                    step = AT_ONCE * teams
                    for i in range(team if team < teams else splits, splits, step):
                        for m in range(AT_ONCE):
                            n = min(i + m * teams, splits - 1)
                            load_chunk(
                                KIND, WIDTH, parts, 0, 0, first + n, c * WIDTH, floats, m * WIDTH
                            )
                        for m in range(AT_ONCE):
                            n = i + m * teams
                            if n < splits:
                                weight = F(math.exp2(tops[n] - base))
                                total = cuda.fma(weight, totals[n], total)
                                for e in range(WIDTH):
                                    x[e] = cuda.fma(weight, floats[m * WIDTH + e], x[e])
                    for e in range(WIDTH):
                        sums[thread * WIDTH + e] = x[e]
                    if lane == 0:
                        team_totals[team] = total
                    cuda.syncthreads()
                    total = F(0)
                    for m in range(teams):
                        total += team_totals[m]
                    sink = F(sinks[h]) * F(TO_BASE_2) if num_sinks > 0 else F(-np.inf)
                    factor, log_sum = finish(top, total, sink, F(TO_BASE_E))
                    start = column * WIDTH
                    for d in range(thread, min(lanes * WIDTH, dim - start), THREADS):
                        y = F(0)
                        for m in range(teams):
                            y += sums[m * lanes * WIDTH + d]
                        out[at, h, start + d] = store_q(F(factor) * y)
                    if thread == 0 and lse.shape[0] > 0:
                        lse[at, h] = log_sum
                    cuda.syncthreads()

    return kernel


@functools.cache
def _merge_splits(q_kind: str, compute: str) -> Any:
    real = getattr(types, compute)
    signature = (
        array(real, 4), *[types.int64] * 5, INDICES, INDICES, array(types.int64, 2), types.int64,
        array(real, 1), array(WORDS[q_kind], 3), array(types.float32, 2),
    )  # fmt: skip
    return jit(make_merge_splits, (q_kind, compute), signature)


def merge_splits(
    parts, room, q_kind, capacity, heads, seq_lens, q_starts, ranges, window_left, sinks, out, lse
):  # fmt: skip
    """Merge the parts of split sequences.

    Parameters
    ----------
    parts : array
        See `parts_of`.
    room : Room
        Where they lie.
    q_kind : str
        Kind of `out`.
    capacity : int
        Tokens that a row of the block table can say the places of.
    heads : int
        kv heads.
    seq_lens, q_starts, ranges, window_left, sinks, out, lse
        See `numkv.kernels.operations.Operations.attend`.
    """
    num_tokens, num_q_heads = out.shape[:2]
    each = min(num_q_heads, ceil_div(num_tokens * num_q_heads, MAX_BLOCKS))
    launch(
        _merge_splits(q_kind, sinks.dtype.name), num_tokens * ceil_div(num_q_heads, each), THREADS,
        parts, capacity, heads, room.slots, int(room.by_token), each, seq_lens, q_starts, ranges, window_left,
        sinks, out, lse,
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for q_kind, compute in (("fp32", "float32"), ("fp16", "float32"), ("bf16", "float64")):
        yield f"splits[{q_kind}, in {compute}]", *_merge_splits(q_kind, compute).described
