"""The choice of blocks by a query."""

import numpy as np

from numkv.kernels.operations import Operations
from reference.attention import gathered
from reference.rows import floats, operation


@operation(Operations.key_bounds)
def key_bounds(k, k_kind, k_scale, blocks, counts, low, high):
    for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        if not 0 <= block < len(k):
            continue
        slots = block * k.shape[2] + np.arange(min(max(count, 0), k.shape[2]))
        x = gathered(k, k_kind, k_scale, slots)
        bad = np.isnan(x).any(axis=1)
        low[block] = np.where(bad, -np.inf, x.min(axis=1, initial=np.inf))
        high[block] = np.where(bad, np.inf, x.max(axis=1, initial=-np.inf))


@operation(Operations.block_scores)
def block_scores(q, q_kind, low, high, block_table, seq_lens, block_size, sm_scale, scores):
    heads = low.shape[1]
    rows = floats(q, q_kind).reshape(len(q), heads, -1, q.shape[2]) * sm_scale
    scores[...] = -np.inf
    for b, n in enumerate(seq_lens.tolist()):
        used = min(-(-n // block_size), scores.shape[2])
        for j, block in enumerate(block_table[b, :used].tolist()):
            below, above = (x[block].astype(np.float64)[:, None] for x in (low, high))
            found = (np.minimum(rows[b], 0) * below + np.maximum(rows[b], 0) * above).sum(axis=2)
            found = np.where(np.isnan(found), np.inf, found).max(axis=1, initial=-np.inf)
            scores[b, :, j] = np.where(low[block, :, 0] <= high[block, :, 0], found, -np.inf)


@operation(Operations.choose_blocks)
def choose_blocks(scores, block_table, seq_lens, block_size, first, newest, tables, lens):
    tables[...] = -1
    most, top = scores.shape[2], tables.shape[2]
    for b, n in enumerate(seq_lens.tolist()):
        used = min(-(-n // block_size), most)
        for h in range(scores.shape[1]):
            of_head = np.where(np.isnan(scores[b, h]), np.inf, scores[b, h]) + 0.0
            always = {*range(first), *range(used - newest, used)} if used > top else {*range(used)}
            rest = sorted({*range(used)} - always, key=lambda j, s=of_head: (-s[j], j))
            chosen = sorted(always | {*rest[: max(top - len(always), 0)]})
            tables[b, h, : len(chosen)] = block_table[b, chosen]
            lens[b, h] = max(len(chosen) - 1, 0) * block_size + n - max(used - 1, 0) * block_size


@operation(Operations.tables_of_heads)
def tables_of_heads(tables, num_kv_heads, out):
    heads = np.arange(tables.shape[1])[:, None] if num_kv_heads > 1 else 0
    numbered = np.where(tables >= 0, tables * num_kv_heads + heads, -1)
    out[...] = numbered.reshape(out.shape)
