"""Drop the half of a cache that gets the least attention, and shift the keys of what stays.

A tally counts how much attention each token has had. `heavy_hitters` names the tokens to keep (H2O), `compact` moves
them to the front, blocks that have become empty go back to the pool.
"""

import numpy as np

import numkv

KV_HEADS, Q_HEADS, DIM, BLOCK = 2, 8, 64, 16


def main(tokens=128, steps=32):
    rng = np.random.default_rng(0)
    angles = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    shift = numkv.rope_shift(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    blocks = -(-(tokens + steps) // BLOCK)
    layer = numkv.PagedLayer(blocks, BLOCK, KV_HEADS, DIM, kind="int8")
    tally = numkv.AttentionTally(KV_HEADS)
    loud = rng.choice(tokens, 8, replace=False)  # tokens that every query looks for

    for new in (tokens, *[1] * steps):  # a prompt, then token by token
        k, v = rng.standard_normal((2, new, KV_HEADS, DIM), dtype=np.float32)
        if new == tokens:
            k[loud] += 0.4
        layer.append(k, v)
        q = rng.standard_normal((new, Q_HEADS, DIM), dtype=np.float32) + 1
        out, lse = layer.decode_attention(q, return_lse=True)
        tally.add(layer.attention_weights(q, lse=lse))

    numkv.show(layer)
    keep = numkv.compaction.heavy_hitters(
        tally.weights, num_keep=layer.seq_len // 2, num_first=4, num_recent=16
    )
    share = tally.weights[:, keep].sum() / tally.weights.sum()
    print(
        f"the {len(keep)} of {layer.seq_len} tokens that stay have had {share:.0%} of all attention"
    )
    layer.compact(keep, shift=shift)  # rows as they are stored; keys turned to their new positions
    tally.compact(keep)
    numkv.show(layer)
    return layer, loud, keep


if __name__ == "__main__":
    main()
