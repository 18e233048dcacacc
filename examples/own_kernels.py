"""Your own kernels over numkv's memory: attention in `@njit` over paged INT8, and norms of keys in `@cuda.jit`.

Where there is no GPU, NUMBA_ENABLE_CUDASIM=1 runs the second one.
"""

import numpy as np
from numba import cuda, njit

import numkv
from numkv import device

KV_HEADS, Q_HEADS, DIM = 2, 4, 64
load, slot_of = device.load_row("int8"), device.slot_of


@njit
def attention(a, i, q, out):
    """Attention of one query token (q heads, dim) over row i of the table: a softmax that is computed as rows come."""
    group = q.shape[0] // a.k.shape[1]
    row = np.empty(q.shape[1], np.float32)
    for h in range(q.shape[0]):
        most, total = -np.inf, 0.0
        out[h] = 0
        for position in range(a.context_lens[i]):
            slot = slot_of(a.block_table[i], position, a.k.shape[2])
            load(a.k, a.k_scale, slot, h // group, row)  # codes times scale
            score = (q[h] * row).sum() / np.sqrt(q.shape[1])
            higher = max(most, score)
            shrink, weight = np.exp(most - higher), np.exp(score - higher)
            load(a.v, a.v_scale, slot, h // group, row)
            out[h] = out[h] * shrink + weight * row
            total, most = total * shrink + weight, higher
        out[h] /= total


@cuda.jit
def norms_of_keys(a, i, head, out):
    """The length of each key of one head: a thread for each token."""
    position = cuda.grid(1)
    if position < a.context_lens[i]:
        row = cuda.local.array(64, np.float32)
        load(a.k, a.k_scale, slot_of(a.block_table[i], position, a.k.shape[2]), head, row)
        total = np.float32(0)
        for d in range(64):
            total += row[d] * row[d]
        out[position] = total**0.5


def filled(target, tokens):
    """A paged cache with two sequences of which the second one counts."""
    cache = numkv.PagedKVCache(1, KV_HEADS, DIM, num_blocks=8, kind="int8", target=target)
    rows = np.random.default_rng(0).standard_normal(
        (2, 2 + tokens, KV_HEADS, DIM), dtype=np.float32
    )
    step = cache.reserve([cache.add(), cache.add()], [2, tokens])
    step.append(0, *(cuda.to_device(x) for x in rows) if target == "cuda" else rows)
    cache.commit(step)
    return cache, rows[0, 2:]


def main(tokens=50):
    cache, _ = filled("cpu", tokens)
    q = np.random.default_rng(1).standard_normal((Q_HEADS, DIM), dtype=np.float32)
    out = np.empty_like(q)
    attention(cache.arrays(0), 1, q, out)
    theirs = cache.decode_attention(0, [1], q[None])[0]
    print(f"@njit: largest difference from decode_attention {abs(out - theirs).max():.1e}")
    if cuda.is_available():
        cache, keys = filled("cuda", 3)
        norms = cuda.to_device(np.zeros(3, np.float32))
        launch = norms_of_keys[1, 32]  # blocks, threads
        launch(cache.arrays(0), 1, 1, norms)
        right = np.linalg.norm(keys[:, 1], axis=1)
        print(f"@cuda.jit: norms {norms.copy_to_host()}, of the floats {right}")
    return out, theirs


if __name__ == "__main__":
    main()
