"""Attention over a paged pool (a contiguous cache is one with long blocks), on the CPU.

For query row (token t, q head h) at position ``p = seq_len - T + t`` and kv head ``g = h // group``::

    score[j] = soft_cap(sm_scale * q[t, h] . k[slot(j), g])       for p - window_left <= j <= p
    out[t, h] = sum over j of softmax(score)[j] * v[slot(j), g]

The unit of work is an *item*: one sequence, one or several kv heads, one block of query tokens (all q heads of the
groups) and one split of the KV range. Where blocks are short, an item takes several heads, one after another in every
tile: memory is then read a whole block at a time. Threads take items one after another, so ragged batches balance
themselves, and no item's result depends on which thread took it. K and V are read once per item, a tile of tokens at
a time, with the online softmax of Milakov and Gimelshein (arXiv:1805.02867); a tile's V rows are asked for ahead of
time while its scores are taken, the next tile's K rows while V rows are weighed. Splits are merged afterwards in order,
as in Flash-Decoding (Dao et al., 2023). Heads do not mix, and split boundaries depend on the sequence's own length and
window alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.convert import from_floats, to_floats
from numkv.kernels.cpu.memory import aligned
from numkv.kernels.cpu.simd import (
    LANES,
    NEVER,
    RAMP,
    TILE,
    address_of,
    arrange_rows,
    borrow,
    code_row,
    fill_ramp,
    gather_groups,
    gather_tile,
    most_rows,
    next_item,
    on_threads,
    prefetch,
    row_of,
    score_tile,
    soft_cap_tile,
    softmax_rows,
    weigh_tile,
)
from numkv.kernels.cpu.simd_integers import (
    BLOCK,
    INT4_INTEGERS,
    code_group_weights,
    code_weights,
    fill_code_row,
    score_integers,
    sum_code_groups,
    weigh_integers,
)
from numkv.kernels.cpu.simd_tiles import (
    BLOCK_ROWS,
    SEGMENT,
    all_finite,
    find_rows,
    has_tiles,
    pack_rows,
    pack_values,
    score_rows,
    softmax_tiles,
    tiles_off,
    tiles_on,
    turn_rows,
    weigh_rows,
)
from numkv.kernels.cpu.threads import ON_THREADS, launching, num_threads, run
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kernels.scratch import Workspaces
from numkv.rows.int4 import GROUP
from numkv.rows.softmax import finish, power_of_2

__all__ = ["attend"]

# Query rows of an item. Many enough that a K tile, read once, is used often; few enough to stay in L1 and L2.
MAX_ROWS = 64
# On a matrix unit, where K and V are taken apart and put together for it: what that costs is for more rows.
TILE_ROWS = 256
# Query rows that vector code takes at once, at most.
AT_ONCE = 8
# Rows that may be missing of 8, 4 or 2.
FILL_UP = 3
# Floats in a cache line.
LINE = 16
# A split of the KV range has at least so many tokens, and a sequence at most so many splits.
MIN_SPLIT = 1024
MAX_SPLITS = 64
# A block whose heads lie in runs of so many tokens or more is read a head at a time; of shorter ones, an item takes
# several heads as long as each thread is left with so many items to balance.
LONG_RUN = 64
ITEMS_EACH = 4
# Numbers of a table of offsets: one for each token of a tile, and what `fill_ramp` may write beyond. A turn has four
# tables: where K rows, V rows, scales of K and scales of V start; then, of K and of V, runs of bytes (see `Ahead`).
PART = TILE + RAMP
RUNS = 2 * (TILE + 1)
K_RUNS, V_RUNS = 4 * PART, 4 * PART + RUNS
TURN = (V_RUNS + RUNS + RAMP - 1) // RAMP * RAMP  # whole cache lines
# Integers of a worker: tables for two turns, and for a matrix unit where K rows are and how many parts queries take.
WORKER_INTS = 2 * TURN + 8 + TILE_ROWS
# Floats that query rows on their way to a matrix unit, and its sums, take for a moment.
SPARE_FLOATS = 768
# Multiply-adds below which one thread does it all, where query rows fewer than `LEAST_ROWS` count as so many: K and V
# are read and converted all the same. Times of two threads as parts of those of one, on an Intel Xeon with 2 cores, as
# tenth percentiles, in groups of 4 q heads of 128, for 0.5, 1, 2 and 4 million: fp16 out of caches 0.96, 0.79, 0.79
# and 0.62, from memory 0.86, 0.72, 0.70 and 0.55; int8 out of caches 0.88, 0.80, 0.84 and 0.76. What is saved below 2
# million is lost again where threads sleep, or something else has taken their core.
SERIAL_WORK = 2_000_000
LEAST_ROWS = 4

# Query rows of a sequence up to which vector code is as fast as a matrix unit, or faster.
FEW_ROWS = 8

# Kinds with scales.
QUANTISED = ("int8", "int4")

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


# Loops over a row stand alone, over arrays that begin with it, so that each becomes vector code.


@register_jitable
def _clear(x):
    for i in range(len(x)):
        x[i] = 0


@register_jitable
def _multiply(x, factor, target):
    for i in range(len(x)):
        target[i] = factor * x[i]


def make_attention(K_KIND, V_KIND, COMPUTE, TILES):
    """The attention kernel for a K kind, a V kind and the float type it computes in; with `TILES` on a matrix unit."""
    PAD = LANES  # rows in scratch are padded to whole vectors
    F = np.float32 if COMPUTE == "float32" else np.float64
    # Whether scores and weighted sums are taken in integers, and those of INT4.
    K_INTEGERS, V_INTEGERS = in_integers(K_KIND, COMPUTE), in_integers(V_KIND, COMPUTE)
    K_PACKED, V_PACKED = K_INTEGERS and K_KIND == "int4", V_INTEGERS and V_KIND == "int4"
    ROWS = TILE_ROWS if TILES else MAX_ROWS
    K_PAD = TILE if TILES else BLOCK if K_PACKED else PAD
    MOST = most_rows(COMPUTE)  # rows that vector code takes at once
    K_SCALED, V_SCALED = K_KIND in QUANTISED, V_KIND in QUANTISED
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, by_slot, sm_scale, soft_cap,
        window_left, sinks, out, lse, parts_at, floats, ints, launch, worker, workers,
    ):  # fmt: skip
        # They are sliced often.
        block_table, ranges = borrow(block_table), borrow(ranges)
        floats, ints = borrow(floats), borrow(ints)
        num_seqs = len(seq_lens)
        num_q_heads = q.shape[1]
        num_kv_heads = k.shape[1]
        block_size = np.int64(k.shape[2])
        # Tokens that an entry of the block table stands for.
        unit = np.int64(1) if by_slot else block_size
        capacity = block_table.shape[1] * unit
        dim = q.shape[2]
        dim_v = out.shape[2]
        group = num_q_heads // num_kv_heads
        threads = workers
        if worker < 0:  # there is no plan so far
            threads = _plan(
                seq_lens, q_starts, ranges, capacity, group, num_kv_heads, unit, dim + dim_v,
                window_left, ROWS, workers, ints,
            )  # fmt: skip
            worker = np.int64(0)
        if launch != 0 and threads > 1:
            on_threads(launch, workers)
            return
        block_tokens = max(1, ROWS // group)
        # Whole groups are read, if not written; and every table begins where a cache line does.
        max_rows = (max(ROWS, group) + AT_ONCE + LINE - 1) // LINE * LINE
        pad_dim = (dim + K_PAD - 1) // K_PAD * K_PAD
        V_PAD = np.int64(TILE if TILES else PAD)
        pad_v = (dim_v + V_PAD - 1) // V_PAD * V_PAD
        k_step = (
            k.strides[0] // k.itemsize,
            k.strides[1] // k.itemsize,
            k.strides[2] // k.itemsize,
        )
        v_step = (
            v.strides[0] // v.itemsize,
            v.strides[1] // v.itemsize,
            v.strides[2] // v.itemsize,
        )
        # Where a pool begins, words of a row, bytes of a word.
        k_rows = address_of(k), np.int64(k.shape[3]), np.int64(k.itemsize)
        v_rows = address_of(v), np.int64(v.shape[3]), np.int64(v.itemsize)
        # Of float kinds, scales are an empty array.
        ks_step = (
            k_scale.strides[0] // k_scale.itemsize,
            k_scale.strides[1] // k_scale.itemsize,
            k_scale.strides[2] // k_scale.itemsize,
        )
        vs_step = (
            v_scale.strides[0] // v_scale.itemsize,
            v_scale.strides[1] // v_scale.itemsize,
            v_scale.strides[2] // v_scale.itemsize,
        )
        # Whether offsets of K are those of V, too.
        same = k_step == v_step and K_SCALED == V_SCALED and (not K_SCALED or ks_step == vs_step)
        V_PART = np.int64(0) if same else np.int64(PART)
        # Scales of a row: one, or one for each group.
        k_scales = num_groups(dim) if K_KIND == "int4" else np.int64(1)
        v_scales = num_groups(dim_v) if V_KIND == "int4" else np.int64(1)
        # Tokens whose scales make a cache line.
        k_scale_step, v_scale_step = scale_step(dim), scale_step(dim_v)
        k_blocks, v_blocks = (dim + BLOCK - 1) // BLOCK, (dim_v + BLOCK - 1) // BLOCK
        k_line = max(np.int64(1), 64 // (k_scales * k_scale.itemsize))
        v_line = max(np.int64(1), 64 // (v_scales * v_scale.itemsize))

        # Places in `ints`, which `_plan` has filled, and in `floats`.
        FIRST_ITEM, FIRST_PART, SPLIT_LEN = 2, 3 + num_seqs, 4 + 2 * num_seqs
        HEADS = 4 + 3 * num_seqs
        OFFSETS = 4 + 4 * num_seqs
        items = ints[FIRST_ITEM + num_seqs]
        scratch, part_size = scratch_size(group, dim + BLOCK, dim_v + BLOCK, TILES), dim_v + 2

        Q = worker * scratch
        O = Q + max_rows * pad_dim
        MAXIMA = O + max_rows * pad_v
        SUMS = MAXIMA + max_rows
        Q_SCALES = SUMS + max_rows  # of query rows as integers
        S = Q_SCALES + max_rows
        # Of the tile's tokens, for quantised kinds; of INT8 one for each.
        K_SCALES = S + BLOCK_ROWS * TILE
        V_SCALES = K_SCALES + 2 * TILE * k_scale_step  # of groups, the lowest levels too
        RESCALE = V_SCALES + 2 * TILE * v_scale_step
        W_SCALES = RESCALE + max_rows  # of weights as integers
        Q_SUMS = W_SCALES + max_rows  # of query rows as integers, by lane
        # Of V: what the lowest levels of groups add up to, and scales of weights.
        W_SUMS = Q_SUMS + max_rows * 16 * k_blocks
        W = W_SUMS + LINE * 4 * v_blocks  # weights of groups
        Q_ROWS = W + AT_ONCE * (TILE // 2 * 4) * v_blocks  # query rows as they are read
        SUM_ROWS = Q_ROWS + 2 * max_rows * pad_dim  # and their sums
        ARRANGED = SUM_ROWS + 2 * max_rows * 16 * k_blocks  # how many were arranged together
        # Floats of a query row.
        q_size = pad_dim // 2 if K_INTEGERS else pad_dim
        # For the matrix unit: V rows, scores, what it adds up, K rows where they have to be moved, and queries.
        V_TILES = ARRANGED + 2 * max_rows
        SCORES = V_TILES + pad_v * (TILE // 2)
        SPARE = SCORES + 2 * max_rows * TILE
        BOUNDS = SPARE + SPARE_FLOATS
        TILE_SCALES = BOUNDS + 2 * BLOCK_ROWS
        K_ROWS = TILE_SCALES + BLOCK_ROWS
        Q_TILES = K_ROWS + tile_floats(dim)
        q_tiles = 3 * tile_floats(dim) // 4  # of a block of rows
        COLUMNS = Q_TILES + tile_blocks(group) * q_tiles  # output rows, turned, by blocks
        if TILES:
            tiles_on()
        # Of K and V rows and of their scales, for two turns.
        offsets = ints[OFFSETS + worker * WORKER_INTS :]
        places = offsets[2 * TURN :]
        b = np.int64(0)
        while True:
            item = next_item(ints)
            if item >= items:
                break
            while ints[FIRST_ITEM + b + 1] <= item:
                b += 1
            # -- which rows and which part of the KV range
            tokens = q_starts[b + 1] - q_starts[b]
            length = np.int64(seq_lens[b]) if len(ranges) == 0 else capacity
            split_len = ints[SPLIT_LEN + b]
            inner = item - ints[FIRST_ITEM + b]
            heads = ints[HEADS + b]
            head_parts = (num_kv_heads + heads - 1) // heads
            g0 = inner % head_parts * heads
            g1 = min(num_kv_heads, g0 + heads)
            inner //= head_parts
            blocks = (tokens + block_tokens - 1) // block_tokens
            # One of the two is 0: there are either blocks or splits.  Later blocks see more: take them first.
            block = blocks - 1 - inner if blocks > 1 else np.int64(0)
            split = inner if blocks == 1 else np.int64(0)
            t0 = block * block_tokens
            rows = (min(tokens, t0 + block_tokens) - t0) * group
            row_blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
            position = length - tokens + t0
            begin, end = _span(
                ranges, q_starts[b] + t0, rows // group, position, window_left, length
            )
            if split_len > 0:
                first = begin - begin % TILE
                begin = max(begin, first + split * split_len)
                end = min(end, first + (split + 1) * split_len)

            scale = F(sm_scale) if soft_cap > 0 else F(sm_scale * TO_BASE_2)
            # Few rows are no work for a matrix unit.
            tiled = TILES and tokens * group > FEW_ROWS
            # There, queries come as they are, whose lower parts may be zero, and scores are scaled.
            first_scale = F(1) if K_KIND == "bf16" and tiled else scale
            r = np.int64(0)
            for row in range(rows // group * (g1 - g0)):
                t = q_starts[b] + t0 + row % (rows // group)
                h0 = (g0 + row // (rows // group)) * group
                for h in range(h0, h0 + group):
                    q_row = floats[Q + r * pad_dim : Q + (r + 1) * pad_dim]
                    if K_PACKED:
                        _clear(q_row)
                        fill_code_row(q_row, row_of(q, (t, h)), scale)
                    else:
                        _multiply(row_of(q, (t, h)), first_scale, q_row)
                        _clear(q_row[dim:])
                    floats[Q_SCALES + r] = F(1)
                    if K_INTEGERS:
                        floats[Q_SCALES + r] = code_row(floats, Q + r * pad_dim, dim, pad_dim)
                    if K_PACKED:
                        sums_at = Q_SUMS + r * 16 * k_blocks
                        sum_code_groups(floats, Q + r * pad_dim, dim, sums_at)
                    floats[MAXIMA + r] = F(-np.inf)
                    r += 1
            # Rows that fill up the last group take part in the arithmetic: what happens to be there may be denormal
            # numbers, which are a hundred times slower than others.
            end_r = r + FILL_UP
            _clear(floats[Q + r * pad_dim : Q + end_r * pad_dim])
            _clear(floats[O + (r * pad_v if tiled else 0) : O + end_r * pad_v])
            _clear(floats[MAXIMA + r : MAXIMA + end_r])
            _clear(floats[SUMS : SUMS + end_r])
            _clear(floats[Q_SCALES + r : Q_SCALES + end_r])
            if K_PACKED:
                _clear(floats[Q_SUMS + r * 16 * k_blocks : Q_SUMS + end_r * 16 * k_blocks])
            # Rows of a head, as many as vector code takes for them.
            padded = (rows + AT_ONCE - 1) // AT_ONCE * AT_ONCE
            padded = padded if rows > 4 else np.int64(4) if rows > 2 else rows
            _clear(floats[ARRANGED : ARRANGED + padded * (g1 - g0)])

            in_columns = tiled
            if TILES and tiled:
                number = (g1 - g0) * row_blocks
                _clear(floats[COLUMNS : COLUMNS + number * BLOCK_ROWS * pad_v])
                for i in range(g1 - g0):
                    for r in range(0, rows, BLOCK_ROWS):
                        number = i * row_blocks + r // BLOCK_ROWS
                        places[8 + number] = pack_rows(
                            K_KIND, floats, Q + (i * rows + r) * pad_dim, pad_dim,
                            min(rows - r, BLOCK_ROWS), dim, Q_TILES + number * q_tiles, SPARE,
                        )  # fmt: skip
                if K_KIND == "bf16":  # vector code takes the tiles that the unit cannot
                    for i in range(BLOCK_ROWS):
                        floats[TILE_SCALES + i] = scale
                    q_rows = floats[Q : Q + rows * (g1 - g0) * pad_dim]
                    _multiply(q_rows, scale, q_rows)

            # -- tiles of tokens, each for one head after another
            tile, g = begin - begin % TILE, g0
            # Where the rows of this turn and of the next start: V of this one and K of the next are asked for.
            here, next_ = np.int64(0), np.int64(TURN)
            _fill_offsets(
                offsets, tile, begin, end, block_table[b], unit, block_size, g,
                k_step, k_rows, v_step, v_rows, K_SCALED, ks_step, V_SCALED, vs_step, same,
            )  # fmt: skip
            while tile < end:
                tile_ahead, g_ahead = tile, g + 1
                if g_ahead == g1:
                    tile_ahead, g_ahead = tile + TILE, g0
                k_at, v_at = offsets[here:], offsets[here + V_PART :]
                k_ahead = offsets[next_:]
                _fill_offsets(
                    k_ahead, tile_ahead, begin, end, block_table[b], unit, block_size, g_ahead,
                    k_step, k_rows, v_step, v_rows, K_SCALED, ks_step, V_SCALED, vs_step, same,
                )  # fmt: skip
                v_runs, k_runs = offsets[here + V_RUNS :], offsets[next_ + K_RUNS :]
                ks_at, vs_at = offsets[here + 2 * PART :], offsets[here + 2 * PART + V_PART :]
                if K_KIND == "int8":
                    gather_tile(COMPUTE, floats, K_SCALES, k_scale, ks_at)
                if K_KIND == "int4":
                    gather_groups(COMPUTE, floats, K_SCALES, k_scale, ks_at, k_scales)
                if K_SCALED:
                    for i in range(0, TILE, k_line):
                        prefetch(k_scale, k_ahead[2 * PART + i])
                if V_KIND == "int8":
                    gather_tile(COMPUTE, floats, V_SCALES, v_scale, vs_at)
                if V_KIND == "int4":
                    gather_groups(COMPUTE, floats, V_SCALES, v_scale, vs_at, v_scales)
                if V_SCALED:
                    for i in range(0, TILE, v_line):
                        prefetch(v_scale, k_ahead[2 * PART + V_PART + i])
                by_tiles = tiled
                if TILES and tiled:
                    # What rows of the item see of the tile: all that any sees, and whether they see the same.
                    low, high, alike = np.int64(TILE), np.int64(0), True
                    # Without ranges later tokens see later ones, or the same: the first and the last tell.
                    last = rows // group - 1
                    for t in range(0, last + 1, 1 if len(ranges) > 0 else max(last, 1)):
                        sees = _visible(
                            ranges, q_starts[b] + t0, t, position, window_left, begin, end, tile
                        )
                        if t > 0 and (sees[0] != low or sees[1] != high):
                            alike = False
                        if len(ranges) == 0:
                            low, high = sees[0] if t == 0 else low, sees[1]
                        elif sees[0] < sees[1]:
                            low, high = min(low, sees[0]), max(high, sees[1])
                    # A weight of 0 does not hide a NaN.
                    by_tiles = alike or all_finite(V_KIND, v, v_at, low, high, dim_v)
                if TILES and by_tiles != in_columns:
                    _turn_outputs(floats, O, COLUMNS, g1 - g0, rows, row_blocks, pad_v, by_tiles)
                    in_columns = by_tiles
                if TILES and by_tiles:
                    if low < high:
                        find_rows(K_KIND, places, floats, K_ROWS, k, k_at, k_step[2], dim)
                    # One kind of work after another, each for all rows: where the unit stops or starts, all wait.
                    for r in range(0, rows if low < high else 0, BLOCK_ROWS):
                        number = (g - g0) * row_blocks + r // BLOCK_ROWS
                        score_rows(
                            K_KIND, floats, Q_TILES + number * q_tiles, places[8 + number], places, dim,
                            SCORES + r * 2 * TILE, V_KIND, v, v_at, np.int64(r == 0),
                        )  # fmt: skip
                    for r in range(0, rows if low < high else 0, BLOCK_ROWS):
                        row = (g - g0) * rows + r  # of scratch
                        taken = min(rows - r, BLOCK_ROWS)
                        partly = not alike or low > 0 or high < TILE
                        for i in range(BLOCK_ROWS if partly else 0):
                            sees = _visible(
                                ranges, q_starts[b] + t0, min(r + i, rows - 1) // group, position,
                                window_left, begin, end, tile,
                            )  # fmt: skip
                            floats[BOUNDS + i], floats[BOUNDS + BLOCK_ROWS + i] = sees
                        softmax_tiles(
                            K_KIND, V_KIND, floats, SCORES + r * 2 * TILE, taken,
                            TILE_SCALES if K_KIND == "bf16" else Q_SCALES + row, K_SCALES,
                            F(soft_cap), np.int64(partly), BOUNDS, MAXIMA + row, SUMS + row,
                            RESCALE + r, V_SCALES, W_SCALES + r,
                        )  # fmt: skip
                    for column in range(0, dim_v if low < high else 0, SEGMENT):
                        pack_values(
                            V_KIND, floats, V_TILES + column * (TILE // 2), v, v_at, low, high, column, dim_v,
                            K_KIND, k, k_ahead,
                        )  # fmt: skip
                    for r in range(0, rows if low < high else 0, BLOCK_ROWS):
                        number = (g - g0) * row_blocks + r // BLOCK_ROWS
                        weigh_rows(
                            V_KIND, floats, SCORES + r * 2 * TILE, W_SCALES + r, V_TILES, pad_v,
                            SPARE, COLUMNS + number * BLOCK_ROWS * pad_v, RESCALE + r,
                        )  # fmt: skip
                else:
                    r = np.int64(0)
                    while r < rows:
                        row = (g - g0) * rows + r  # of scratch
                        t = r // group if r >= group else np.int64(0)
                        taken = min(rows - r, MOST)
                        low, high = _visible(
                            ranges, q_starts[b] + t0, t, position, window_left, begin, end, tile
                        )
                        # Rows that see different tokens go apart: a weight of 0 does not hide a NaN.
                        for other in range(t + 1, (r + taken - 1) // group + 1):
                            sees = _visible(
                                ranges, q_starts[b] + t0, other, position, window_left, begin, end,
                                tile,
                            )  # fmt: skip
                            if sees[0] != low or sees[1] != high:
                                taken = min((t + 1) * group - r, MOST)
                                break
                        at_once = 8 if taken > 4 else 4 if taken > 2 else taken
                        if low < high:
                            o_at = O + row * pad_v
                            # Arranged once for an item, unless what its rows see makes other groups of them.
                            place = (g - g0) * padded + r
                            if floats[ARRANGED + place] != F(at_once):
                                for i in range(max(0, place - AT_ONCE + 1), place + at_once):
                                    floats[ARRANGED + i] = F(0)
                                floats[ARRANGED + place] = F(at_once)
                                arrange_rows(
                                    COMPUTE, at_once, floats, Q + row * pad_dim, pad_dim, q_size,
                                    Q_ROWS + place * pad_dim,
                                )  # fmt: skip
                                if K_PACKED:
                                    arrange_rows(
                                        COMPUTE, at_once, floats, Q_SUMS + row * 16 * k_blocks,
                                        16 * k_blocks, 16 * k_blocks, SUM_ROWS + place * 16 * k_blocks,
                                    )  # fmt: skip
                            if K_PACKED:
                                score_integers(
                                    at_once, floats, Q_ROWS + place * pad_dim, Q_SCALES + row,
                                    SUM_ROWS + place * 16 * k_blocks, k, k_at, high, dim, K_SCALES, S,
                                    V_KIND, v_runs,
                                )  # fmt: skip
                            else:
                                score_tile(
                                    K_KIND, COMPUTE, at_once, floats, Q_ROWS + place * pad_dim,
                                    Q_SCALES + row, k, k_at, high, dim, K_SCALES, k_scales, S, V_KIND,
                                    v_runs,
                                )  # fmt: skip
                            if soft_cap > 0:
                                soft_cap_tile(COMPUTE, at_once, floats, S, F(soft_cap))
                            softmax_rows(
                                COMPUTE, at_once, taken, floats, S, low, high, MAXIMA + row, SUMS + row,
                                RESCALE,
                            )  # fmt: skip
                            if V_PACKED:
                                code_group_weights(
                                    at_once, floats, S, V_SCALES, dim_v, low, high, W, W_SUMS
                                )
                            elif V_INTEGERS:
                                code_weights(at_once, floats, S, V_SCALES, low, high, W_SCALES)
                            if V_INTEGERS:
                                weigh_integers(
                                    V_KIND, at_once, taken, floats, W if V_PACKED else S, W_SCALES, v, v_at,
                                    low, high, dim_v, W_SUMS, o_at, pad_v, RESCALE, K_KIND, k_runs,
                                )  # fmt: skip
                            else:
                                weigh_tile(
                                    V_KIND, COMPUTE, at_once, taken, floats, S, v, v_at, low, high, dim_v,
                                    V_SCALES, v_scales, o_at, pad_v, RESCALE, K_KIND, k_runs,
                                )  # fmt: skip
                        r += taken
                tile, g = tile_ahead, g_ahead
                here, next_ = next_, here

            if TILES and in_columns:
                _turn_outputs(floats, O, COLUMNS, g1 - g0, rows, row_blocks, pad_v, False)

            # -- the result, or this split's part of it
            r = np.int64(0)
            for row in range(rows // group * (g1 - g0)):
                t = t0 + row % (rows // group)
                h0 = (g0 + row // (rows // group)) * group
                for h in range(h0, h0 + group):
                    o_row = floats[O + r * pad_v : O + r * pad_v + dim_v]
                    if split_len == 0:
                        sink = F(sinks[h]) * F(TO_BASE_2) if len(sinks) > 0 else F(-np.inf)
                        factor, log_sum = finish(
                            floats[MAXIMA + r], floats[SUMS + r], sink, F(TO_BASE_E)
                        )
                        _multiply(o_row, F(factor), row_of(out, (q_starts[b] + t, h)))
                        lse[q_starts[b] + t, h] = log_sum
                    else:
                        part = ints[FIRST_PART + b] + (split * tokens + t) * num_q_heads + h
                        at = parts_at + part * part_size
                        floats[at] = floats[MAXIMA + r]
                        floats[at + 1] = floats[SUMS + r]
                        _multiply(o_row, F(1), floats[at + 2 : at + part_size])
                    r += 1
        if TILES:
            tiles_off()

    return kernel


def make_merge_splits(COMPUTE):
    """The kernel that merges the parts of sequences whose KV range was split, in order."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2

    def kernel(q_starts, sinks, out, lse, parts_at, floats, ints, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_seqs, num_q_heads, dim_v = len(q_starts) - 1, out.shape[1], out.shape[2]
        FIRST_PART, SPLIT_LEN = 3 + num_seqs, 4 + 2 * num_seqs
        part_size = dim_v + 2
        while True:
            seq_head = next_item(ints[1:])
            if seq_head >= num_seqs * num_q_heads:
                break
            b, h = seq_head // num_q_heads, seq_head % num_q_heads
            if ints[SPLIT_LEN + b] == 0:
                continue
            tokens = q_starts[b + 1] - q_starts[b]
            rows = tokens * num_q_heads
            splits = (ints[FIRST_PART + b + 1] - ints[FIRST_PART + b]) // rows
            for t in range(tokens):
                start = parts_at + (ints[FIRST_PART + b] + t * num_q_heads + h) * part_size
                maximum = F(-np.inf)
                for i in range(splits):
                    maximum = max(maximum, floats[start + i * rows * part_size])
                total = F(0)
                sums = floats[start + 2 : start + part_size]  # the first part's row takes the sum
                for i in range(splits):
                    at = start + i * rows * part_size
                    weight = F(power_of_2(floats[at], maximum))
                    total += weight * floats[at + 1]
                    part = floats[at + 2 : at + part_size]
                    if i == 0:
                        for d in range(dim_v):
                            sums[d] = weight * part[d]
                    else:
                        for d in range(dim_v):
                            sums[d] += weight * part[d]
                sink = F(sinks[h]) * F(TO_BASE_2) if len(sinks) > 0 else F(-np.inf)
                factor, log_sum = finish(maximum, total, sink, F(TO_BASE_E))
                for d in range(dim_v):
                    out[q_starts[b] + t, h, d] = F(factor) * sums[d]
                lse[q_starts[b] + t, h] = log_sum

    return kernel


@register_jitable
def num_groups(dim):
    """Groups of a row that has a scale for each."""
    return (dim + GROUP - 1) // GROUP


@register_jitable
def scale_step(dim):
    """How many floats a token's scales take in scratch."""
    return (num_groups(dim) + 3) // 4 * 4


@register_jitable
def tile_floats(dim):
    """Floats that a tile's rows take for the matrix unit: of bf16, which takes most."""
    return (dim + TILE - 1) // TILE * TILE * TILE // 2


@register_jitable
def tile_blocks(group):
    """Blocks of query rows that an item has at most on a matrix unit."""
    blocks = max(1, TILE_ROWS // group) * ((group + BLOCK_ROWS - 1) // BLOCK_ROWS)
    return blocks + TILE_ROWS // BLOCK_ROWS


@register_jitable
def _turn_outputs(floats, O, COLUMNS, heads, rows, row_blocks, pad_v, to_columns):
    """Turn an item's output rows into columns, by blocks of rows, or back."""
    blocks, block_size = pad_v // BLOCK_ROWS, BLOCK_ROWS * BLOCK_ROWS
    for i in range(heads):
        for block in range(row_blocks):
            r = block * BLOCK_ROWS
            row_at = O + (i * rows + r) * pad_v
            at = COLUMNS + (i * row_blocks + block) * BLOCK_ROWS * pad_v
            count = min(rows - r, BLOCK_ROWS)
            from_at, from_step, from_block = at, BLOCK_ROWS, block_size
            to_at, to_step, to_block = row_at, pad_v, BLOCK_ROWS
            if to_columns:
                count = BLOCK_ROWS
                from_at, from_step, from_block = row_at, pad_v, BLOCK_ROWS
                to_at, to_step, to_block = at, BLOCK_ROWS, block_size
            turn_rows(
                floats, blocks, count, from_at, from_step, from_block, to_at, to_step, to_block
            )


@register_jitable
def scratch_size(group, pad_dim, pad_v, tiles):
    """Floats that one worker needs, whatever the kinds.

    Q and output rows, a maximum, a sum and a scale for each; scores; scales of the tile; rescaling factors; for
    integers sums of query rows, scales and lowest levels of weights, and the weights; query rows as they are read, and
    how many were arranged together.
    """
    most = TILE_ROWS if tiles else MAX_ROWS
    rows = (max(most, group) + AT_ONCE + LINE - 1) // LINE * LINE
    scales = 2 * (scale_step(pad_dim) + scale_step(pad_v))
    k_blocks, v_blocks = (pad_dim + BLOCK - 1) // BLOCK, (pad_v + BLOCK - 1) // BLOCK
    size = rows * (pad_dim + pad_v + 5) + (BLOCK_ROWS + scales) * TILE
    size += rows * 16 * k_blocks + (LINE * 4 + AT_ONCE * (TILE // 2 * 4)) * v_blocks
    size += 2 * rows * (pad_dim + 16 * k_blocks + 1)
    if tiles:
        blocks = tile_blocks(group)
        size += 2 * rows * TILE + SPARE_FLOATS + 3 * BLOCK_ROWS
        size += (blocks * 3 // 4 + 2) * tile_floats(pad_dim)
        size += blocks * BLOCK_ROWS * (pad_v + TILE) + tile_floats(pad_v)
    return (size + LINE - 1) // LINE * LINE


def on_tiles(k_kind, v_kind, compute):
    """Whether a matrix unit multiplies rows of these kinds."""
    there = {k_kind, v_kind} <= {"bf16", "int8"} and compute == "float32"
    return there and has_tiles()


def in_integers(kind, compute):
    """Whether rows of a kind are multiplied as integers."""
    return compute == "float32" and (kind == "int8" or (kind == "int4" and INT4_INTEGERS))


@register_jitable
def _plan(
    seq_lens, q_starts, ranges, capacity, group, num_kv_heads, unit, columns, window_left, rows, threads, ints,
):  # fmt: skip
    """Say what each sequence needs, and how many threads shall do it all.

    Fills `ints`: two counters for threads, at 0, then for the sequences the first item and the first part (both with
    the total at the end), the length of a split, or 0 where there is only one, and the kv heads that an item takes.
    """
    num_seqs = len(seq_lens)
    FIRST_ITEM, FIRST_PART, SPLIT_LEN = 2, 3 + num_seqs, 4 + 2 * num_seqs
    HEADS = 4 + 3 * num_seqs
    block_tokens = max(1, rows // group)
    ints[0] = ints[1] = 0
    parts = np.int64(0)
    work = np.int64(0)
    pieces = np.int64(0)  # of query blocks and splits
    for b in range(num_seqs):
        tokens = q_starts[b + 1] - q_starts[b]
        ints[FIRST_PART + b] = parts
        blocks = (tokens + block_tokens - 1) // block_tokens
        length = np.int64(seq_lens[b]) if len(ranges) == 0 else capacity
        first, end = _span(ranges, q_starts[b], tokens, length - tokens, window_left, length)
        first -= first % TILE
        span = max(np.int64(0), end - first)
        split_len = (span + MAX_SPLITS - 1) // MAX_SPLITS
        split_len = max(MIN_SPLIT, (split_len + TILE - 1) // TILE * TILE)
        splits = max(np.int64(1), (span + split_len - 1) // split_len)
        if blocks != 1:  # none, or enough to do without splitting
            splits = np.int64(1)
        ints[SPLIT_LEN + b] = split_len if splits > 1 else np.int64(0)
        ints[HEADS + b] = max(1, MAX_ROWS // max(1, min(tokens, block_tokens) * group))
        ints[FIRST_ITEM + b] = blocks * splits
        pieces += blocks * splits
        if splits > 1:
            parts += splits * tokens * num_kv_heads * group
        if tokens > 0:
            work += max(tokens * group, LEAST_ROWS) * span * num_kv_heads * columns
    ints[FIRST_PART + num_seqs] = parts
    workers = 1 if work < SERIAL_WORK else threads

    most_heads = np.int64(1)
    if unit < LONG_RUN:
        wanted = ITEMS_EACH * workers if workers > 1 else 1
        while most_heads < num_kv_heads and (
            pieces * ((num_kv_heads + most_heads) // (most_heads + 1)) >= wanted
        ):
            most_heads += 1
    items = np.int64(0)
    for b in range(num_seqs):
        heads = min(ints[HEADS + b], most_heads)
        ints[HEADS + b] = heads
        mine = ints[FIRST_ITEM + b] * ((num_kv_heads + heads - 1) // heads)
        ints[FIRST_ITEM + b] = items
        items += mine
    ints[FIRST_ITEM + num_seqs] = items
    return workers


@register_jitable
def _span(ranges, first_row, tokens, position, window_left, length):
    """Which tokens any of a sequence's query tokens sees.

    Parameters
    ----------
    ranges : int64 array (num_tokens, 2) or (0, 2)
        Tokens that each query token sees, or none: then it sees `window_left` earlier tokens and itself.
    first_row, tokens : int
        The query tokens: the first's row among all, and how many they are.
    position : int
        Position of the first.
    window_left, length : int
        Of the attention and of the sequence.
    """
    if len(ranges) > 0:
        begin, end = length, np.int64(0)
        for t in range(first_row, first_row + tokens):
            if ranges[t, 0] < ranges[t, 1]:
                begin = min(begin, ranges[t, 0])
                end = max(end, ranges[t, 1])
        return max(np.int64(0), begin), min(length, end)
    begin = max(np.int64(0), position - window_left) if window_left >= 0 else np.int64(0)
    return begin, position + tokens


@register_jitable
def _visible(ranges, first_row, t, position, window_left, begin, end, tile):
    """Which tokens of a tile query token `t` of an item sees, as a range counted from the tile's start."""
    low, high = _span(ranges, first_row + t, np.int64(1), position + t, window_left, end)
    low = min(max(max(low, begin) - tile, 0), TILE)
    return low, min(max(min(high, end) - tile, low), TILE)


@register_jitable
def _stand_in(offsets, first, end):
    """Let tokens ``[first, end)`` of a tile stand in for those before and after; apart, as it is seldom called."""
    for part in (0, PART, 2 * PART, 3 * PART):
        for j in range(first):
            offsets[part + j] = offsets[part + first]
        fill_ramp(offsets, part + end, TILE - end, offsets[part + end - 1], 0)


@register_jitable
def _add_runs(offsets, runs, first, count, step, rows):
    """Put `count` rows, the first at `first`, among runs of bytes; rows that lie one after another make one run.

    `runs` says where the next run goes, and where the one before it ends; that is returned for the next call.
    """
    at, last_end = runs
    base, words, size = rows
    each = count if step == words else np.int64(1)
    i = np.int64(0)
    while i < count:  # the length of a range would need a division
        start = base + (first + i * step) * size
        if start != last_end:
            offsets[at] = start & -64
            at += 2
        last_end = start + each * words * size
        offsets[at - 1] = last_end
        i += each
    return at, last_end


@register_jitable
def _fill_offsets(
    offsets, tile, begin, end, entries, unit, block_size, head, k_step, k_rows, v_step, v_rows,
    k_scaled, ks_step, v_scaled, vs_step, same,
):  # fmt: skip
    """Where the rows of a tile's tokens start: `PART` numbers for K, as many for V and as many for each one's scales.

    Then, of K and of V, the runs of bytes that these rows take. Where both lie the `same`, offsets of K are those of V.
    Tokens outside ``[begin, end)`` stand in for their neighbours: their own blocks are never looked up.
    """
    if begin >= end:
        return
    p, stop, at = max(tile, begin), min(tile + TILE, end), np.int64(0)
    if p >= stop:  # a tile past the end
        p, stop = end - 1, end
    else:
        at = p - tile
    first = at
    k_runs, v_runs = (np.int64(K_RUNS), np.int64(0)), (np.int64(V_RUNS), np.int64(0))
    # Divisions are slow: only the first run needs one, and that of a contiguous cache does not.
    entry = p // unit if p >= unit else np.int64(0)
    in_unit = p - entry * unit
    while p < stop:
        # A run of tokens that lie one after another.
        block, offset = np.int64(entries[entry]), in_unit
        run = min(unit - in_unit, stop - p)
        if unit < block_size:  # slots: as many as follow each other
            slot = block
            block = slot // block_size if slot >= block_size else np.int64(0)
            offset = slot - block * block_size
            most = min(block_size - offset, stop - p)
            while run < most and np.int64(entries[entry + run]) == slot + run:
                run += 1
        k_at = block * k_step[0] + head * k_step[1] + offset * k_step[2]
        v_at = block * v_step[0] + head * v_step[1] + offset * v_step[2]
        k_runs = _add_runs(offsets, k_runs, k_at, run, k_step[2], k_rows)
        v_runs = _add_runs(offsets, v_runs, v_at, run, v_step[2], v_rows)
        fill_ramp(offsets, at, run, k_at, k_step[2])
        if not same:
            fill_ramp(offsets, PART + at, run, v_at, v_step[2])
        if k_scaled:
            s_at = block * ks_step[0] + head * ks_step[1] + offset * ks_step[2]
            fill_ramp(offsets, 2 * PART + at, run, s_at, ks_step[2])
        if v_scaled and not same:
            s_at = block * vs_step[0] + head * vs_step[1] + offset * vs_step[2]
            fill_ramp(offsets, 3 * PART + at, run, s_at, vs_step[2])
        at += run
        p += run
        entry += run if unit == 1 else np.int64(1)
        in_unit = np.int64(0)
    # Who asks for more gets the last ones again.
    for at_run, _ in (k_runs, v_runs):
        offsets[at_run] = offsets[at_run - 2]
        offsets[at_run + 1] = NEVER
    if first > 0 or at < TILE:
        _stand_in(offsets, first, at)


@functools.cache
def _kernel(k_kind: str, v_kind: str, compute: str) -> Any:
    real = getattr(types, compute)
    signature = (
        array(real, 3), array(WORDS[k_kind], 4), array(*SCALES[k_kind]), array(WORDS[v_kind], 4),
        array(*SCALES[v_kind]), array(types.int32, 2),
        array(types.int64, 1), array(types.int64, 1), array(types.int64, 2), types.int64,
        types.float64, types.float64, types.int64,
        array(real, 1), array(real, 3, out=True), array(types.float32, 2, out=True),
        types.int64, types.Array(real, 1, "C"), types.Array(types.int64, 1, "C"), *ON_THREADS,
    )  # fmt: skip
    label = f"attention, K {k_kind}, V {v_kind}, computing in {compute}"
    tiles = _on_tiles(k_kind, v_kind, compute)
    return build(make_attention, signature, args=(k_kind, v_kind, compute, tiles), label=label)


@functools.cache
def _merge_kernel(compute: str) -> Any:
    real = getattr(types, compute)
    signature = (
        array(types.int64, 1), array(real, 1), array(real, 3, out=True),
        array(types.float32, 2, out=True), types.int64, types.Array(real, 1, "C"),
        types.Array(types.int64, 1, "C"), *ON_THREADS,
    )  # fmt: skip
    return build(
        make_merge_splits, signature, args=(compute,), label=f"merge of splits in {compute}"
    )


@functools.cache
def _plan_kernel() -> Any:
    index = array(types.int64, 1)
    signature = (
        index, index, array(types.int64, 2), *[types.int64] * 8,
        types.Array(types.int64, 1, "C"),
    )  # fmt: skip
    return build(_plan, signature, label="plan of attention")


_scratch_size = functools.lru_cache(maxsize=64)(scratch_size)
_on_tiles = functools.cache(on_tiles)


_workspaces = Workspaces(lambda size, dtype: aligned(np.empty, (size,), dtype))
# Kinds whose words are what the kernel computes with.
_WORD_OF = {"fp32": "float32", "fp64": "float64"}
# NumPy takes microseconds to spell a dtype's name.
_NAMES = {np.dtype(name): name for name in ("float32", "float64")}


@implements(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges,
    by_slot, sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    compute = _NAMES[sinks.dtype]
    result = out
    if _WORD_OF.get(q_kind) != compute:
        q = to_floats(q, q_kind, compute)
        result = np.empty(out.shape, compute)
    kernel = _kernel(k_kind, v_kind, compute)
    group, (dim, dim_v) = q.shape[1] // k.shape[1], (q.shape[2], out.shape[2])
    unit = 1 if by_slot else k.shape[2]
    num_seqs, capacity = len(seq_lens), block_table.shape[1] * unit
    tiles = _on_tiles(k_kind, v_kind, compute)
    scratch = _scratch_size(group, dim + BLOCK, dim_v + BLOCK, tiles)
    # As many as there can be: to ask how many there are would start them, and small calls do without.
    threads = numba.config.NUMBA_NUM_THREADS
    alone = num_seqs == 1 and len(ranges) == 0
    longest = int(seq_lens[0]) if alone else capacity
    rows = max(q.shape[0] * group, num_seqs * LEAST_ROWS)
    small = rows * longest * k.shape[1] * (dim + dim_v) < SERIAL_WORK
    memory = _workspaces.borrow()
    try:
        ints = memory.take("int64", 4 + 4 * num_seqs + threads * WORKER_INTS)
        if longest <= MIN_SPLIT and (small or alone):
            # Nothing is split, and how many threads there may be is plain: the kernel plans, which saves a call.
            workers = 1 if small else num_threads()
            parts_at = workers * scratch
            with launching(workers) as launch:
                kernel(
                    q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, by_slot, sm_scale,
                    logits_soft_cap, window_left, sinks, result, lse, parts_at,
                    memory.take(compute, parts_at), ints, launch, -1, workers,
                )  # fmt: skip
        else:
            workers = _plan_kernel()(
                seq_lens, q_starts, ranges, capacity, group, k.shape[1], unit, dim + dim_v,
                window_left, TILE_ROWS if tiles else MAX_ROWS, threads, ints,
            )  # fmt: skip
            if workers > 1:
                workers = min(workers, num_threads())
            parts_at = workers * scratch
            parts = int(ints[3 + 2 * num_seqs])
            floats = memory.take(compute, parts_at + parts * (dim_v + 2))
            run(
                kernel, workers, q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges,
                by_slot, sm_scale, logits_soft_cap, window_left, sinks, result, lse, parts_at,
                floats, ints,
            )  # fmt: skip
            if parts:
                merge = _merge_kernel(compute)
                run(merge, workers, q_starts, sinks, result, lse, parts_at, floats, ints)
    finally:
        _workspaces.give_back(memory)
    if result is not out:
        from_floats(result, out, q_kind)
