"""Attention over a paged pool (a contiguous cache is one with long blocks), on CUDA.

What is computed is on top of `numkv.kernels.cpu.attention`. The unit of work is an *item*: one sequence, one kv head,
up to eight query rows (a row is a token and a q head of the group) and one split of the KV range. The host knows
neither lengths nor query starts, so each block adds up itself how many items there are, and takes every
``gridDim``-th. Nothing is left over to launch blocks for.

Within an item, a tile of tokens at a time:

1. *Scores.* Teams of adjacent threads read a K row together, 16 bytes each, for several tokens at once; every element
   read serves all query rows. Partial sums go to shared memory.
2. *Softmax.* Threads take (row, token) pairs: they add the team's sums up, mask, find the tile's maximum and turn
   scores into probabilities: the online softmax of Milakov and Gimelshein (arXiv:1805.02867), in base 2.
3. *Output.* Teams read V rows the same way and add them, weighted, to sums in registers, which are added up over the
   teams when the item ends.

INT8 codes become floats as they are read. A token's scale of K multiplies its whole scores, the one of V its
probabilities, once these have been summed. Only scales of tokens that count are read. INT4 codes are scaled as they are
read, as each group of a row has a scale of its own.

A query sees what causality and the window leave of its sequence, or a range of its own; either way two numbers for each
row. Tiles that some rows of an item do not see whole are added up token by token, so that nothing hidden gets in.

Splits depend on the sequence alone: on its length, number of queries and window, or on its ranges. Their parts are
merged in order by a second kernel, as in Flash-Decoding (Dao et al., 2023). Every sum is taken in an order that depends
on the sequence and the head dims alone, so results do not depend on the batch or the launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda.simd import (
    THREADS,
    WIDTH,
    aligned,
    c_array,
    ceil_div,
    column_of,
    jit,
    launch,
    natural,
    reader,
)  # fmt: skip
from numkv.kernels.cuda.splits import (
    AT_ONCE,
    LN_2,
    LOG2_E,
    MAX_SPLIT_QUERIES,
    TEAM,
    extent,
    max_splits,
    merge_splits,
    parts_of,
    tile_of,
)  # fmt: skip
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.convert import codec
from numkv.rows.softmax import finish
from numkv.rows.visible import visible_range, visible_to_all, visible_to_any

__all__ = ["attend"]

# Query rows of an item, as many as the group has or as registers allow, and for each choice how many blocks shall fit
# on a multiprocessor. With fewer registers than that leaves (102, 128 and 170), the loops would spill.
ROW_CHOICES = {1: 5, 4: 4, 8: 3}
# Shared memory for q rows: half of what a block has without asking. The other arrays fit into the other half.
Q_BYTES = 24 * 1024
# Elements between the rows of two chunks of q in shared memory.
Q_PAD = 4
# Elements of V that a thread reads at once, and rows of V that it reads ahead where those are not AT_ONCE. As many
# sums as 16 codes need would not fit into registers: half as many are read, of twice as many rows.
V_WIDTHS = {**WIDTH, "int8": 8, "int4": 8}
V_AT_ONCE = {"int8": 2, "int4": 2}


@register_jitable
def _look_up(
    blocks, offsets, lost, TILE, block_table, by_slot, b, tile, begin, end, pool, thread
):  # fmt: skip
    """Put down where a tile's tokens lie, with block -1 for those that do not count, and whether a block is lost.

    Even and odd tiles have a half of the tables each, which starts at ``tile & TILE``.
    """
    num_blocks, block_size = pool.shape[0], np.int64(pool.shape[2])
    for n in range((TILE + THREADS - 1) // THREADS):
        j = thread + n * THREADS
        if j < TILE:
            position = tile + j
            block, offset = np.int64(-1), np.int64(0)
            if begin <= position and position < end:
                place = position  # among the sequence's own blocks, or a slot of the pool
                if by_slot:
                    place = np.int64(block_table[b, position])
                block, offset = place // block_size, place % block_size
                if not by_slot:
                    block = np.int64(block_table[b, block])
                if block < 0 or block >= num_blocks:
                    block = np.int64(-1)
                    lost[0] = 1
            blocks[(tile & TILE) + j] = block
            offsets[(tile & TILE) + j] = offset


def make_attention(Q_KIND, K_KIND, V_KIND, COMPUTE, ROWS, COLUMNS, WIDE):
    """The attention kernel.

    Parameters
    ----------
    Q_KIND, K_KIND, V_KIND : str
        Kinds of q and the output, of K and of V.
    COMPUTE : {"float32", "float64"}
        What it computes in.
    ROWS : int
        Query rows of an item.
    COLUMNS : int
        Chunks of an output row that a thread takes; 1 unless the head dim is huge.
    WIDE : bool
        Whether all rows of K and V can be read in chunks of 16 bytes.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    REAL = getattr(types, COMPUTE)  # what dynamic shared memory is asked for with
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2
    load_q, store_q = codec(Q_KIND, COMPUTE)
    K_WIDTH, V_WIDTH = WIDTH[K_KIND], V_WIDTHS[V_KIND]
    read_k = reader(K_KIND, COMPUTE, K_WIDTH, WIDE)
    read_v = reader(V_KIND, COMPUTE, V_WIDTH, WIDE)
    k_column, v_column = column_of(K_KIND, K_WIDTH), column_of(V_KIND, V_WIDTH)
    K_SCALED, V_SCALED = K_KIND == "int8", V_KIND == "int8"
    TOKENS = AT_ONCE[COMPUTE]
    V_TOKENS = TOKENS * V_AT_ONCE.get(V_KIND, 1)
    TEAMS = THREADS // TEAM
    TILE = tile_of(COMPUTE)
    SCORES, CHUNKS_K = ROWS * TOKENS, TOKENS * K_WIDTH
    SUMS, CHUNKS_V = COLUMNS * ROWS * V_WIDTH, V_TOKENS * V_WIDTH
    # Chunks of q lie a few banks apart, as the lanes of a team read different ones.
    Q_STEP = ROWS * K_WIDTH + Q_PAD
    # So do the partial sums of a team's lanes, which one warp writes.
    PART_STEP = ROWS * TILE + max(1, 32 // TEAM)
    # The same memory takes the teams' output sums in the end, for some of the rows at a time.
    PARTS = max(TEAM * PART_STEP, THREADS * V_WIDTH)
    ROWS_AT_ONCE = min(ROWS, PARTS // (THREADS * V_WIDTH))
    # Softmax: with as many threads as a tile has tokens or more, a thread takes one token of every ROW_STEP-th row.
    ROW_STEP = max(1, THREADS // TILE)
    TOKENS_EACH, ROWS_EACH = max(1, TILE // THREADS), ceil_div(ROWS, ROW_STEP)
    SEARCHERS = min(8, THREADS // ROWS)  # threads that look for the maximum of one row
    PROBABILITIES, MAXIMA, PLACES = ROWS * TILE, ROWS * SEARCHERS, 2 * TILE
    V_SCALES = TILE if V_SCALED else 1
    # What the innermost loops take at once; the compiler unrolls them whole, which it would not do with more.
    K_STEP, V_STEP = min(K_WIDTH, 8), TOKENS

    @register_jitable
    def add_products(scores, q_rows, at, k_floats, first):
        """Add the products of `K_STEP` elements of each token, from the chunk's element `first` on."""
        for n in range(K_STEP):
            e = first + n
            for r in range(ROWS):
                x = q_rows[at + r * K_WIDTH + e]
                for i in range(TOKENS):
                    scores[r * TOKENS + i] = cuda.fma(
                        x, k_floats[i * K_WIDTH + e], scores[r * TOKENS + i]
                    )

    @register_jitable
    def add_rows(sums, totals, n, p, v_scales, j, v_floats, first):
        """Add the weighted chunks of `V_STEP` rows, from the one of token ``j + first`` on, to column `n`."""
        for r in range(ROWS):
            for m in range(V_STEP):
                i = first + m
                weight = p[(j + i) * ROWS + r]
                if n == 0:
                    totals[r] += weight
                if V_SCALED:
                    weight *= v_scales[j + i]
                for e in range(V_WIDTH):
                    s = (n * ROWS + r) * V_WIDTH + e
                    sums[s] = cuda.fma(weight, v_floats[i * V_WIDTH + e], sums[s])

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, by_slot, sm_scale,
        soft_cap, window_left, sinks, out, lse, parts,
    ):  # fmt: skip
        num_tokens, num_q_heads, dim = q.shape
        num_kv_heads = k.shape[1]
        dim_v = out.shape[2]
        num_seqs = seq_lens.shape[0]
        num_sinks = sinks.shape[0]
        capacity = np.int64(block_table.shape[1])
        if not by_slot:
            capacity *= k.shape[2]
        group = num_q_heads // num_kv_heads
        by_token = num_tokens <= MAX_SPLIT_QUERIES * num_seqs  # how parts are laid out
        k_chunks = (dim + K_WIDTH - 1) // K_WIDTH
        v_chunks = (dim_v + V_WIDTH - 1) // V_WIDTH
        thread = natural(cuda.threadIdx.x)
        lane, team = thread % TEAM, thread // TEAM
        # V rows may be longer or shorter than what a team of the scores reads: theirs have a lane for each chunk.
        v_lanes = natural(min(v_chunks, THREADS))
        v_teams = natural(min(THREADS // v_lanes, TILE))
        v_lane, v_team = natural(thread % v_lanes), natural(thread // v_lanes)

        q_rows = cuda.shared.array(0, REAL)  # [chunk, row, element of the chunk]
        partial = cuda.shared.array(PARTS, F)
        p = cuda.shared.array(PROBABILITIES, F)  # [token, row]: scores, then probabilities
        peaks = cuda.shared.array(MAXIMA, F)
        tops = cuda.shared.array(ROWS, F)
        factors = cuda.shared.array(ROWS, F)
        # Of each row: its token among those of `q`, its q head, the tokens it sees, and where its parts go.
        row_token = cuda.shared.array(ROWS, np.int64)
        row_head = cuda.shared.array(ROWS, np.int64)
        row_begin = cuda.shared.array(ROWS, np.int64)
        row_end = cuda.shared.array(ROWS, np.int64)
        row_part = cuda.shared.array(ROWS, np.int64)
        # Where the tokens of two tiles lie: this one and the next.
        blocks = cuda.shared.array(PLACES, np.int32)
        offsets = cuda.shared.array(PLACES, np.int32)
        lost = cuda.shared.array(1, np.int32)  # whether a block of the item lies outside the pool
        counts = cuda.shared.array(THREADS, np.int64)
        v_scales = cuda.shared.array(V_SCALES, F)  # of the tile's tokens

        scores = cuda.local.array(SCORES, F)
        k_floats = cuda.local.array(CHUNKS_K, F)
        v_floats = cuda.local.array(CHUNKS_V, F)
        sums = cuda.local.array(SUMS, F)
        totals = cuda.local.array(ROWS, F)
        maxima = cuda.local.array(ROWS, F)
        bases = cuda.local.array(ROWS, F)
        # Scales of the tokens that the thread takes in the softmax.
        k_factors = cuda.local.array(TOKENS_EACH, F)
        v_factors = cuda.local.array(TOKENS_EACH, F)

        # -- how many items there are: each thread counts those of some sequences
        seqs_each = (num_seqs + THREADS - 1) // THREADS
        count = np.int64(0)
        for b in range(thread * seqs_each, min((thread + 1) * seqs_each, num_seqs)):
            _, tokens, _, _, _, splits = extent(
                q_starts, seq_lens, ranges, b, num_tokens, capacity, window_left, TILE
            )
            count += (tokens * group + ROWS - 1) // ROWS * splits * num_kv_heads
        counts[thread] = count
        cuda.syncthreads()
        items = np.int64(0)
        for i in range(min(num_seqs, THREADS)):
            items += counts[natural(i)]

        for item in range(np.int64(cuda.blockIdx.x), items, np.int64(cuda.gridDim.x)):
            # -- which sequence, rows and part of the KV range
            before = np.int64(0)
            counter = np.int64(0)
            while before + counts[counter] <= item:
                before += counts[counter]
                counter += 1
            b = counter * seqs_each
            while True:
                start, tokens, length, first, split_len, splits = extent(
                    q_starts, seq_lens, ranges, b, num_tokens, capacity, window_left, TILE
                )
                row_blocks = (tokens * group + ROWS - 1) // ROWS
                count = row_blocks * splits * num_kv_heads
                if item < before + count:
                    break
                before += count
                b += 1
            inner = item - before
            # Later rows see more: take them first.
            row0 = (row_blocks - 1 - inner % row_blocks) * ROWS
            inner //= row_blocks
            g, split = inner % num_kv_heads, inner // num_kv_heads
            rows = min(np.int64(ROWS), tokens * group - row0)
            # Of the first query; negative where there are more queries than tokens.
            position = length - tokens
            # Tokens that any row sees, and those that all of them see.
            t0 = row0 // group
            queries = (row0 + rows - 1) // group + 1 - t0
            begin, end = visible_to_any(
                ranges, start + t0, queries, position + t0, window_left, capacity
            )
            all_begin, all_end = visible_to_all(
                ranges, start + t0, queries, position + t0, window_left, capacity
            )
            if splits > 1:
                begin = max(begin, first + split * split_len)
                end = min(end, first + (split + 1) * split_len)
            tile = begin - begin % TILE
            if thread == 0:
                lost[0] = 0
            cuda.syncthreads()
            if thread < ROWS:
                t = (row0 + thread) // group
                row_token[thread] = start + t
                row_head[thread] = g * group + row0 + thread - t * group
                low, high = np.int64(0), np.int64(0)
                if thread < rows:
                    low, high = visible_range(
                        ranges, start + t, position + t, window_left, capacity
                    )
                row_begin[thread], row_end[thread] = low, high
                row_part[thread] = start + t if by_token else b * MAX_SPLIT_QUERIES + t
            _look_up(
                blocks, offsets, lost, TILE, block_table, by_slot, b, tile, begin, end, k, thread
            )
            cuda.syncthreads()

            scale = F(sm_scale) if soft_cap > 0 else F(sm_scale * TO_BASE_2)
            for r in range(ROWS):
                for i in range(thread, k_chunks * K_WIDTH, THREADS):
                    c, e = natural(i) // K_WIDTH, natural(i) % K_WIDTH
                    d = k_column(c, e, dim)
                    x = F(0)
                    if r < rows and d < dim:
                        x = scale * load_q(q[row_token[r], row_head[r], d])
                    q_rows[c * Q_STEP + r * K_WIDTH + e] = x
            for r in range(ROWS):
                maxima[r] = F(-np.inf)
                totals[r] = F(0)
            for i in range(SUMS):
                sums[i] = F(0)
            cuda.syncthreads()

            while tile < end:
                at = tile & TILE
                if K_SCALED or V_SCALED:  # on their way while K is read
                    for m in range(TOKENS_EACH):
                        j = thread % TILE + m * THREADS
                        k_factors[m], v_factors[m] = F(0), F(0)
                        block, offset = blocks[at + j], offsets[at + j]
                        if block >= 0:
                            if K_SCALED:
                                k_factors[m] = F(k_scale[block, g, offset])
                            if V_SCALED:
                                v_factors[m] = F(v_scale[block, g, offset])
                # -- scores: parts of dot products
                for i in range(SCORES):
                    scores[i] = F(0)
                for chunk in range(lane, k_chunks, TEAM):
                    c = natural(chunk)
                    for i in range(TOKENS):
                        # Tokens that do not count stand for slot 0: whatever it holds, the score is masked.
                        block = max(blocks[at + team + i * TEAMS], 0)
                        offset = offsets[at + team + i * TEAMS]
                        read_k(k, k_scale, block, g, offset, c, k_floats, i * K_WIDTH)
                    add_products(scores, q_rows, c * Q_STEP, k_floats, 0)
                    if K_WIDTH > K_STEP:
                        add_products(scores, q_rows, c * Q_STEP, k_floats, K_STEP)
                for r in range(ROWS):
                    for i in range(TOKENS):
                        partial[lane * PART_STEP + r * TILE + team + i * TEAMS] = scores[
                            r * TOKENS + i
                        ]
                cuda.syncthreads()

                # -- whole scores, capped and masked
                for m in range(TOKENS_EACH):
                    j = thread % TILE + m * THREADS
                    for n in range(ROWS_EACH):
                        r = thread // TILE + n * ROW_STEP
                        if r < ROWS:
                            score = F(0)
                            for i in range(TEAM):
                                score += partial[i * PART_STEP + r * TILE + j]
                            if K_SCALED:
                                score *= k_factors[m]
                            if soft_cap > 0:
                                score = F(soft_cap) * F(math.tanh(score / F(soft_cap)))
                                score *= F(TO_BASE_2)
                            seen = row_begin[r] <= tile + j and tile + j < row_end[r]
                            if blocks[at + j] < 0 or not seen:
                                score = F(-np.inf)
                            p[j * ROWS + r] = score
                # Where the next tile's tokens lie; everyone is done with the tile before this one.
                _look_up(
                    blocks, offsets, lost, TILE, block_table, by_slot, b, tile + TILE, begin, end,
                    k, thread,
                )  # fmt: skip
                cuda.syncthreads()
                if thread < MAXIMA:
                    top = F(-np.inf)
                    for n in range(TILE // SEARCHERS):
                        j = n * SEARCHERS + thread % SEARCHERS
                        top = max(top, p[j * ROWS + thread // SEARCHERS])
                    peaks[thread] = top
                cuda.syncthreads()

                # -- probabilities relative to the running maximum, and what that makes of earlier sums
                for r in range(ROWS):
                    top = maxima[r]
                    for i in range(SEARCHERS):
                        top = max(top, peaks[r * SEARCHERS + i])
                    # A row that has seen nothing keeps its maximum of -inf; subtracting 0 avoids inf - inf.
                    bases[r] = top if top > F(-np.inf) else F(0)
                    shrink = F(math.exp2(maxima[r] - bases[r]))
                    maxima[r] = top
                    # An fma, so that no compiler makes one of it with the sum that follows, here but not there.
                    totals[r] = cuda.fma(totals[r], shrink, F(0))
                    for n in range(COLUMNS):
                        for e in range(V_WIDTH):
                            sums[(n * ROWS + r) * V_WIDTH + e] *= shrink
                for m in range(TOKENS_EACH):
                    j = thread % TILE + m * THREADS
                    for r in range(ROWS):  # not by ROW_STEP, so that `bases` stays in registers
                        if r % ROW_STEP == thread // TILE:
                            p[j * ROWS + r] = F(math.exp2(p[j * ROWS + r] - bases[r]))
                    if V_SCALED and thread < TILE:
                        v_scales[j] = v_factors[m]
                cuda.syncthreads()

                # -- output: weighted V rows
                ragged = tile < all_begin or tile + TILE > all_end or lost[0] != 0
                mine = v_team * V_TOKENS if v_team < v_teams else TILE
                for j0 in range(mine, TILE, v_teams * V_TOKENS):
                    j = natural(j0)
                    for n in range(COLUMNS):
                        # Threads beyond the last chunk read it too; what they add up is not used.
                        c = min(v_lane + n * THREADS, v_chunks - 1)
                        if ragged:
                            # Not all rows see all of these tokens, and a weight of 0 would not hide a NaN.
                            for i in range(V_TOKENS):
                                block, offset = blocks[at + j + i], offsets[at + j + i]
                                if block >= 0:
                                    read_v(v, v_scale, block, g, offset, c, v_floats, 0)
                                    for r in range(ROWS):
                                        weight = p[(j + i) * ROWS + r]
                                        if n == 0:
                                            totals[r] += weight
                                        if weight != 0:
                                            if V_SCALED:
                                                weight *= v_scales[j + i]
                                            for e in range(V_WIDTH):
                                                s = (n * ROWS + r) * V_WIDTH + e
                                                sums[s] = cuda.fma(weight, v_floats[e], sums[s])
                        else:
                            for i in range(V_TOKENS):
                                block, offset = blocks[at + j + i], offsets[at + j + i]
                                read_v(v, v_scale, block, g, offset, c, v_floats, i * V_WIDTH)
                            add_rows(sums, totals, n, p, v_scales, j, v_floats, 0)
                            if V_TOKENS > V_STEP:
                                add_rows(sums, totals, n, p, v_scales, j, v_floats, V_STEP)
                tile += TILE

            # -- add up over the teams
            cuda.syncthreads()
            for r in range(ROWS):
                if thread == 0:
                    tops[r] = maxima[r]
                if v_lane == 0 and v_team < v_teams:
                    p[v_team * ROWS + r] = totals[r]
            cuda.syncthreads()
            if thread < rows:
                h = row_head[thread]
                total = F(0)
                for i in range(v_teams):
                    total += p[natural(i) * ROWS + thread]
                if splits > 1:
                    factors[thread] = F(1)
                    parts[row_part[thread], h, split, dim_v] = tops[thread]
                    parts[row_part[thread], h, split, dim_v + 1] = total
                else:
                    sink = F(sinks[h]) * F(TO_BASE_2) if num_sinks > 0 else F(-np.inf)
                    factor, log_sum = finish(tops[thread], total, sink, F(TO_BASE_E))
                    factors[thread] = F(factor)
                    lse[row_token[thread], h] = log_sum
            for n in range(COLUMNS):
                for r0 in range(0, ROWS, ROWS_AT_ONCE):
                    cuda.syncthreads()
                    for i in range(ROWS_AT_ONCE):
                        for e in range(V_WIDTH):
                            if r0 + i < ROWS:
                                partial[(i * V_WIDTH + e) * THREADS + thread] = sums[
                                    (n * ROWS + r0 + i) * V_WIDTH + e
                                ]
                    cuda.syncthreads()
                    for s in range(v_team, ROWS_AT_ONCE * V_WIDTH, v_teams):
                        i = natural(s)
                        r = r0 + i // V_WIDTH
                        d = v_column(v_lane + n * THREADS, i % V_WIDTH, dim_v)
                        if r < rows and d < dim_v and v_team < v_teams:
                            x = F(0)
                            for m in range(v_teams):
                                x += partial[i * THREADS + natural(m) * v_lanes + v_lane]
                            x *= factors[r]
                            if splits > 1:
                                parts[row_part[r], row_head[r], split, d] = x
                            else:
                                out[row_token[r], row_head[r], d] = store_q(x)
            cuda.syncthreads()

    return kernel


@functools.cache
def _attention(
    q_kind: str, k_kind: str, v_kind: str, compute: str, rows: int, columns: int, wide: bool
) -> Any:
    kernel = make_attention(q_kind, k_kind, v_kind, compute, rows, columns, wide)
    return jit(kernel, ROW_CHOICES[rows] - (compute == "float64"))


@implements(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges,
    by_slot, sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    compute = sinks.dtype
    num_tokens, num_q_heads, dim = q.shape
    num_kv_heads, block_size, dim_v = v.shape[1], v.shape[2], out.shape[2]
    num_seqs = seq_lens.shape[0]
    if 0 in (num_tokens, num_seqs, num_q_heads, dim_v):
        return

    # -- which kernel
    group = num_q_heads // num_kv_heads
    wanted = group * ceil_div(num_tokens, num_seqs)
    width = WIDTH[k_kind]
    sizes = {n: ceil_div(dim, width) * (n * width + Q_PAD) * compute.itemsize for n in ROW_CHOICES}
    fitting = [n for n in ROW_CHOICES if sizes[n] <= Q_BYTES] or [1]
    rows = next((n for n in fitting if n >= wanted), fitting[-1])
    columns = ceil_div(ceil_div(dim_v, V_WIDTHS[v_kind]), THREADS)
    wide = aligned(k, k_kind, width) and aligned(v, v_kind, V_WIDTHS[v_kind])
    kernel = _attention(q_kind, k_kind, v_kind, compute.name, rows, columns, wide)

    # -- how much there can be to do
    capacity = block_table.shape[1] * (1 if by_slot else block_size)
    splits = max_splits(capacity, window_left, compute.name)
    row_blocks = min(
        num_tokens * ceil_div(group, rows), ceil_div(num_tokens * group, rows) + num_seqs
    )  # fmt: skip
    with parts_of(num_tokens, num_seqs, num_q_heads, splits, dim_v, compute.name) as parts:
        launch(
            kernel, row_blocks * splits * num_kv_heads, THREADS,
            q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, by_slot, sm_scale,
            logits_soft_cap, window_left, sinks, out, lse, parts,
            shared_bytes=sizes[rows],
        )  # fmt: skip
        if splits > 1:
            merge_splits(
                parts, q_kind, capacity, seq_lens, q_starts, ranges, window_left, sinks, out, lse
            )


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    # Items of the most rows, and of fewer; rows that do not start at multiples of 16 bytes; output rows longer than
    # a block.
    cases = [
        ("fp64", "fp64", "fp64", 8, 1, True), ("fp32", "fp32", "fp32", 8, 1, True),
        ("fp16", "fp16", "fp16", 8, 1, True), ("bf16", "bf16", "bf16", 8, 1, True),
        ("bf16", "int8", "int8", 8, 1, True), ("fp32", "fp16", "bf16", 8, 1, True),
        ("fp16", "int8", "fp16", 8, 1, True), ("bf16", "fp32", "int8", 8, 1, True),
        ("fp64", "int8", "int8", 8, 1, True),
        ("fp64", "bf16", "fp32", 4, 1, False), ("fp32", "fp32", "fp16", 4, 1, False),
        ("fp32", "int8", "int8", 4, 1, False), ("fp16", "int8", "int8", 4, 1, True),
        ("bf16", "bf16", "bf16", 4, 2, True), ("fp32", "int8", "int8", 1, 1, True),
        ("bf16", "bf16", "bf16", 1, 1, True), ("bf16", "int4", "int4", 8, 1, True),
        ("fp16", "int8", "int4", 4, 1, True), ("fp32", "int4", "fp16", 4, 1, False),
        ("fp64", "int4", "int4", 8, 1, True), ("fp32", "int4", "int4", 1, 1, True),
    ]  # fmt: skip
    for q_kind, k_kind, v_kind, rows, columns, wide in cases:
        compute = "float64" if "fp64" in (q_kind, k_kind, v_kind) else "float32"
        pool = "C" if wide else "A"
        real = getattr(types, compute)
        signature = (
            c_array(WORDS[q_kind], 3), types.Array(WORDS[k_kind], 4, pool),
            c_array(*SCALES[k_kind]), types.Array(WORDS[v_kind], 4, pool),
            c_array(*SCALES[v_kind]), c_array(types.int32, 2),
            c_array(types.int64, 1), c_array(types.int64, 1), c_array(types.int64, 2), types.int64,
            types.float64, types.float64, types.int64, c_array(real, 1),
            c_array(WORDS[q_kind], 3), c_array(types.float32, 2), c_array(real, 4),
        )  # fmt: skip
        name = f"attention[q {q_kind}, K {k_kind}, V {v_kind}, {rows} rows, {columns} columns"
        name += "]" if wide else ", strided]"
        yield (
            name,
            make_attention(q_kind, k_kind, v_kind, compute, rows, columns, wide),
            signature,
        )
