"""Sum the attention that each cached token gets, on the CPU.

For token j and kv head g of a sequence, the sum is over its query rows that see j. A row is token t at position ``p =
seq_len - T + t`` and q head h of g's group; it sees j if ``p - window_left <= j <= p``::

    weight[g, j] = sum over t, h of exp(soft_cap(sm_scale * q[t, h] . k[slot(j), g]) - lse[t, h])

If queries have ranges of tokens, as in attention, these replace the condition. The log of the sum of exponentials comes
from attention, so one pass over K suffices, and tokens are independent of each other. A unit of work is a chunk of one
sequence's tokens, for one kv head.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.convert import scaled_rows
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.address import slot_of
from numkv.rows.codec import row_codec
from numkv.rows.visible import visible_range, visible_to_any

# Tokens that are scored at once: a few vectors of them.
TILE = 32
# Tokens of a unit of work.
CHUNK = 512
# Query rows that are converted at once: many enough for the rows of K that they share, and few enough for a cache.
ROWS = 1024
# Multiply-adds below which one thread does it all.
SERIAL_WORK = 1_000_000


@register_jitable
def _clear(x):
    for i in range(len(x)):
        x[i] = np.float32(0)


@register_jitable
def _score(x, tile, scores):
    """Dot products of a row with the rows of a tile, ``tile[d * TILE + i]``; four dims at a time."""
    for i in range(TILE):
        scores[i] = np.float32(0)
    for d in range(0, len(x), 4):
        x0, x1, x2, x3 = x[d], x[d + 1], x[d + 2], x[d + 3]
        a, b = tile[d * TILE : (d + 1) * TILE], tile[(d + 1) * TILE : (d + 2) * TILE]
        c, e = tile[(d + 2) * TILE : (d + 3) * TILE], tile[(d + 3) * TILE : (d + 4) * TILE]
        for i in range(TILE):
            scores[i] += (x0 * a[i] + x1 * b[i]) + (x2 * c[i] + x3 * e[i])


def make_attention_weights(Q_KIND, K_KIND):
    """The kernel for kinds of queries and of K."""
    take, _ = scaled_rows(Q_KIND, "float32")
    _, load_row = row_codec(K_KIND)
    SHARING = max(1, kind(K_KIND).group_tokens)  # tokens that share scales

    def kernel(
        q, k, k_scale, block_table, seq_lens, q_starts, ranges, by_slot, lse, sm_scale, soft_cap,
        window_left, weights, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        num_kv_heads, block_size = k.shape[1], np.int64(k.shape[2])
        dim, group = q.shape[2], q.shape[1] // num_kv_heads
        k_scales = by_row(k_scale)
        padded = (dim + 3) // 4 * 4
        columns = weights.shape[2]
        chunks = (columns + CHUNK - 1) // CHUNK
        at_once = max(np.int64(1), ROWS // group)  # query tokens
        row, x = np.empty(dim, np.float32), np.empty(at_once * group * padded, np.float32)
        tile = np.empty(padded * TILE, np.float32)
        scores, totals = np.empty(TILE, np.float32), np.empty(CHUNK, np.float32)
        # Elements past the last one are 0, and so are places without a token.
        _clear(x)
        _clear(tile)
        for item in range(worker, len(seq_lens) * num_kv_heads * chunks, workers):
            chunk, g = item % chunks, item // chunks % num_kv_heads
            b = item // chunks // num_kv_heads
            length, first_row = seq_lens[b], q_starts[b]
            tokens = q_starts[b + 1] - first_row
            position = length - tokens  # of the first query
            begin, end = visible_to_any(ranges, first_row, tokens, position, window_left, length)
            origin, stop = chunk * CHUNK, min(columns, (chunk + 1) * CHUNK)
            _clear(totals)
            for t_begin in range(0, tokens, at_once):
                t_end = min(tokens, t_begin + at_once)
                for r in range((t_end - t_begin) * group):
                    of_q = first_row + t_begin + r // group, g * group + r % group
                    take(row_of(q, of_q), np.float32(sm_scale), x[r * padded : (r + 1) * padded])
                for start in range(origin, stop, TILE):
                    low, high = max(begin, start), min(end, start + TILE)
                    # Without ranges, earlier ones see no token of the tile.
                    t0 = t_begin if len(ranges) > 0 else max(t_begin, low - position)
                    if low >= high or t0 >= t_end:
                        continue
                    for j in range(low, high):
                        if by_slot:
                            slot = np.int64(block_table[b, j])
                        else:
                            slot = slot_of(block_table[b], j, block_size)
                        block, place = slot // block_size, slot % block_size
                        at = (np.int64(block), np.int64(g), np.int64(place))
                        of = (np.int64(block), np.int64(g), np.int64(place // SHARING))
                        load_row(row_of(k, at), row_of(k_scales, of), row)
                        for d in range(dim):
                            tile[d * TILE + j - start] = row[d]
                    for t in range(t0, t_end):
                        first, last = visible_range(
                            ranges, first_row + t, position + t, window_left, length
                        )
                        first, last = max(first, low), min(last, high)
                        if first >= last:
                            continue
                        for h in range(group):
                            r = (t - t_begin) * group + h
                            _score(x[r * padded : (r + 1) * padded], tile, scores)
                            of_row = lse[first_row + t, g * group + h]
                            for i in range(first - start, last - start):
                                score = scores[i]
                                if soft_cap > 0:
                                    cap = np.float32(soft_cap)
                                    score = cap * np.float32(math.tanh(score / cap))
                                totals[start - origin + i] += np.float32(math.exp(score - of_row))
            for i in range(stop - origin):
                weights[b, g, origin + i] = totals[i]

    return kernel


@functools.cache
def _attention_weights(q_kind: str, k_kind: str) -> Any:
    f32, index = types.float32, array(types.int64, 1)
    signature = (
        array(WORDS[q_kind], 3), array(WORDS[k_kind], 4), array(*SCALES[k_kind]), array(types.int32, 2), index, index,
        array(types.int64, 2), types.int64, array(f32, 2), types.float64, types.float64, types.int64,
        array(f32, 3, out=True), *ON_THREADS,
    )  # fmt: skip
    label = f"attention_weights, q {q_kind}, K {k_kind}"
    return build(
        make_attention_weights, signature, args=(q_kind, k_kind), label=label, emit=types.none
    )


@implements(Operations.attention_weights)
def attention_weights(
    q, q_kind, k, k_kind, k_scale, block_table, seq_lens, q_starts, ranges, by_slot, lse, sm_scale,
    logits_soft_cap, window_left, weights,
):  # fmt: skip
    workers = workers_for(q.size * weights.shape[2], SERIAL_WORK)
    run(
        _attention_weights(q_kind, k_kind), workers, q, k, k_scale, block_table, seq_lens, q_starts, ranges, by_slot,
        lse, sm_scale, logits_soft_cap, window_left, weights,
    )  # fmt: skip
