"""Sparse reading of a paged sequence in float64: bounds of blocks, the choice of each kv head, attention."""

import naive
import numpy as np


def bounds(k, size):
    """The least and the largest element of each column of each block: ``(blocks, heads, dim)`` each."""
    blocks = [k[n : n + size] for n in range(0, len(k), size)]
    return np.stack([x.min(0) for x in blocks]), np.stack([x.max(0) for x in blocks])


def choice(q, k, size, most, first=1, newest=1, scale=1.0):
    """Blocks that each kv head reads; `q` is ``(q heads, dim)``, `k` ``(tokens, kv heads, dim)``."""
    low, high = bounds(k, size)
    count, heads = low.shape[:2]
    if count <= most:
        return [list(range(count))] * heads
    found = []
    for h, queries in enumerate(np.split(scale * np.asarray(q, np.float64), heads)):
        scores = (
            np.maximum(queries[:, None] * low[:, h], queries[:, None] * high[:, h]).sum(-1).max(0)
        )
        always = {*range(first), *range(count - newest, count)}
        rest = sorted((n for n in range(count) if n not in always), key=lambda n: (-scores[n], n))
        found.append(sorted(always | set(rest[: most - len(always)])))
    return found


def attention(
    q, k, v, size, most, *, first=1, newest=1, sm_scale=None, sinks=None, logits_soft_cap=0.0, coded=None
):  # fmt: skip
    """Output ``(q heads, dim)`` and lse of one query, the newest of `k` and `v` ``(tokens, kv heads, dim)``.

    `coded` are the keys of tokens from the first on as their codes say, and how many of these are in full in `k`: they
    are read in any case, and so are tokens for which there are no codes. Blocks are chosen of the others.
    """
    k, v = (np.asarray(x, np.float64) for x in (k, v))
    scale = 1 / np.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    group, out, lse = q.shape[0] // k.shape[1], [], []
    codes, begin = (k, 0) if coded is None else coded
    tokens, end, first = np.arange(len(k)), len(codes), max(first, -(-begin // size))
    chosen = choice(q, codes, size, most, first, newest, scale) if end else [[]] * k.shape[1]
    for h, blocks in enumerate(chosen):
        seen = tokens[(tokens < begin) | (tokens >= end) | np.isin(tokens // size, blocks)]
        own = slice(h * group, (h + 1) * group)
        got = naive.attention(
            q[None, own], k[seen, h][None, None], v[seen, h][None, None], [len(seen)], sm_scale=scale,
            sinks=None if sinks is None else sinks[own], logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        out.append(got[0][0])
        lse.append(got[1][0])
    return np.concatenate(out), np.concatenate(lse)
