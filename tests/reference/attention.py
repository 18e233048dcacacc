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
        """A sequence's queries, tokens that any of them may see, who sees which, and how far these are from it."""
        first, last = int(self.starts[b]), int(self.starts[b + 1])
        queries = np.arange(first, min(last, self.tokens))
        length = int(self.lens[b])
        position = length - last + queries
        begin = np.zeros(len(queries), np.int64)
        if len(self.ranges):
            rows = self.ranges[queries].astype(np.int64)
            begin, end = np.maximum(rows[:, 0], 0), np.minimum(rows[:, 1], length)
        else:
            end = np.minimum(position + 1, length)
            if self.window_left >= 0:
                begin = np.maximum(0, position - self.window_left)
        some = begin < end
        tokens = np.arange(begin[some].min(initial=length), end[some].max(initial=0))
        seen = (tokens >= begin[:, None]) & (tokens < end[:, None])
        where = tokens[None]
        if len(self.ranges) and rows.shape[1] > 2:
            plain, position = rows[:, 2:3], rows[:, 3]
            words = np.ascontiguousarray(rows[:, 4:].astype(np.uint32))
            bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(np.int64)
            column = np.zeros((len(bits), 1), np.int64)
            j = tokens - plain
            at = np.clip(j, 0, bits.shape[1])
            seen &= (j < 0) | (np.take_along_axis(np.append(bits, column, 1), at, 1) != 0)
            below = np.append(column, np.cumsum(bits, axis=1), 1)
            where = np.where(j <= 0, tokens, plain + np.take_along_axis(below, at, 1))
        return queries, tokens, seen, np.abs(position[:, None] - where)


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


def softmax(scores, seen, values_, sink):
    """Rows ``(heads, n, group, tokens)``, which change, over ``(heads, tokens, dim)``: results and logs of sums.

    `sink` is ``(heads, 1, group)``.
    """
    hidden, nothing = ~seen[:, None], ~seen.any(axis=1)[:, None]
    np.copyto(scores, -np.inf, where=hidden)
    top = np.maximum(scores.max(axis=3, initial=-np.inf), sink)
    scores -= top[..., None]
    np.copyto(scores, 0, where=hidden)  # NumPy takes thrice as long for what is not finite
    weights = np.exp(scores, out=scores)
    np.copyto(weights, 0, where=hidden)
    total = weights.sum(axis=3) + np.where(sink == top, 1, np.exp(sink - top))
    if np.isfinite(values_).all():
        result = weights @ values_[:, None]
    else:  # nothing times what is hidden would be NaN
        rows = [weights[:, i][..., row] @ values_[:, row] for i, row in enumerate(seen)]
        result = np.stack(rows, axis=1)
    result /= total[..., None]
    return np.where(nothing[..., None], 0, result), np.where(nothing, sink, top + np.log(total))


def scores_of(q, keys, sm_scale, cap):
    """Scores ``(heads, n, group, tokens)`` of queries ``(n, q heads, dim)`` and keys ``(heads, tokens, dim)``."""
    (n, q_heads, dim), (heads, tokens, _) = q.shape, keys.shape
    group = q_heads // heads
    query = q.reshape(n, heads, group, dim).swapaxes(0, 1).reshape(heads, n * group, dim)
    scores = (query @ keys.swapaxes(1, 2) * sm_scale).reshape(heads, n, group, tokens)
    return cap * np.tanh(scores / cap) if cap > 0 else scores


#: Scores that are computed at once.
BATCH = 2**18


def batches(count, scores):
    """Slices of so many queries, each of which has so many scores."""
    size = max(1, BATCH // max(1, scores))
    return [slice(n, n + size) for n in range(0, count, size)]


@operation(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges, by_slot,
    sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    rows, heads = floats(q, q_kind), k.shape[1]
    by_head = (heads, 1, q.shape[1] // heads)
    sink = np.full(by_head, -np.inf)
    if len(sinks):
        sink = sinks[: q.shape[1]].astype(np.float64).reshape(by_head)
        sink = np.where(np.isnan(sink), -np.inf, sink)
    slopes = sinks[q.shape[1] :].astype(np.float64).reshape(-1)
    capacity = block_table.shape[1] * (1 if by_slot else k.shape[2])
    sight = Sight(len(q), ranges, seq_lens, q_starts, window_left, capacity)
    for b in range(len(q_starts) - 1):
        queries, tokens, seen, distance = sight.of(b)
        slots = slots_in(k, block_table[b], tokens, by_slot)
        there = (slots >= 0) & (slots < k.shape[0] * k.shape[2])  # of others CUDA knows no better
        seen, slots = seen[:, there], slots[there]
        distance = np.broadcast_to(distance, (len(queries), len(tokens)))[:, there]
        keys, rows_v = gathered(k, k_kind, k_scale, slots), gathered(v, v_kind, v_scale, slots)
        for some in batches(len(queries), len(slots) * q.shape[1]):
            scores = scores_of(rows[queries[some]], keys, sm_scale, logits_soft_cap)
            if len(slopes):
                scores = scores - slopes.reshape(*by_head, 1) * distance[some, None]
            result, log = softmax(scores, seen[some], rows_v, sink)
            result = result.swapaxes(0, 1).reshape(len(queries[some]), *out.shape[1:])
            out[queries[some]] = stored(result, q_kind, None, out.dtype, None)[0]
            if lse.size:
                lse[queries[some]] = log.swapaxes(0, 1).reshape(len(queries[some]), q.shape[1])


@operation(Operations.attention_weights)
def attention_weights(
    q, q_kind, k, k_kind, k_scale, block_table, seq_lens, q_starts, ranges, by_slot, lse, sm_scale,
    logits_soft_cap, window_left, weights,
):  # fmt: skip
    rows, heads = floats(q, q_kind), k.shape[1]
    capacity = block_table.shape[1] * (1 if by_slot else k.shape[2])
    sight = Sight(len(q), ranges, seq_lens, q_starts, window_left, capacity)
    if len(ranges):
        sight.lens = seq_lens
    total = np.zeros(weights.shape)
    for b in range(len(q_starts) - 1):
        queries, tokens, seen, _ = sight.of(b)
        seen, tokens = seen[:, tokens < weights.shape[2]], tokens[tokens < weights.shape[2]]
        keys = gathered(k, k_kind, k_scale, slots_in(k, block_table[b], tokens, by_slot))
        for some in batches(len(queries), len(tokens) * q.shape[1]):
            scores = scores_of(rows[queries[some]], keys, sm_scale, logits_soft_cap)
            of_row = lse[queries[some]].astype(np.float64).reshape(-1, heads, scores.shape[2])
            found = np.exp(scores - of_row.swapaxes(0, 1)[..., None])
            total[b][:, tokens] += np.where(seen[some, None], found, 0).sum(axis=(1, 2))
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


@operation(Operations.append_attend)
def append_attend(q_kind, rows_kind, k_kind, v_kind, by_address=False, in_full=None):
    return None
