"""Attention: masks, results, weights of tokens, merged states; and small calls, of which there are none."""

import naive
import numpy as np

from numkv.kernels.operations import Operations
from reference.rows import CHANNELS, CODES, floats, operation, places, stored, values


@operation(Operations.fill_mask)
def fill_mask(
    seq_lens, q_starts, ranges, bits, causal, window_left, first, capacity, sinks, slopes, rows, heads
):  # fmt: skip
    for b in range(len(seq_lens)):
        start, tokens = int(q_starts[b]), int(q_starts[b + 1] - q_starts[b])
        length = min(int(seq_lens[b]), capacity)
        for i in range(tokens):
            rows[start + i] = _mask_row(
                i, tokens, length, causal, window_left, first, ranges[start + i] if len(ranges) else None,
                bits[start + i] if len(bits) else None, rows.shape[1],
            )  # fmt: skip
    if len(heads):
        heads[:] = np.concatenate([sinks if len(sinks) else np.full(len(slopes), -np.inf), slopes])


def _mask_row(query, tokens, length, causal, window_left, first, span, bits, columns):
    """A row of `numkv.rows.mask`."""
    if columns > 4:
        base, seen = max(length - tokens, 0), np.unpackbits(bits.view(np.uint8), bitorder="little")
        depth = int(seen[: min(query, len(seen))].sum())
        path = [j for j in np.flatnonzero(seen).tolist() if j < min(tokens, length)]
        cut = max(depth - window_left, 0) if window_left >= 0 else 0
        path = path[cut:]
        begin = max(base + depth - window_left, 0) if window_left >= 0 else 0
        begin = base + (path[0] if path else 0) if begin >= base else begin
        words = np.zeros(len(seen), np.uint8)
        words[path] = 1
        words = np.packbits(words, bitorder="little").view(np.uint32)
        return [
            begin,
            base + (path[-1] if path else -1) + 1,
            base,
            base + depth - cut,
            *words.tolist(),
        ]
    position = length - tokens + query
    begin, end = first, position + 1 if causal else length
    if window_left >= 0:
        begin = max(begin, position - window_left)
    if span is not None:
        begin, end = max(int(span[0]), 0), int(span[1])
    end = max(min(end, length), 0)
    return [begin, end, end, position][:columns]


class Sight:
    """What the queries of a call see."""

    def __init__(self, tokens, ranges, seq_lens, q_starts, window_left, capacity):
        self.tokens, self.ranges, self.window_left, self.starts = (
            tokens,
            ranges,
            window_left,
            q_starts,
        )
        self.lens = (
            np.full(len(q_starts) - 1, capacity) if len(ranges) else np.minimum(seq_lens, capacity)
        )

    def of(self, b):
        """The queries of a sequence: number, position, tokens that it sees, and their positions."""
        first, last = int(self.starts[b]), int(self.starts[b + 1])
        for i in range(first, min(last, self.tokens)):
            length = int(self.lens[b])
            position = length - (last - first) + i - first
            if not len(self.ranges):
                begin = max(0, position - self.window_left) if self.window_left >= 0 else 0
                seen = np.arange(begin, max(begin, min(position + 1, length)))
                yield i, position, seen, seen
                continue
            row = self.ranges[i].astype(np.int64)
            begin, end = max(int(row[0]), 0), min(int(row[1]), length)
            seen = where = np.arange(begin, max(begin, end))
            if len(row) > 2:
                plain, position = int(row[2]), int(row[3])
                bits = np.unpackbits(row[4:].astype(np.uint32).view(np.uint8), bitorder="little")
                j = seen - plain
                seen = seen[(j < 0) | (np.append(bits, 0)[np.clip(j, 0, len(bits))] != 0)]
                below = np.concatenate([[0], np.cumsum(bits)])
                j = seen - plain
                where = np.where(j <= 0, seen, plain + below[np.clip(j, 0, len(bits))])
            yield i, position, seen, where


def slots_in(pool, table, tokens, by_slot):
    """Slots of some tokens of a sequence."""
    size = pool.shape[2]
    if by_slot:
        return table[tokens].astype(np.int64)
    return table[tokens // size].astype(np.int64) * size + tokens % size


def gathered(pool, kind, scale, slots):
    """Rows ``(heads, n, dim)`` of some slots."""
    at = places(pool, slots)
    if kind in CHANNELS:
        scale = scale[places(scale, slots // naive.CHANNEL_TOKENS)]
    return values(pool[at], kind, scale[at] if kind in CODES else scale).swapaxes(0, 1)


def softmax(scores, values_, sink):
    """Rows ``(heads, group, n)`` over ``(heads, n, dim)``: results and logs of sums; `sink` is ``(heads, group)``."""
    if not scores.shape[2]:
        return np.zeros((*scores.shape[:2], values_.shape[2])), sink
    top = np.maximum(scores.max(axis=2), sink)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=2) + np.where(sink == top, 1, np.exp(sink - top))
    return weights @ values_ / total[..., None], top + np.log(total)


def capped(scores, cap):
    return cap * np.tanh(scores / cap) if cap > 0 else scores


@operation(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges, by_slot,
    sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    rows, heads, q_heads = floats(q, q_kind), k.shape[1], q.shape[1]
    by_head = (heads, q_heads // heads)
    sink = np.full(by_head, -np.inf)
    if len(sinks):
        sink = sinks[:q_heads].astype(np.float64).reshape(by_head)
        sink = np.where(np.isnan(sink), -np.inf, sink)
    slopes = (
        sinks[q_heads:].astype(np.float64).reshape(*by_head, 1) if len(sinks) > q_heads else None
    )
    capacity = block_table.shape[1] * (1 if by_slot else k.shape[2])
    sight = Sight(len(q), ranges, seq_lens, q_starts, window_left, capacity)
    for b in range(len(q_starts) - 1):
        queries = list(sight.of(b))
        tokens = np.unique(
            np.concatenate([np.empty(0, np.int64), *(seen for _, _, seen, _ in queries)])
        )
        slots = slots_in(k, block_table[b], tokens, by_slot)
        there = (slots >= 0) & (slots < k.shape[0] * k.shape[2])  # of others CUDA knows no better
        tokens, slots = tokens[there], slots[there]
        keys, rows_v = gathered(k, k_kind, k_scale, slots), gathered(v, v_kind, v_scale, slots)
        for i, position, seen, where in queries:
            if not there.all():
                seen, where = seen[np.isin(seen, tokens)], where[np.isin(seen, tokens)]
            at = np.searchsorted(tokens, seen)
            at = slice(at[0], at[-1] + 1) if len(at) and at[-1] - at[0] == len(at) - 1 else at
            query = rows[i].reshape(*by_head, -1)
            scores = capped(query @ keys[:, at].swapaxes(1, 2) * sm_scale, logits_soft_cap)
            if slopes is not None:
                scores = scores - slopes * np.abs(position - where)
            result, log = softmax(scores, rows_v[:, at], sink)
            result = stored(result.reshape(1, q_heads, -1), q_kind, None, out.dtype, None)[0]
            out[i] = result[0]
            if lse.size:
                lse[i] = log.ravel()


@operation(Operations.attention_weights)
def attention_weights(
    q, q_kind, k, k_kind, k_scale, block_table, seq_lens, q_starts, ranges, by_slot, lse, sm_scale,
    logits_soft_cap, window_left, weights,
):  # fmt: skip
    rows, heads = floats(q, q_kind), k.shape[1]
    group, columns = q.shape[1] // heads, weights.shape[2]
    capacity = block_table.shape[1] * (1 if by_slot else k.shape[2])
    sight = Sight(len(q), ranges, seq_lens, q_starts, window_left, capacity)
    if len(ranges):
        sight.lens = seq_lens
    total = np.zeros(weights.shape)
    for b in range(len(q_starts) - 1):
        for i, _, seen, _ in sight.of(b):
            seen = seen[seen < columns]
            keys = gathered(k, k_kind, k_scale, slots_in(k, block_table[b], seen, by_slot))
            query = rows[i].reshape(heads, group, -1)
            scores = capped(query @ keys.swapaxes(1, 2) * sm_scale, logits_soft_cap)
            of_row = lse[i].astype(np.float64).reshape(heads, group, 1)
            total[b][:, seen] += np.exp(scores - of_row).sum(axis=1)
    weights[...] = total


@operation(Operations.merge_states)
def merge_states(o_a, lse_a, o_b, lse_b, kind, out, lse):
    a, b = lse_a.astype(np.float64), lse_b.astype(np.float64)
    top = np.where((b > a) | np.isnan(b), b, a)
    w_a, w_b = np.where(a == top, 1, np.exp(a - top)), np.where(b == top, 1, np.exp(b - top))
    total = w_a + w_b
    nothing = top == -np.inf
    w_a, w_b = (np.where(nothing, 0, w / total)[..., None] for w in (w_a, w_b))
    parts = [np.where(w == 0, 0, w * floats(o, kind)) for w, o in ((w_a, o_a), (w_b, o_b))]
    lse[...] = np.where(nothing, top, top + np.log(total))
    out[...] = stored(parts[0] + parts[1], kind, None, out.dtype, None)[0]


@operation(Operations.small_append)
def small_append(rows_kind, pool_kind, by_slot):
    return None


@operation(Operations.small_copy)
def small_copy(rows_kind):
    return None


@operation(Operations.small_write)
def small_write(qkv_kind, k_kind, v_kind, compute, table, by_slot):
    return None


@operation(Operations.small_decode)
def small_decode(q_kind, k_kind, v_kind):
    return None


@operation(Operations.append_attend)
def append_attend(q_kind, rows_kind, k_kind, v_kind, by_address=False, in_full=None):
    return None
